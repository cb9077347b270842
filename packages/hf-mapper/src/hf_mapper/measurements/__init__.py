"""Measured tables and runs against the simulators: rows become cases, cases give errors and fitted constants.

What lives here: everything that reads a measurement. What must not: formulas, which are in `simulators`, shipped
constants, which are in `constants.toml`, and knowledge of placements.
"""
