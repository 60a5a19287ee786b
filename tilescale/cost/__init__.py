# SPDX-License-Identifier: MIT
"""Cost models of a machine, and the choices that follow from them."""
