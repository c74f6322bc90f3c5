"""Machines that are not here, described well enough to compile for. Read `topology.py` first."""
