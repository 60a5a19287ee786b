# SPDX-License-Identifier: MIT
"""The collectives of a serving engine's tensor-parallel group, as vLLM and SGLang call their custom all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tilescale.hda.current import current_machine
from tilescale.ops.all_gather import all_gather
from tilescale.ops.all_reduce import all_reduce
from tilescale.ops.arguments import SUMS
from tilescale.ops.group import group_name, size_of, team_of
from tilescale.ops.reduce_scatter import reduce_scatter
from tilescale.ops.whole_tensors import is_split


class Communicator:
    """Collectives of one group, from any thread, in and out of CUDA graphs.

    No tensor has to be registered: inputs and results are anywhere in device memory. `disabled`: whether the group has
    one rank, or ranks on several nodes; every result is then `None`.
    """

    def __init__(self, group: Any, device: Any = None, **options: Any):
        """Join the job with all ranks of a process group; collective. `device` and options of others have no effect."""
        self.group = group_name(group)
        self.disabled = size_of(self.group) == 1 or is_split(current_machine(), team_of(self.group).size)

    def should_custom_ar(self, x: torch.Tensor) -> bool:
        """Whether `custom_all_reduce` takes a tensor: bfloat16, float16 or float32, contiguous and not empty."""
        return not self.disabled and x.dtype in SUMS and x.is_contiguous() and x.numel() > 0

    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor | None = None, registered: bool = False) -> torch.Tensor:
        """The sum of all ranks' tensors, in `out`, which may be x itself, or as a new tensor; `registered` is ignored.

        Raises ArgumentError for another type, or an `out` that is not like x.
        """
        return all_reduce(x, out=out, group=self.group)

    def custom_all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        """The sum as a new tensor; None where `should_custom_ar` is false."""
        return self.all_reduce(x) if self.should_custom_ar(x) else None

    def custom_all_gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """The rows of all ranks, one rank after the other; None where `should_custom_ar` is false, or x has no rows."""
        return all_gather(x, 0, group=self.group) if self.should_custom_ar(x) and x.ndim else None

    def custom_reduce_scatter(self, x: torch.Tensor) -> torch.Tensor | None:
        """This rank's rows of the sum; None also where the rows cannot be split."""
        splits = self.should_custom_ar(x) and x.ndim and x.shape[0] % size_of(self.group) == 0
        return reduce_scatter(x, 0, group=self.group) if splits else None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around the capture of CUDA graphs: nothing is to be registered."""
        yield

    def close(self) -> None:
        """Nothing is to be released: workspaces are the operators'."""
