"""jdp launch: one script as several processes, on this machine or as one node of many.

In reading order:

    protocol.py     the exit code on which the launcher and its processes agree
    options.py      the command line, checked before anything starts
    environment.py  what each process finds in its environment
    workers.py      the processes of one attempt: started together, watched, ended together
    guard.py        ends the processes where the launcher was killed; a script of its own
    output.py       their output as one: whole lines, each behind its rank
    cli.py          the job: attempts, restarts, signals, the code to exit with

It has the standard library alone: the launcher starts in milliseconds, and never starts JAX. Only `jdp/__main__.py`
imports it; `protocol.py` is also for `_processes` and `_doctor`.
"""
