# SPDX-License-Identifier: MIT
"""`python -m tilescale.cli`: the command line, for launchers that start Python."""

from tilescale.cli import main

main(prog_name="tilescale")
