# SPDX-License-Identifier: MIT
"""Passes over traced programs, one a file:

    pipeline.py   all of them in their order
    structure.py  takes a function apart into launches and phases
    carry.py      gives each phase the values of earlier ones that it uses
    validate.py   checks what only shows then; room.py: do tiles fit together; rules.py: loops that TileLang refuses
    uniformity.py whether threads come together to what their unit executes as one
    retrace.py    traces a program again for another machine
    written.py    which arguments a program changes
    declined.py   why a rewrite is not made
"""
