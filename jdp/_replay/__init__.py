"""`jdp replay`: one training step of a run once more, with a look at what is not finite in it.

Read `cli.py`, `run.py` and `step.py`: from the command down to the one step. A script is run by `_script.py`, as by
`jdp plan`; its Checkpointers read only, for `_checkpoint/replay.py` tells them.
"""
