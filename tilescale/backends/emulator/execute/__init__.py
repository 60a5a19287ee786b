# SPDX-License-Identifier: MIT
"""Execution of units: coroutines, waits, residency on the machine."""
