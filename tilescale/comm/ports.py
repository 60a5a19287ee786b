# SPDX-License-Identifier: MIT
"""The two ports of a job that a launcher keeps for rank 0, so that no other program is given them."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from tilescale.comm.admission import BACKLOG


@dataclass(frozen=True)
class Ports:
    """Ports on which the ranks of a job connect.

    Attributes:
        store: rank 0 serves the job's store there.
        master: MASTER_PORT, for a script that starts torch.distributed by itself.
    """

    store: int
    master: int


class ReservedPorts:
    """The sockets of both ports, on the node of rank 0.

    The store's port listens from the beginning, and rank 0 inherits it: another user cannot bind it in between. The
    other one does not listen, as torch.distributed takes no socket from its launcher.

    Attributes:
        store: the socket that listens.
        ports: of both.
    """

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily = socket.AF_INET):
        """Two free ports of an address. Raises OSError."""
        self.store = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        self._master = socket.socket(family)
        try:
            self._master.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._master.bind(address)
        except OSError:
            self.close()
            raise
        self.ports = Ports(self.store.getsockname()[1], self._master.getsockname()[1])

    def hand_over(self) -> None:
        """Rank 0 has the store's socket: from now on rank 0 alone answers there."""
        self.store.close()

    def close(self) -> None:
        """Give both ports back, as far as this process has them."""
        self.store.close()
        self._master.close()
