"""Machines that are not here, described well enough to compile for.

    chips.py     what each kind of GPU and TPU can do, with where each figure was published
    topology.py  `jdp.topology`: the devices of such a machine
    quiet.py     keeps what their compilers log out of the terminal; also run as a script

It imports `_core.devices` alone; `_explain` and `_plan` may import it.
"""
