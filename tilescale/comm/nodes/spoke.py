# SPDX-License-Identifier: MIT
"""The side of the rendezvous of all nodes but node 0."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

from tilescale.comm.liveness import join, keep_alive
from tilescale.comm.nodes.channel import NodeChannel
from tilescale.comm.nodes.launcher_rendezvous import GONE, LAUNCHERS, JobEnded, LauncherRendezvous, NodeFailure
from tilescale.comm.ports import Ports
from tilescale.comm.trust.handshake import Hello
from tilescale.errors import ForgedMessageError, LaunchError

_JUST_ENDED_S = 10.0
_PAUSE_S = 0.25  # before the next try: node 0 may start later


class Spoke:
    """The other nodes as this one sees them, through node 0; see `OtherNodes`."""

    reserved = None

    def __init__(self, rendezvous: LauncherRendezvous, ranks: int, timeout_s: float):
        self.news: queue.SimpleQueue[object] = queue.SimpleQueue()
        try:
            self._connection, self._line = _joined(rendezvous, time.monotonic() + timeout_s)
            self._connection.settimeout(timeout_s)
            self._line.send(ranks=ranks)
            place = self._line.receive()
        except (OSError, ForgedMessageError) as error:
            raise LaunchError(
                f"node {rendezvous.node} cannot join node 0 at {rendezvous.host}:{rendezvous.port}: "
                f"{str(error).splitlines()[0]}",
                hint="all nodes need the same key (TILESCALE_JOB_KEY_FILE) and number of nodes, and another job must "
                "not use this port; node 0 may have given up: see its output",
            ) from error
        self.first, self.size = int(place["first"]), int(place["size"])
        self.ports = Ports(int(place["store"]), int(place["master"]))
        self._connection.settimeout(None)
        keep_alive(self._connection)
        threading.Thread(target=self._listen, name="tilescale-nodes", daemon=True).start()

    def failed(self, failure: NodeFailure) -> None:
        with contextlib.suppress(OSError):  # node 0 is gone: that is news already
            self._line.send(**vars(failure))

    def ended(self) -> None:
        with contextlib.suppress(OSError):
            self._line.send()

    def close(self) -> None:
        """Leave; the others take this node for lost if it has not said how it ended."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _listen(self) -> None:
        try:
            message = self._line.receive()
        except (OSError, ForgedMessageError) as error:
            self.news.put(NodeFailure(GONE, f"node 0 is gone (launcher: {self._line.process}): {error}"))
            return
        self.news.put(NodeFailure(int(message["code"]), str(message["text"])) if message else JobEnded())


def _connected(rendezvous: LauncherRendezvous, end: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((rendezvous.host, rendezvous.port), max(0.1, end - time.monotonic()))
        except OSError as error:
            if time.monotonic() > end:
                raise LaunchError(
                    f"node {rendezvous.node} finds no launcher at {rendezvous.host}:{rendezvous.port}: "
                    f"{error.strerror or error}",
                    hint="start `tilescale run` with --node-rank 0 on the node that --rdzv names; no firewall may be "
                    "between",
                ) from error
            time.sleep(_PAUSE_S)


def _joined(rendezvous: LauncherRendezvous, end: float) -> tuple[socket.socket, NodeChannel]:
    """A connection to node 0 that both sides trust. A job that has just ended there may be the first to answer."""
    again = min(end, time.monotonic() + _JUST_ENDED_S)
    while True:
        connection = _connected(rendezvous, end)
        try:
            connection.settimeout(max(0.1, end - time.monotonic()))
            return connection, _proven(connection, rendezvous)
        except BaseException as error:
            connection.close()
            if not isinstance(error, ConnectionError) or time.monotonic() > again:
                raise
            time.sleep(_PAUSE_S)


def _proven(connection: socket.socket, rendezvous: LauncherRendezvous) -> NodeChannel:
    key = rendezvous.key.of_job(LAUNCHERS)
    joined_before = LaunchError(
        f"node {rendezvous.node} of this job has joined before",
        hint="give each node its own --node-rank, from 0 to one less than --nnodes",
    )
    job, process = join(connection, Hello(key, rendezvous.node), joined_before)
    return NodeChannel(connection, key.of_job(job), rendezvous.node, 0, process)
