"""Below JAX's public surface: what JAX, jaxlib and Flax do not promise, and nothing of jdp.

    private.py         eleven names, each with what is lost without it
    jaxprs.py          walks the equations of a jaxpr, runs them, and tells which values differ between replicas
    rewrites.py        other functions in place of equations, bodies in place of calls
    segments.py        a jaxpr that is cut at some equations
    pieces.py          runs a jaxpr whose parameters are cut over the replicas, each gathered where it is used
    row_traces.py      traces a function for any number of rows
    row_values.py      what is known of a value: how it is made of the rows, and with which power of their number
    row_primitives.py  primitives, sorted by what they do to sums over the rows
    row_terms.py       tells whether a scalar is a mean over the rows
    row_places.py      tells whether each row is made of that row alone
    convolutions.py    convolutions in the layout that is fast on a CPU

Read `private.py` first, then `jaxprs.py`, on which all others stand. Every other package may import them; they import
none.
"""
