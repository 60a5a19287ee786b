# SPDX-License-Identifier: MIT
"""A group of ranks, and the collectives that they call together."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from tilescale.comm.call import CollectiveCall
from tilescale.comm.refusal import notifies
from tilescale.comm.session import Session
from tilescale.comm.wire import decode, encode
from tilescale.errors import UsageError, picklable


def _itself(team: Team, *_: Any, **__: Any) -> Team:
    return team


RootFunction = Callable[[list[Any]], Sequence[Any]]

_BRIEF = 1024
"""Bytes of an object up to which a rank's call has it: a message takes as long as the call."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """Ranks that call collectives together, all the same ones in the same order; each call also waits for all of them.

    Objects are sent pickled. A CPU tensor arrives contiguous and detached; the caller's own object is returned to it
    itself, not as a copy. `root` and the positions in lists count within the team.

    Every collective raises RankFailedError if a rank of the job fails or does not come within the job's timeout,
    RankMismatchError if ranks call different collectives, ForgedMessageError if a stranger has written to the job's
    store, UsageError for a root outside the team, while another thread of this rank is in one, and in a process that a
    rank has forked.

    Attributes:
        ranks: world ranks of the members, in team order.
        rank: this process's rank in the team.
    """

    ranks: tuple[int, ...]
    rank: int
    _session: Session | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks in the team."""
        return len(self.ranks)

    @notifies(_itself)
    def barrier(self) -> None:
        """Wait until every rank of the team is here."""
        self._rendezvous(CollectiveCall.here("barrier"))

    @notifies(_itself)
    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        """At `root` the objects of all ranks in team order; None elsewhere."""
        call = self._call("gather", root)
        return self._gather(call, self._rendezvous(call), self._outgoing(obj, root), obj)

    @notifies(_itself)
    def scatter(self, objects: Sequence[Any] | None, root: int = 0) -> Any:
        """The object that `root` lists for this rank; other ranks give None. UsageError if the length is wrong."""
        call = self._call("scatter", root)
        if self.rank == root and (objects is None or len(objects) != self.size):
            found = "None" if objects is None else f"{len(objects)} objects"
            raise UsageError(f"scatter from {found} to {self.size} ranks", hint="give one object per rank")
        parts = self._encode_for_others(objects) if self.rank == root and objects is not None else []
        return self._scatter(call, self._rendezvous(call), parts, objects)

    @notifies(_itself)
    def broadcast(self, obj: Any = None, root: int = 0) -> Any:
        """The object of `root`, on every rank."""
        call = self._call("broadcast", root)
        if self.size == 1:
            return obj
        parts = encode(obj) if self.rank == root else []
        key = self._rendezvous(call)
        if self.rank == root:
            self._open.transport.put(key + "/data", parts)
            return obj
        return self._open.receive(key + "/data", self.ranks[root], call, self.ranks, self.size - 1)

    @notifies(_itself)
    def all_gather(self, obj: Any) -> list[Any]:
        """The objects of all ranks in team order, on every rank."""
        return self._all_gather(CollectiveCall.here("all_gather"), obj)

    @notifies(_itself)
    def run_at_root(self, payload: Any, fn: RootFunction, root: int = 0) -> Any:
        """`fn` runs once, at `root`, on the payloads of all ranks, and returns a result for each of them.

        Args:
            payload: this rank's contribution.
            fn: takes the list of payloads in team order, returns a list of results in team order.
            root: the rank that runs `fn`.
        Returns:
            this rank's result. An exception that `fn` raises is raised on every rank, with a note of where it ran.
        """
        return self._run_at_root(self._call("run_at_root", root), payload, fn)

    def _run_at_root(self, call: CollectiveCall, payload: Any, fn: RootFunction) -> Any:
        root = call.root or 0
        parts = self._outgoing(payload, root)
        key = self._rendezvous(call)
        payloads = self._gather(call, key, parts, payload)
        if payloads is None:
            failed, value = self._scatter(call, key, [], None)
        else:
            failed, value = self._run(fn, payloads, call, key)
        if failed:
            note = f"raised at rank {self.ranks[root]}, which ran this call for ranks {list(self.ranks)}"
            value.__notes__ = [*getattr(value, "__notes__", ()), note]  # add_note exists from Python 3.11 on
            value.__tilescale_raised_at__ = self.ranks[root]
            raise value
        return value

    def _run(self, fn: RootFunction, payloads: list[Any], call: CollectiveCall, key: str) -> Any:
        """This rank's (whether `fn` failed, result or error), after the others were sent theirs."""
        try:
            results = list(fn(payloads))
            if len(results) != self.size:
                raise UsageError(f"the function of run_at_root gave {len(results)} results for {self.size} ranks")
            answers = [(False, result) for result in results]
            parts = self._encode_for_others(answers)
        except Exception as error:  # noqa: BLE001 - every rank raises the error, of any class
            answers = [(True, error)] * self.size
            parts = self._encode_for_others([(True, picklable(error))] * self.size)
        return self._scatter(call, key, parts, answers)

    def _gather(self, call: CollectiveCall, key: str, parts: list[memoryview], own: Any) -> list[Any] | None:
        if self.rank != (call.root or 0):
            self._open.transport.put(f"{key}/from{self.rank}", parts)
            return None
        return [
            own if rank == self.rank else self._open.receive(f"{key}/from{rank}", world_rank, call, self.ranks)
            for rank, world_rank in enumerate(self.ranks)
        ]

    def _scatter(
        self, call: CollectiveCall, key: str, parts: list[list[memoryview]], objects: Sequence[Any] | None
    ) -> Any:
        if objects is None:
            return self._open.receive(f"{key}/to{self.rank}", self.ranks[call.root or 0], call, self.ranks)
        for rank in range(self.size):
            if rank != self.rank:
                self._open.transport.put(f"{key}/to{rank}", parts[rank])
        return objects[self.rank]

    def _all_gather(self, call: CollectiveCall, obj: Any) -> list[Any]:
        if self.size == 1:
            return [obj]
        parts, readers = encode(obj), self.size - 1
        brief = b64encode(parts[0]).decode() if len(parts) == 1 and parts[0].nbytes <= _BRIEF else ""
        key, calls = self._open.rendezvous(self.ranks, replace(call, brief=brief))
        if not brief:
            self._open.transport.put(f"{key}/{self.rank}", parts)

        def given(rank: int, world_rank: int) -> Any:
            if text := calls[world_rank].brief:
                return decode([bytearray(b64decode(text))])
            return self._open.receive(f"{key}/{rank}", world_rank, call, self.ranks, readers)

        return [obj if rank == self.rank else given(rank, number) for rank, number in enumerate(self.ranks)]

    def _encode_for_others(self, objects: Sequence[Any]) -> list[list[memoryview]]:
        return [[] if rank == self.rank else encode(obj) for rank, obj in enumerate(objects)]

    def _outgoing(self, obj: Any, root: int) -> list[memoryview]:
        # Encoded before the exchange: an object that cannot be pickled is this rank's error alone.
        return encode(obj) if self.rank != root else []

    def _call(self, op: str, root: int) -> CollectiveCall:
        if not 0 <= root < self.size:
            raise UsageError(f"root {root} of a team of {self.size} ranks", hint="roots count from 0 within the team")
        return CollectiveCall.here(op, root)

    @property
    def one_call(self) -> AbstractContextManager[None]:
        """Held by a call of this rank; entering it raises UsageError while another thread is in a call."""
        return nullcontext() if self._session is None else self._session.one_call

    def _rendezvous(self, call: CollectiveCall) -> str:
        return "" if self.size == 1 else self._open.rendezvous(self.ranks, call)[0]

    @property
    def _open(self) -> Session:
        assert self._session is not None, "a team of one exchanges nothing"
        return self._session


def run_in_call(team: Team, name: str, payload: Any, fn: RootFunction) -> Any:
    """`team.run_at_root(payload, fn)` as a part of the user's call `name`: errors speak of that."""
    return team._run_at_root(CollectiveCall.here(name), payload, fn)


def raised_at(error: BaseException) -> int | None:
    """The rank at which the function of `run_at_root` raised this error, None for any other error."""
    return getattr(error, "__tilescale_raised_at__", None)
