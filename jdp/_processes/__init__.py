"""The processes of one job tell each other what each must know of the others. No meshes here, no replicas.

In reading order:

    coordination.py       JAX's coordination service, as a few functions; `DesyncError`
    watch.py              where each process is; who waits too long for the others learns where these are
    exchange.py           each process leaves a text for a call, and reads everybody's; who waits learns for whom
    agree.py              all processes are about to run the same program
    launchers.py          what torchrun, MPI, SkyPilot and Ray say to the processes that they start
    initialize.py         `jdp.distributed.initialize`: how a process joins the job
    compilation_cache.py  what JAX compiles is kept, and a restarted process reads it
    last_words.py         a process that fails says so, and the others end instead of waiting for it

It imports `_jax`, and of `_launch` the protocol. `_core` and the packages above it may import it.
"""
