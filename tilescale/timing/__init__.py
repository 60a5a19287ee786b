# SPDX-License-Identifier: MIT
"""Simulated time: durations of a program's steps on a machine, and the time of each step.

    steps.py        the steps of a program, task by task: the input
    record.py       writes them down, loops as wholes; rates.py has what operations demand of a machine
    epilogues.py    records a persistent loop, whose epilogues overlap with the next tile
    united.py       records a cluster that executes as one unit: each program does its share
    replay.py       the simulation; sharing.py has its events and resources, grids.py the programs of a launch
    live.py         a task that runs, and the places where tasks publish and wait
    lockstep.py     units that do the same are simulated once; no_gc.py keeps the others fast too
    moments.py      timelines of launches on GPUs, from what their blocks record
    timeline.py     the result: spans, utilisation, roofline, critical path, waits
    plans.py        costs of the collectives of a launch
    draw/           timelines as text, pictures and traces

It knows neither TIR nor a back end: back ends that run programs record the work.
"""
