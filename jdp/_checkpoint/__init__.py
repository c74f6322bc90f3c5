"""`jdp.Checkpointer`: a training state is saved while training goes on, and restored on any number of devices.

Read `checkpointer.py`, `steps.py`, `items.py`, `write.py`, `read.py` and `directory.py`: from the class down to the
files. `at_exit.py` is for the end of the program, `ray_run.py` for Ray Train's run, if it is in one, and `replay.py`
for a run that is made again. Nothing of `_train` is imported here: a state is any tree.
"""
