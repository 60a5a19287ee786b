# SPDX-License-Identifier: MIT
"""Statements and expressions of TIR as closures over frames.

    symbols.py      what a program declares: slots, owners, views, replicas; flags.py says what is a flag
    compiler.py     one program for one machine: dispatch to the rules, scales, memory that units are given
    registry.py     the tables of rules, which this package and operations fill
    closures.py     what rules return
    phases.py       launches and phases
    statements.py branches.py expr.py vectors.py    the rules of TIR
    addresses.py    tensors whose address is in memory; packed.py has views of elements that share a byte
    buffers.py access.py slices.py regions.py       how buffers are found; their elements and regions
    reducers.py     contributions to reducers
    scales.py       `T.Scale` regions and views; selections.py has those that no strides describe
    abstract.py     abstract execution: runs in which tiles have no values
    instrumentation.py      what the compiler asks of who wants to write down costs
"""
