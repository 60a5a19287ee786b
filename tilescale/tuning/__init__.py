# SPDX-License-Identifier: MIT
"""Measuring on the machine at hand, and what follows: calibrations, tuned configurations, races against libraries.

autotune.py search.py              the decorator; configurations traced, estimated, measured
schedules.py roles.py              schedules of collectives, measured; the carriers and reducers of configurations
database.py digest.py files.py     what was found, by what it holds for; files written in one step
inputs.py checks.py                what kernels are timed on, and whether they are right
places.py versions.py progress.py  where times come from, what ran, and a bar
calibrate.py probes.py programs.py what is measured of a machine, and the programs by which it is
bench.py table.py                  collectives and operators compared with libraries
libraries.py                       the same work by cuBLAS, NCCL and PyTorch
race.py timers.py                  interleaved contenders, and how a call is timed
chart.py curves.py                 pictures of their rows
"""
