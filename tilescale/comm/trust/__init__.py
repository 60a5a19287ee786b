# SPDX-License-Identifier: MIT
"""Membership of a job, with the guarantees of docs/security.md."""
