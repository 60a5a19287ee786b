# SPDX-License-Identifier: MIT
"""Cost models of a machine, and the choices that follow from them.

measured.py     points that were measured, as files
records.py      JSON files as typed records
calibrated.py   which measurements are in force, and the machine with their numbers
choose.py       which mechanism moves a tile or tensor, and which implementation a collective takes
operations.py   the same for operations of a program: sizes and memory read off the IR
reach.py        units of a launch that the network of their level links
"""
