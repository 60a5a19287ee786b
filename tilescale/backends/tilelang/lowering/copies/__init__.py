# SPDX-License-Identifier: MIT
"""Copies between units: one file for each mechanism, which registers its rule.

Copies by the host (copy engine, NCCL) have no rule here: they are planned as host steps.
"""
