"""`jdp plan`: the training step of a user's script on machines that are not here.

Read `cli.py`, `plan.py`, `script.py`, `lines.py` and `print.py`, in this order: so a plan is made.
"""
