"""Measured tables and runs against the simulators: rows become cases, cases give errors and fitted constants.

Here lives all that reads a measurement; formulas stay in `simulators`, the shipped constants in `constants.toml`, and
nothing here knows of placements.
"""
