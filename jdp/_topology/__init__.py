"""Descriptions of machines that are not here, sufficient to compile for them. Read `topology.py` first."""
