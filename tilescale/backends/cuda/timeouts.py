# SPDX-License-Identifier: MIT
"""What a wait that ran out of time left behind, as an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilescale.backends.cuda.signature import Site
from tilescale.errors import WaitTimeoutError

if TYPE_CHECKING:
    import torch

COMPLETE = 2
FIELDS = ("state", "site", "program", "index", "expected", "seen")
"""The first words of a record, in the order of `Record` in headers/sync.cuh."""


class WaitRecords:
    """The record of one kernel on one device, and its copy on the host."""

    def __init__(self, device: torch.device):
        import torch

        self.device = torch.zeros(8, dtype=torch.int64, device=device)
        self.host = torch.zeros(8, dtype=torch.int64, pin_memory=True)

    def fetch(self) -> None:
        """Copy the record to the host, in the order of the current stream."""
        self.host.copy_(self.device, non_blocking=True)

    def check(self, program: str, rank: int, sites: tuple[Site, ...], limit_ns: int) -> None:
        """Raise if the last record that arrived says that a wait ran out of time; waits work again afterwards.

        Raises:
            WaitTimeoutError: which wait, on which program, expecting what.
        """
        values = dict(zip(FIELDS, self.host.tolist(), strict=False))
        if values["state"] != COMPLETE:
            return
        self.device.zero_()
        self.host.zero_()
        site = sites[values["site"]]
        raise WaitTimeoutError(
            f"{program} on rank {rank}: {site.what} waited longer than {limit_ns / 1e9:g} s: program "
            f"{values['program']}, element {values['index']}, expected {values['expected']}, seen {values['seen']}",
            hint="another rank did not signal: look whether it runs the same program, in the same order, and is alive",
            where=site.where,
        )
