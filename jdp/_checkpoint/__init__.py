"""`jdp.Checkpointer`: a training state is saved while training goes on, and restored on any number of devices.

Read `checkpointer.py`, `steps.py`, `items.py`, `write.py`, `read.py` and `directory.py`: from the class down to the
files; `ray_run.py` is Ray Train's run, if it is in one, and `replay.py` one that is made again. Nothing of `_train` is
imported here: a state is any tree.
"""
