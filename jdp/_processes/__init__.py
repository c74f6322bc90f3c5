"""The processes of one job exchange what each must know of the others. There are no meshes here, and no replicas.

In reading order:

    coordination.py       JAX's coordination service, as a few functions; `DesyncError`
    places.py             what a process writes of where it is, and how long the others wait for it
    watch.py              where each process is; a process that waits too long learns where the others are
    exchange.py           each process writes a text for a call, and reads those of all; a wait names the absent
    agree.py              all processes are about to run the same program
    launchers.py          what torchrun, MPI, SkyPilot and Ray say to the processes that they start
    initialize.py         `jdp.distributed.initialize`: how a process joins the job
    compilation_cache.py  keeps what JAX compiles, so that a restarted process reads it
    last_words.py         a process that fails says so, and the others end instead of waiting for it
    hooks.py              how the end of a process comes to be one of these: an exception, `sys.exit`, the last line

It imports `_jax`, and of `_launch` the protocol. `_core` and the packages above it may import it.
"""
