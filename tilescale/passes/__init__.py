# SPDX-License-Identifier: MIT
"""Passes over traced programs, one a file:

    pipeline.py   all of them in their order
    structure.py  takes a function apart into launches and phases
    rematerialize.py  gives each phase the values of earlier ones that it uses
    validate.py   checks what only shows then; upstream_rules.py: loops that TileLang refuses
    smem_capacity.py  whether tiles fit shared memory together
    uniformity.py whether threads come together to what their unit executes as one
    scratch.py    device memory of a program as parameters
    retrace.py    traces a program again for another machine
    mod_analysis.py  which arguments a program changes
    declined.py   why a rewrite is not made
    faults.py     reports of errors that no pass has foreseen
"""
