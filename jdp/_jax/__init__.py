"""Below JAX's public surface: what JAX, jaxlib and Flax do not promise, and nothing of jdp.

Read `private.py` (ten names, each with what is lost without it), then `jaxprs.py` (walks and rewrites jaxprs, runs them
in parts, tells which values differ between replicas). Every other package may import both; they import none.
"""
