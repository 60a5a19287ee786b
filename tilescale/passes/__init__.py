# SPDX-License-Identifier: MIT
"""Passes over traced programs, one a file."""
