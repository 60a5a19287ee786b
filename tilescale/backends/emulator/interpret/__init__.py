# SPDX-License-Identifier: MIT
"""Statements and expressions of TIR as closures over frames."""
