# SPDX-License-Identifier: MIT
"""From the launcher's facts to a session: the ranks agree on a key, find rank 0, and authenticate themselves."""

from __future__ import annotations

import json

from tilescale.comm.launchers import Joined
from tilescale.comm.liveness import LivenessConnection
from tilescale.comm.liveness_server import LivenessServer
from tilescale.comm.session import Session
from tilescale.comm.store_client import StoreClient
from tilescale.comm.transport import Transport
from tilescale.comm.trust import key_exchange
from tilescale.comm.trust.handshake import new_nonce, this_process
from tilescale.comm.trust.key_exchange import KeyServer
from tilescale.comm.trust.records import seal, unseal_one
from tilescale.errors import ForgedMessageError, LaunchError, RankFailedError

_WHERE_KEY, _ROOT, _ROOTS = "key socket", "rank 0", "processes that are rank 0"


def open_session(joined: Joined, timeout_s: float) -> Session:
    """This rank's session in the job that it was started in. Raises LaunchError."""
    assert joined.store is not None
    client = StoreClient(joined.store, timeout_s, serves=joined.rank == 0 and joined.store_at_root)
    if joined.rank == 0:
        return _open_at_root(joined, client, timeout_s)
    try:
        return _open_elsewhere(joined, client, timeout_s)
    except (OSError, RankFailedError, ForgedMessageError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise LaunchError(
            f"rank {joined.rank} cannot join rank 0 at {joined.host}: {said}",
            hint="rank 0 may have failed earlier: see its output; between nodes all ports must be open, and all ranks "
            "need the same key and version of TileScale; two jobs on one host need a MASTER_PORT each",
        ) from error


def _open_at_root(joined: Joined, client: StoreClient, timeout_s: float) -> Session:
    if client.count(_ROOTS) > 1:
        raise LaunchError(
            "another process is rank 0 of this job already",
            hint="a program that a rank starts is not a rank: start it without RANK, WORLD_SIZE and LOCAL_RANK",
        )
    key = joined.key
    if key is None:
        keys = KeyServer()
        key = keys.key
        client.set(_WHERE_KEY, keys.name.encode())
    nonce = new_nonce()
    session = Session(Transport(client, key.of_job(nonce), 0), 0, joined.size, timeout_s)
    session.introduce(0, this_process())
    try:
        session.server = LivenessServer(joined.host, key, nonce, joined.size, session.introduce, session.rank_gone)
    except OSError as error:
        raise LaunchError(
            f"rank 0 cannot listen at {joined.host}: {error.strerror or error}",
            hint="MASTER_ADDR must be an address, or a name of an address, of the host that rank 0 runs on",
        ) from error
    facts = json.dumps([session.server.port, joined.size, joined.job])
    client.set(_ROOT, seal(key, _ROOT, 0, facts.encode()))
    return session


def _open_elsewhere(joined: Joined, client: StoreClient, timeout_s: float) -> Session:
    key = joined.key or key_exchange.fetch(_wait(client, _WHERE_KEY, timeout_s).decode("ascii", "replace"))
    facts = unseal_one(key, _ROOT, _wait(client, _ROOT, timeout_s), writer=0)
    port, size, job = json.loads(bytes(facts))
    _check_same_job(joined, size, job)
    liveness = LivenessConnection((joined.host, port), key, joined.rank, timeout_s)
    if joined.store_at_root:
        client.root_cut = liveness.cut
    transport = Transport(client, key.of_job(liveness.job), joined.rank)
    session = Session(transport, joined.rank, joined.size, timeout_s, liveness)
    session.introduce(0, liveness.root_process)
    session.introduce(joined.rank, this_process())
    return session


def _check_same_job(joined: Joined, size: int, job: str) -> None:
    """Raises LaunchError if rank 0 is that of another job: two on one port, and no key that would prove it."""
    for own, other in ((f"{joined.size} ranks", f"{size} ranks"), (joined.job, job)):
        if own != other:
            raise LaunchError(
                f"rank {joined.rank} is of a job of {own}, rank 0 at {joined.host} of one of {other}",
                hint="two jobs on one host need a MASTER_PORT each; ranks of one job that run different scripts need a "
                "launcher, or a key (TILESCALE_JOB_KEY)",
            )


def _wait(client: StoreClient, name: str, timeout_s: float) -> bytes:
    if not client.has_within(name, timeout_s):
        raise TimeoutError(f"it has not said within {timeout_s:g} s where it is")
    return client.get(name)
