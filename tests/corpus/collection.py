# SPDX-License-Identifier: MIT
"""The whole corpus: a file for each kind of mistake, but for fences, which have two."""

from tests.corpus import atomicity, bounds, completion, deadlocks, flags, races, signals, stale, threads, uninitialised

MODULES = (races, signals, flags, stale, completion, atomicity, deadlocks, bounds, uninitialised, threads)

KINDS = [module.label for module in MODULES]

PROGRAMS = [program for kind in KINDS for program in kind.programs]
