"""`jdp doctor`: what this machine has, and whether its devices and links work. It never hangs.

Read `cli.py`, `examine.py`, and both sides of a test: `watch.py`, which asks and waits, and `worker.py`, which answers.
`deterministic.py` is the test of `--deterministic`. What needs no test is in `machine.py` and `advice.py`. `report.py`
prints all of it.
"""
