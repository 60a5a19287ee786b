# SPDX-License-Identifier: MIT
"""`tilescale doctor`: what a machine, or a job, can do, and why not.

finding.py   what a check finds
host.py      checks of this machine
job.py       checks of the ranks of a job, together
command.py   the command: which checks, printed for people or as JSON
"""
