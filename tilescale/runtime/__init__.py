# SPDX-License-Identifier: MIT
"""From a traced function to a callable kernel."""
