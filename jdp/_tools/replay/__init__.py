"""`jdp replay`: makes one training step of a run again, and finds what is not finite in it.

Read `cli.py`, `run.py` and `step.py`: from the command down to the one step. `../script.py` runs the script, as for
`jdp plan`; `_checkpoint/replay.py` makes its Checkpointers read-only.
"""
