# SPDX-License-Identifier: MIT
"""Tensors, tolerances and comparisons that the emulator's tests share."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence

import torch
from hypothesis import assume

import tilescale
from tilescale.errors import ShapeError

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int32": torch.int32,
}
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8)
OPS: dict[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {
    "sum": lambda parts: functools.reduce(operator.add, parts),
    "prod": lambda parts: functools.reduce(operator.mul, parts),
    "max": lambda parts: functools.reduce(torch.maximum, parts),
    "min": lambda parts: functools.reduce(torch.minimum, parts),
}


def values(seed: int, *shape: int, dtype: str = "float32") -> torch.Tensor:
    """Values of `dtype`, different for every seed: normal, or small integers."""
    generator = torch.Generator().manual_seed(seed)
    kind = DTYPES[dtype]
    if kind.is_floating_point:
        return torch.randn(shape, generator=generator).to(kind)
    return torch.randint(-5, 6, shape, generator=generator).to(kind)


def blank(*shape: int, dtype: str = "float32") -> torch.Tensor:
    """Values that no right result has: NaN, or 85."""
    kind = DTYPES[dtype]
    fill = float("nan") if kind.is_floating_point else 85
    return torch.full(shape, fill, dtype=torch.float32).to(kind)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as float64 or int64: what references compute with."""
    return tensor.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64)


@contextlib.contextmanager
def drawn_tiles() -> Iterator[None]:
    """For tiles that hypothesis draws: it draws others in place of those that GPUs cannot hold in registers."""
    try:
        yield
    except ShapeError as error:
        assume("cannot be distributed evenly" not in str(error))
        raise


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same values exactly; NaN equals NaN."""
    torch.testing.assert_close(wide(found), wide(expected), rtol=0, atol=0, equal_nan=True)


def assert_rounded(found: torch.Tensor, reference: torch.Tensor, work: float = 1e-6) -> None:
    """`found` is the float64 or int64 `reference` rounded once to its type; `work` allows for sums in float32."""
    if not found.dtype.is_floating_point:
        assert_same(found, reference.to(found.dtype))
        return
    kind = torch.finfo(found.dtype)
    limit = reference.clamp(kind.min, kind.max)
    smallest = kind.smallest_normal * kind.eps
    torch.testing.assert_close(wide(found), limit, rtol=kind.eps / 2 + work, atol=smallest + work)


def check_alive() -> None:
    """A correct program still runs: earlier failures left no state."""
    x = values(1, 8, 8)
    expected = wide(x) * 2
    args = [[x.clone(), blank(8, 8)] for _ in range(2)]
    tilescale.emulate(_double(), args)
    for _, y in args:
        assert_rounded(y, expected)


@functools.cache
def _double():
    import tilescale.language as T

    @T.prim_func
    def double(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8, 8), "float32")):
        with T.Kernel(device=2, block=2, threads=32) as bx:
            with T.Scale("block"):
                tile = T.alloc((4, 8), "float32")
                T.copy(X[bx * 4, 0], tile)
                with T.Scale("device"):
                    T.barrier()
                    T.allreduce(tile)
                T.copy(tile, Y[bx * 4, 0])

    return double
