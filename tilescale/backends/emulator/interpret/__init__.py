# SPDX-License-Identifier: MIT
"""Statements and expressions of TIR as closures over frames.

    compiler.py     one program for one machine: names, scales, who owns which buffer; dispatch to the rules
    registry.py     the tables of rules, which this package and operations fill
    statements.py branches.py expr.py     the rules of TIR
    access.py slices.py     elements and regions of buffers
    scales.py       `T.Scale` regions and views
    steps.py flags.py       closures of whole statements; what is a flag
    abstract.py     runs in which tiles have no values
"""
