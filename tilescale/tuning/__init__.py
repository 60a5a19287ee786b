# SPDX-License-Identifier: MIT
"""Measuring on the machine at hand: calibrations, tuned configurations, races against libraries.

autotune.py search.py              the decorator; configurations traced, estimated, measured
schedules.py                       schedules of collectives, measured
database.py digest.py files.py     results by their conditions; files written in one step
inputs.py checks.py                inputs of timed kernels, and checks of their results
places.py versions.py progress.py  where times come from and how calls are timed, what ran, and a bar
calibrate.py probes.py programs.py measurements of a machine, and their programs
bench.py table.py                  collectives and operators compared with libraries
libraries.py                       the same work by cuBLAS, NCCL and PyTorch
race.py                            interleaved contenders
chart.py curves.py                 pictures of their rows
"""
