"""Descriptions of absent machines, which suffice to compile for them. Read `topology.py` first.

`chips.py` has the figures of each chip, and `quiet.py` keeps what the compilers log out of the terminal.
"""
