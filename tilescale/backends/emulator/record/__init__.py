# SPDX-License-Identifier: MIT
"""The record of a run, which the simulation of time replays."""
