"""Below JAX's public surface: what JAX, jaxlib and Flax do not promise, and nothing of jdp.

Read `private.py` (eleven names, each with what is lost without it), then `jaxprs.py` (walks and rewrites jaxprs, runs
them in parts, tells which values differ between replicas), `row_traces.py` (traces a function for any number of rows),
`row_values.py` and `row_terms.py` (tell whether a scalar is a mean over the rows), `row_places.py` (tells whether each
row is made of that row alone), `convolutions.py` (convolutions in the layout that is fast on a CPU) and `pieces.py`
(runs a jaxpr whose parameters are cut over the replicas, each gathered where it is used). Every other package may
import them; they import none.
"""
