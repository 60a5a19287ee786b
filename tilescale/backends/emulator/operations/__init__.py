# SPDX-License-Identifier: MIT
"""Semantics of operations, a family a file."""
