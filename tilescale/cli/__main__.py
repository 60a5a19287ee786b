# SPDX-License-Identifier: MIT
"""`python -m tilescale.cli`: the command line where no script of it is installed, or as the module of a job."""

from tilescale.cli import main

main(prog_name="tilescale")
