"""Descriptions of absent machines, which suffice to compile for them. Read `topology.py` first."""
