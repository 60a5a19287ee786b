# SPDX-License-Identifier: MIT
"""The language: everything of `tilelang.language`, unchanged, and the constructs for a whole machine.

    import tilescale.language as T

    launch        T.Kernel with extents by level name, T.ALL
    scale         T.Scale, T.rank, T.size
    tensor        T.alloc in a memory layer, T.view with a layout; layouts T.Replica, T.FullRow, T.FullCol, T.Shard
    copy          T.copy to and from another unit
    signal        T.alloc_flags, T.signal, T.wait, T.wait_any, T.barrier
    peer_atomic   T.atomic_add at another unit, T.invoke_one
    asynchronous  checks of operations on a copy queue: T.copy and T.all_gather with signal= above the programs
    gemm          T.gemm, whose mistakes are errors with their line
    collective    T.allreduce, T.reduce_scatter, T.all_gather, T.all_to_all, T.broadcast
    unequal       T.all_to_all_v
    norm          T.allreduce_rms_norm, allreduce_layer_norm
    mistakes      errors of Python and TileLang for common mistakes, with their line

Names that exist in TileLang too keep its meaning for every call that it accepts: T.Kernel without a level by name,
T.copy of two tiles without dst=/src=, T.atomic_add of two operands without dst=, T.view without layout=, T.broadcast of
an expression, T.gemm.
"""

from typing import TYPE_CHECKING, Any

from tilelang_core import stock as _stock
from tilelang_core.stock import *  # noqa: F403
from tilescale.errors import print_in_short as _print_in_short
from tilescale.errors import unknown_attribute
from tilescale.language.collective import all_gather, all_to_all, allreduce, broadcast, reduce_scatter
from tilescale.language.copy import copy
from tilescale.language.gemm import gemm
from tilescale.language.launch import ALL, Kernel
from tilescale.language.mistakes import Mistake as _Mistake  # noqa: F401 - explains errors of traced functions
from tilescale.language.norm import allreduce_layer_norm, allreduce_rms_norm
from tilescale.language.peer_atomic import atomic_add, invoke_one
from tilescale.language.scale import Scale, rank, size
from tilescale.language.signal import alloc_flags, barrier, signal, wait, wait_any
from tilescale.language.tensor import alloc, alloc_barrier, alloc_fragment, alloc_shared, view
from tilescale.language.unequal import all_to_all_v
from tilescale.program.layout import FullCol, FullRow, Replica, Shard
from tilescale.program.layout import Layout as Distribution

ADDED = (
    "ALL", "Distribution", "FullCol", "FullRow", "Replica", "Scale", "Shard", "all_gather", "all_to_all",
    "all_to_all_v", "alloc", "alloc_flags", "allreduce", "allreduce_layer_norm", "allreduce_rms_norm", "barrier",
    "invoke_one", "rank", "reduce_scatter", "signal", "size", "wait", "wait_any",
)  # fmt: skip
"""Names that TileLang does not have."""

EXTENDED = (
    "Kernel", "alloc_barrier", "alloc_fragment", "alloc_shared", "atomic_add", "broadcast", "copy", "gemm", "view",
)  # fmt: skip
"""Names that TileLang has and that mean more here; what TileLang accepts keeps its meaning."""

__all__ = [*dict.fromkeys((*_stock.__all__, *ADDED, *EXTENDED))]  # noqa: PLE0604

if TYPE_CHECKING:
    macro: Any  # as `__getattr__` has it; a decorator is looked up before that is known

_print_in_short()


def __getattr__(name: str) -> Any:
    """Names of TileLang's language that its `__all__` leaves out."""
    if hasattr(_stock.module, name):
        return getattr(_stock.module, name)
    raise unknown_attribute(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*__all__, *dir(_stock.module)})
