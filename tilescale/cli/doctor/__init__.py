# SPDX-License-Identifier: MIT
"""`tilescale doctor`: what a machine, or a job, can do, and why not.

finding.py   findings and remedies
host.py      checks of this machine
job.py       checks of the ranks of a job, together
command.py   the command: the checks, printed as text or as JSON
"""
