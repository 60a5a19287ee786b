# SPDX-License-Identifier: MIT
"""Measuring on the machine at hand, and what follows: calibrations, tuned configurations, races against libraries.

race.py timers.py      contenders in turns, and how a call is timed
chart.py curves.py     pictures of their rows
"""
