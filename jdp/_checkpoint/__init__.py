"""`jdp.Checkpointer`: a training state is saved while training goes on, and restored on any number of devices.

From the class down to the files:

    checkpointer.py  the class
    steps.py         which checkpoint a run goes on from
    preemption.py    a SIGTERM waits for the next save
    items.py         what goes into a checkpoint, and what tells that it is whole
    write.py         writes one beside the training
    read.py          reads one: whole and unharmed, or not at all
    directory.py     the directory: its lock, and which files in it are jdp's

Orbax is imported here and nowhere else. The package imports `_core` and what that may, and nothing of `_train`: a state
is any tree. Only `jdp/__init__.py` imports it.
"""
