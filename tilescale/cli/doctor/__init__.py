# SPDX-License-Identifier: MIT
"""`tilescale doctor`: what a machine, or a job, can do, and why not."""
