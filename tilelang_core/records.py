# SPDX-License-Identifier: MIT
"""Python objects with nodes of TIR among them as bytes: the identity of nodes is kept."""

from __future__ import annotations

import io
import pickle
from typing import Any

import tvm
import tvm_ffi

_nodes = tvm_ffi.get_global_func("node.LoadJSON")
"""The nodes of a `graph_text` of this version. `tvm.ir.load_json` rewrites those of others, which takes longer."""


def dumps(record: Any) -> bytes:
    """A record as bytes. Raises what pickle, or TVM, raises of objects that cannot be saved."""
    head = io.BytesIO()
    pickler = _Pickler(head, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dump(record)
    return pickle.dumps((graph_text(pickler.nodes), head.getvalue()), protocol=pickle.HIGHEST_PROTOCOL)


def loads(data: bytes) -> Any:
    """The record of trusted bytes: unpickling untrusted ones would execute code."""
    text, head = pickle.loads(data)
    return _Unpickler(io.BytesIO(head), _nodes(text)).load()


def graph_text(nodes: Any) -> str:
    """A graph of nodes as text, with the lines of the user's source that they come from."""
    return str(tvm.ir.save_json(nodes))


class _Pickler(pickle.Pickler):
    def __init__(self, *given: Any, **how: Any):
        super().__init__(*given, **how)
        self.nodes: list[Any] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if tvm_ffi.Object not in type(obj).__mro__:  # isinstance of this abstract class takes half a second at first
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.nodes)
            self.nodes.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, head: io.BytesIO, nodes: Any):
        super().__init__(head)
        self._nodes = nodes

    def persistent_load(self, number: int) -> Any:
        return self._nodes[number]
