# SPDX-License-Identifier: MIT
"""Programs of a cluster, through each other's shared memory."""
