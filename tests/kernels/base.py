# SPDX-License-Identifier: MIT
"""The record that describes one plain kernel, and the small tensor helpers of inputs and references."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import tilelang.language
import torch
from tilelang import tvm

import tilescale.language

TARGETS = ("sm_80", "sm_90a", "sm_100a")
HOPPER_UP = ("sm_90a", "sm_100a")

Inputs = list[torch.Tensor]
References = dict[int, torch.Tensor]


@dataclass(frozen=True)
class PlainKernel:
    """One kernel of the collection.

    build: called with the language module (`tilelang.language` or a dialect of it), returns the PrimFunc; `program`
        does so once for each module.
    inputs: called with a seeded `torch.Generator`, returns one CPU tensor per parameter; outputs are poisoned
        (NaN, or the integer of `poison`) unless the kernel accumulates into them.
    reference: called with those inputs before the run, returns the expected content of each output, float64 or
        int64, keyed by parameter index. It must not change its arguments.
    rtol, atol: as in `torch.testing.assert_close`, for the comparison in float64.
    targets, why_not: the CUDA architectures it can be compiled for, and the reason for each one that is missing.
    covers: the features it is here for.
    """

    name: str
    build: Callable[[ModuleType], Any]
    inputs: Callable[[torch.Generator], Inputs]
    reference: Callable[[Inputs], References]
    covers: tuple[str, ...]
    rtol: float = 1e-2
    atol: float = 1e-2
    targets: tuple[str, ...] = TARGETS
    why_not: Mapping[str, str] = field(default_factory=dict)

    def program(self, module: ModuleType) -> Any:
        """Result of `build`; the same at each call, as it never changes."""
        return _built(self.build, module)

    def __post_init__(self) -> None:
        missing = set(TARGETS) - set(self.targets)
        if missing != set(self.why_not):
            raise ValueError(f"{self.name}: targets left out {sorted(missing)}, reasons for {sorted(self.why_not)}")


@functools.cache
def _built(build: Callable[[ModuleType], Any], module: ModuleType) -> Any:
    return build(module)


def cuda_texts(build: Callable[[ModuleType], Any], arch: str) -> tuple[str, str]:
    """The CUDA text of a program written with our names, as we compile it, and with TileLang's, as TileLang does."""
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    ours = tilescale.compile(_built(build, tilescale.language), target={"kind": "cuda", "arch": arch}).source
    with target:
        # Stock lowering renames thread indices in place, so it gets a separate program.
        return ours, tilelang.lower(build(tilelang.language), target=target).kernel_source


def randn(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> torch.Tensor:
    """Normal values, rounded to `dtype`."""
    return (torch.randn(shape, generator=rng) * scale).to(dtype)


def randint(rng: torch.Generator, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=rng).to(dtype)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that no right result looks like: NaN for floats, 85 for integers."""
    return torch.full(shape, float("nan")).to(dtype) if dtype.is_floating_point else torch.full(shape, 85, dtype=dtype)


def f64(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as float64."""
    return tensor.to(torch.float64)
