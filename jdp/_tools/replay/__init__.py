"""`jdp replay`: makes one training step of a run again, and finds what is not finite in it.

Read `cli.py` and `run.py`. `../script.py` runs the script, as for `jdp plan`; `_checkpoint/replay.py` makes its
Checkpointers read-only.
"""
