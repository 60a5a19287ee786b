# SPDX-License-Identifier: MIT
"""RMARaceBench's OpenSHMEM programs as TileScale programs, and what the emulator says of them.

c           the C that they are written in, parsed
execute     one PE executes a program: which thread makes which access and which call
shmem       what calls of OpenSHMEM do: copies, atomics, signals, and what orders them
program     the text of a TileScale program of all PEs, and its run
table       what is recorded and shown of the outcomes
__main__    runs all
"""
