"""`jdp doctor`: what this machine has, and whether its devices and links work. It never hangs.

    cli.py      the command
    machine.py  what can be said without JAX
    examine.py  the order of the tests, and what is made of their answers
    watch.py    asks the process in which they run, and kills it where it does not answer
    worker.py   that process: starts JAX, moves known words between devices, compares and measures
    advice.py   known traps and remedies
    report.py   all of it for people

It imports `_core`, `_jax`, `_tables`, `_version` and the launcher's protocol. Only `jdp/__main__.py` imports it.
"""
