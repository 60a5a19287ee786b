# SPDX-License-Identifier: MIT
"""RMARaceBench's OpenSHMEM programs as TileScale programs, and the emulator's verdicts.

c the C that they are written in, parsed execute one PE executes a program: which thread makes which access and which
call shmem calls of OpenSHMEM: copies, atomics, signals, and synchronization program the text of a TileScale program of
all PEs, and its run table records and tables of the outcomes __main__ runs all
"""
