# SPDX-License-Identifier: MIT
"""Simulated time: durations of a program's steps on a machine, and the time of each step.

It knows neither TIR nor a back end: back ends that run programs record the work.
"""
