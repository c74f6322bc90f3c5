"""`jdp.explain`: what a compiled call does, without running it.

    explain.py      the function: captures, compiles, reads
    calls.py        takes the program out of a call that is about to run it
    report.py       what the function returns, and how it is printed

What is read in the optimized program's text:

    hlo.py          computations, their instructions, and where values go
    collectives.py  the collectives: what they carry, which parameters that is, and what is computed meanwhile
    cost.py         operations and bytes

It imports `_train`, `_topology`, `_tables` and what they may. `jdp/__init__.py` and `_plan` import it.
"""
