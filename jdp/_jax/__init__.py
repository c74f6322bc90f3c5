"""Below JAX's public surface: what JAX, jaxlib and Flax do not promise, and nothing of jdp.

    private.py         twelve private names, and what is lost without each
    jaxprs.py          walks the equations of a jaxpr, runs them, and tells which values differ between replicas
    callers.py         tells which line, function or module made an equation
    rewrites.py        replaces equations by functions, and calls by their bodies
    segments.py        a jaxpr that is cut at some equations
    pieces.py          runs a jaxpr whose parameters are cut over the replicas, each gathered where it is used
    row_traces.py      traces a function for any number of rows
    row_values.py      what is known of a value: how it is made of the rows, and with which power of their number
    row_primitives.py  primitives, sorted by what they do to sums over the rows
    row_terms.py       tells whether a scalar is a mean over the rows; its rules for special cases:
    row_numbers.py       rows that are combined with a number made of all rows
    row_pairs.py         rows that are combined with rows at other positions, and matrices of all pairs of rows
    row_picks.py         rows that a loop of Python picks one after the other
    row_loops.py         branches, and loops over the rows
    row_backward.py      backward passes of the user's own
    row_places.py      tells whether each row of a result is made of that row alone
    convolutions.py    convolutions in the layout that is fast on a CPU

Begin with `jaxprs.py`; `private.py`, `callers.py` and `row_primitives.py` import nothing else. Every other package may
import them; they import none.
"""
