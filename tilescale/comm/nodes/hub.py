# SPDX-License-Identifier: MIT
"""Node 0's side of the rendezvous: it lets the other launchers in, gives out ranks, and passes on the first failure.

A thread serves each launcher that has proven to belong to the job.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading

from tilescale.comm.admission import BACKLOG, Admission
from tilescale.comm.liveness import receive
from tilescale.comm.nodes.channel import NodeChannel
from tilescale.comm.nodes.launcher_rendezvous import GONE, LAUNCHERS, JobEnded, LauncherRendezvous, News, NodeFailure
from tilescale.comm.ports import ReservedPorts
from tilescale.comm.trust.handshake import new_nonce
from tilescale.errors import ForgedMessageError, LaunchError


class Hub:
    """The other nodes as node 0 sees them; see `OtherNodes`."""

    first = 0

    def __init__(self, rendezvous: LauncherRendezvous, ranks: int, timeout_s: float):
        self.news: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._rendezvous, self._key, self._job = rendezvous, rendezvous.key.of_job(LAUNCHERS), new_nonce()
        self._changed = threading.Condition()
        self._lines: dict[int, NodeChannel] = {}
        self._connections: list[socket.socket] = []
        self._ranks = {0: ranks}
        self._ended: set[int] = set()
        self._over: News | None = None
        listener, self.reserved = _listening(rendezvous)
        self.ports = self.reserved.ports
        self._admission = Admission(listener, self._key, self._job, rendezvous.nodes, self._joined, "tilescale-nodes")
        self._admission.start()
        try:
            self._wait_for_all(timeout_s)
        except BaseException:
            self.close()
            raise
        self.size = sum(self._ranks.values())

    def failed(self, failure: NodeFailure) -> None:
        self._finish(failure, origin=0)

    def ended(self) -> None:
        self._has_ended(0)

    def close(self) -> None:
        """Leave; the others take this node for lost if the job is not over."""
        self._admission.close()
        for connection in self._connections:
            _shut(connection)  # wakes the thread that waits there
        self.reserved.close()

    def _wait_for_all(self, timeout_s: float) -> None:
        nodes = self._rendezvous.nodes
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._ranks) == nodes, timeout_s):
                missing = sorted(set(range(nodes)) - set(self._ranks))
                raise LaunchError(
                    f"nodes {missing} have not come to {self._rendezvous.host}:{self._rendezvous.port} within "
                    f"{timeout_s:g} s",
                    hint="start `tilescale run` on each node, with its own --node-rank and the same --rdzv and key; "
                    "see whether the node reaches this port",
                )

    def _joined(self, connection: socket.socket, node: int, process: str) -> None:
        connection.setblocking(True)
        with self._changed:
            self._lines[node] = NodeChannel(connection, self._key.of_job(self._job), 0, node, process)
            self._connections.append(connection)
        threading.Thread(target=self._serve, args=(connection, node), daemon=True).start()

    def _serve(self, connection: socket.socket, node: int) -> None:
        with connection:
            try:
                self._listen_to(connection, node)
            except (OSError, ForgedMessageError) as error:
                text = f"node {node} is gone (launcher: {self._lines[node].process}): {error}"
                self._finish(NodeFailure(GONE, text), origin=node)

    def _listen_to(self, connection: socket.socket, node: int) -> None:
        line, nodes = self._lines[node], self._rendezvous.nodes
        ranks = int(line.receive()["ranks"])
        with self._changed:
            self._ranks[node] = ranks
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._ranks) == nodes or self._over is not None)
            first = sum(self._ranks[other] for other in range(node))
            line.send(first=first, size=sum(self._ranks.values()), **vars(self.ports))
        message = line.receive()
        if "code" in message:
            self._finish(NodeFailure(int(message["code"]), str(message["text"])), origin=node)
        else:
            self._has_ended(node)
        with contextlib.suppress(OSError):
            receive(connection, 1)  # the line stays open until the node has heard how the job ends

    def _has_ended(self, node: int) -> None:
        with self._changed:
            self._ended.add(node)
            all_have = len(self._ended) == self._rendezvous.nodes
        if all_have:
            self._finish(JobEnded(), origin=None)

    def _finish(self, news: News, origin: int | None) -> None:
        """Notify all nodes but `origin`, which knows, unless the job is over already."""
        with self._changed:
            if self._over is not None:
                return
            self._over = news
            self._admission.is_over = True
            lines = [line for node, line in self._lines.items() if node != origin]
        for line in lines:
            with contextlib.suppress(OSError):
                line.send(**vars(news))
        if origin != 0:
            self.news.put(news)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side is gone
        connection.shutdown(socket.SHUT_RDWR)


def _listening(rendezvous: LauncherRendezvous) -> tuple[socket.socket, ReservedPorts]:
    """A socket that listens at the rendezvous, and the ports of the job at the same address."""
    host, port = rendezvous.host, rendezvous.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        return listener, ReservedPorts((str(address[0]), 0), family)
    except OSError as error:
        raise LaunchError(
            f"node 0 cannot listen at {host}:{port}: {error.strerror or error}",
            hint="--rdzv takes a name or address of the node with --node-rank 0, and a port that is free there",
        ) from error
