# SPDX-License-Identifier: MIT
"""What things cost on a machine, and the choices that follow.

choose.py       which mechanism moves a tile or tensor, and which implementation a collective takes
operations.py   the same for operations of a program: sizes and memory read off the IR
"""
