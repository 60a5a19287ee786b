# SPDX-License-Identifier: MIT
"""The job's store (torch's TCPStore): rank 0 serves it, the other ranks connect."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from tilescale.comm.worker import Worker
from tilescale.errors import LaunchError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_NAME_WITHIN_S = 5.0  # a name may be made known a moment after the job starts
_PAUSE_S = 0.25
_BACKLOG = 1024
_HINT = "check that rank 0 runs, that its address is right on every node, and that no firewall is between"


def serve(host: str, port: int, *, timeout_s: float, bound: int | None = None) -> TCPStore:
    """A new store that listens at host:port alone (port 0: any free one). Raises LaunchError: the port is taken, or
    `host` is not an address of this host.

    Args:
        host: a name or address of this host.
        port: where the other ranks look for it.
        timeout_s: longest wait of the store's own calls.
        bound: a descriptor of a socket that listens there, or is bound; it is ignored if it is anything else.
    """
    address, family = _resolved(host, timeout_s)
    try:
        listener = _adopted(bound, port) or socket.create_server((address, port), family=family)
        listener.listen(_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(
                f"cannot serve {host}:{port}: {error.strerror}",
                hint="MASTER_ADDR must be an address, or a name of an address, of the host that rank 0 runs on",
            ) from error
        # torch.distributed may have been started here before: then its store is there already, and is shared.
        return _store(host, port, timeout_s, serves=True)
    port = listener.getsockname()[1]
    return _store(host, port, timeout_s, serves=True, descriptor=listener.detach())


def connect(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """A connection to the store at host:port. Raises LaunchError if there is no answer within `timeout_s`."""
    _resolved(host, timeout_s)
    return _store(host, port, timeout_s, serves=False)


def _store(host: str, port: int, timeout_s: float, *, serves: bool, descriptor: int | None = None) -> TCPStore:
    from torch.distributed import TCPStore

    def make() -> TCPStore:
        # Multi-tenant: a later init_process_group on the same MASTER_PORT shares the server instead of failing.
        return TCPStore(
            host,
            port,
            None,
            serves,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=descriptor,
        )

    try:
        # In a thread, as it waits without a bound for a process that accepts the connection and then stays silent.
        return Worker("tilescale-connect").call(make, limit_s=timeout_s + 1.0, hopeless=lambda: False)
    except (TimeoutError, RuntimeError, ValueError) as error:
        said = (str(error).splitlines() or [f"no answer within {timeout_s:g} s"])[0]
        if serves and "EADDRINUSE" in str(error):
            raise LaunchError(
                f"port {port} of {host} is taken: another process listens there",
                hint="two jobs on one host need a MASTER_PORT each; a program that rank 0 starts is not a rank: start "
                "it without RANK, WORLD_SIZE and LOCAL_RANK; else another user may have come first: take another port",
            ) from error
        does = "cannot serve" if serves else "cannot reach rank 0's store at"
        raise LaunchError(f"{does} {host}:{port}: {said}", hint=_HINT) from error


def _adopted(descriptor: int | None, port: int) -> socket.socket | None:
    """The socket that the launcher bound to `port` for this process."""
    if descriptor is None:
        return None
    with contextlib.suppress(OSError):  # closed: a program that rank 0 started has its environment, not its descriptors
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            found = socket.socket(fileno=descriptor)
            if found.getsockname()[1:2] == (port,):
                found.set_inheritable(False)
                return found
            found.detach()
    return None


def _resolved(host: str, timeout_s: float) -> tuple[str, socket.AddressFamily]:
    """An address of `host`. Raises LaunchError if the name cannot be resolved."""
    end = time.monotonic() + min(timeout_s, _NAME_WITHIN_S)
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
            return str(address[0]), family
        except OSError as error:
            if time.monotonic() > end:
                raise LaunchError(
                    f"the address of rank 0, {host!r}, is unknown on this host: {error.strerror or error}",
                    hint="set MASTER_ADDR to a name that all nodes know, or to an IP address",
                ) from error
            time.sleep(_PAUSE_S)
