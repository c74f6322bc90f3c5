"""jdp launch: one script as several processes, on this machine or as one node of many.

Read `options.py`, `workers.py` with `guard.py`, `output.py`, and `cli.py`, where they come together. `protocol.py` has
the names that the launcher and its processes share.
It has the standard library alone: the launcher starts in milliseconds, and never starts JAX.
"""
