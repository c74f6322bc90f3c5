"""`jdp.explain`: what a compiled call does, without running it.

Read `explain.py`, `calls.py` (which captures the program of a call) and `report.py`. `hlo.py`, `collectives.py` and
`cost.py` read the text of the program; `estimate.py` follows its schedule.
"""
