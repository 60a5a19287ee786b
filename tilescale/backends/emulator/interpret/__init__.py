# SPDX-License-Identifier: MIT
"""Statements and expressions of TIR as closures over frames.

    symbols.py      declarations of a program: slots, owners, views, replicas; flags.py finds flags
    compiler.py     one program for one machine: dispatch to the rules, scales, memory of units
    registry.py     the tables of rules, which this package and operations fill
    closures.py     the results of rules
    phases.py       launches and phases
    lockstep.py     a statement of many programs at a time, where independence.py finds them independent
    statements.py branches.py expr.py vectors.py    the rules of TIR; draws.py has random numbers in parallel loops
    addresses.py    tensors whose address is in memory
    buffers.py access.py slices.py regions.py       buffers in a frame, of packed elements too; their elements, regions
    reducers.py     contributions to reducers
    scales.py       `T.Scale` regions and views; selections.py has views without strides
    abstract.py     abstract execution: runs in which tiles have no values
    instrumentation.py      the compiler's interface to the recording of costs
"""
