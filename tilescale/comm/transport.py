# SPDX-License-Identifier: MIT
"""What ranks exchange bytes through: a shared key-value store (torch's), plus whole objects on top of it.

Nothing here waits: a key is read once it is known to exist. Waiting, with its bounds, is `Session.wait`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tilescale.comm.lifeline import Lifeline
from tilescale.comm.wire import decode
from tilescale.errors import RankFailedError

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Transport"]

_PIECE = 4 << 20  # torch's store refuses values above 8 MiB


class Transport:
    """Keys and values that every rank of the job sees.

    Every method raises RankFailedError if the store has died with rank 0.
    """

    def __init__(self, store: Store, root_lifeline: Lifeline | None = None):
        """`root_lifeline`: the connection to rank 0, if the store lives there and this is another rank."""
        self.root_name = "rank 0"
        self.store = store
        self._root_lifeline = root_lifeline

    def set(self, key: str, value: bytes) -> None:
        """Give `key` a value."""
        self._try(self.store.set, key, value)

    def append(self, key: str, value: bytes) -> None:
        """Add to the end of a key's value, in one step that no other rank can come between."""
        self._try(self.store.append, key, value)

    def get(self, key: str) -> bytes | None:
        """The value of a key, or None."""
        return self._try(self.store.get, key) if self.has(key) else None

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self._try(self.store.check, [key])

    def delete(self, key: str) -> None:
        """Forget a key."""
        self._try(self.store.delete_key, key)

    def put(self, key: str, parts: list[memoryview]) -> None:
        """Store an encoded object. `has(key)` turns true when all of it is there."""
        for name, part, span in _pieces(key, [part.nbytes for part in parts]):
            self.set(name, bytes(parts[part][span]))
        self.set(key, pickle.dumps([part.nbytes for part in parts]))

    def take(self, key: str, readers: int = 1) -> Any:
        """The object that was put under a key that exists; the last of its `readers` removes it."""
        sizes = pickle.loads(self.get(key) or b"")
        parts = [bytearray(size) for size in sizes]
        for name, part, span in _pieces(key, sizes):
            parts[part][span] = self._try(self.store.get, name)
        if readers == 1 or self._try(self.store.add, f"{key}/readers", 1) == readers:
            for name, _, _ in _pieces(key, sizes):
                self.delete(name)
            self.delete(key)
            if readers > 1:
                self.delete(f"{key}/readers")
        return decode(parts)

    def _try(self, function: Callable[..., Any], *args: Any) -> Any:
        from torch.distributed import DistError

        # Looked at first because torch logs a page of C++ frames when the server does not answer.
        if self._root_lifeline is not None and self._root_lifeline.cut():
            raise self._root_gone()
        try:
            return function(*args)
        except DistError as error:
            raise self._root_gone() from error

    def _root_gone(self) -> RankFailedError:
        return RankFailedError(f"{self.root_name} disappeared: its own output says why, unless it was killed")


def _pieces(key: str, sizes: list[int]) -> Iterator[tuple[str, int, slice]]:
    for part, size in enumerate(sizes):
        for number, start in enumerate(range(0, size, _PIECE)):
            yield f"{key}/{part}/{number}", part, slice(start, min(start + _PIECE, size))
