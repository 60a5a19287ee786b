# SPDX-License-Identifier: MIT
"""From a traced function to a callable kernel.

    compile.py     `tilescale.compile` and `tilescale.jit`
    kernel.py      their result: a program bound to a machine
    bound_program.py    its structure, and as a back end has lowered it
    ahead.py       kernels found by a dry run, compiled all at once
    drop_in.py     the same under the names of TileLang's kernels
    profiler.py    its profiler, where it is emulated
    outputs.py     the argument list of a call, and the tensors that the call allocates
    placement.py   DTensor arguments against the program's views; arguments that peers reach
    schedule_text.py    a program's phases in words
"""
