# SPDX-License-Identifier: MIT
"""Ranks of a job: joining it (`init`), the facts about it (`World`), groups of ranks and their collectives (`Team`)."""

from tilescale.comm.team import Team
from tilescale.comm.world import World, current_world, init

__all__ = ["Team", "World", "current_world", "init"]
