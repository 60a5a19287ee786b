# SPDX-License-Identifier: MIT
"""The algorithms: every file here has the records of a family in `ALGORITHMS`."""
