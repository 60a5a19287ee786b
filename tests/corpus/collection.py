# SPDX-License-Identifier: MIT
"""The whole corpus: a file for each kind of mistake, but for fences, which have three."""

from tests.corpus import atomicity, bounds, deadlocks, flags, peers, races, signals, stale, threads, uninitialised

MODULES = (races, signals, flags, stale, peers, atomicity, deadlocks, bounds, uninitialised, threads)

KINDS = [module.label for module in MODULES]

PROGRAMS = [program for kind in KINDS for program in kind.programs]
