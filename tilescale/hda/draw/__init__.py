# SPDX-License-Identifier: MIT
"""Pictures of a machine: `terminal` for a console, `svg` for a file or a notebook."""
