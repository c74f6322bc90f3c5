"""`jdp.Checkpointer`: a training state is saved while training goes on, and restored on any number of devices.

Read `checkpointer.py`, `steps.py`, `items.py`, `write.py`, `read.py` and `directory.py`: from the class down to the
files. `preemption.py` handles a SIGTERM, `ray_run.py` a run of Ray Train, and `replay.py` a run that is replayed.
Nothing of `_train` is imported here: a state is any tree.
"""
