# SPDX-License-Identifier: MIT
"""Measuring on the machine at hand: calibrations, tuned configurations, races against libraries."""
