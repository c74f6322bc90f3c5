"""`jdp.explain`: what a compiled call does, without running it.

Read `explain.py`, `calls.py` (the program, out of the call that is about to run it) and `report.py`. The text of the
program is read in `hlo.py`, `collectives.py` and `cost.py`; `estimate.py` follows its schedule.
"""
