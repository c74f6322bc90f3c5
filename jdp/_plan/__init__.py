"""`jdp plan`: the training step of a user's script on machines that are not here.

    cli.py       the command
    script.py    takes the step out of the script
    lines.py     compiles it for one machine: what it needs, how many rows fit, how long it should take
    estimate.py  the time of a program, by walking its schedule
    print.py     the plan as a table, as JSON, as a picture

It imports `_explain` and what that may. Only `jdp/__main__.py` imports it.
"""
