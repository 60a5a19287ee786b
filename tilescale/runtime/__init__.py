# SPDX-License-Identifier: MIT
"""From a traced function to something a user calls: `compile.py`, `jit.py`, the bound kernel, its outputs."""
