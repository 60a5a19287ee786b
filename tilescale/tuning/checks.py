# SPDX-License-Identifier: MIT
"""Whether a kernel computes what its reference does: a configuration that is fast and wrong is out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ResultCheck:
    """Comparison of results, as `tilescale.autotune` takes it.

    Attributes:
        reference: takes the inputs; returns the outputs, or changes its inputs in place where the kernel does.
        manual: takes the lists of outputs and of references instead of the comparison here.
        rtol, atol: how far an element may be off.
        most: the share of elements that may be further off.
    """

    reference: Callable[..., Any] | None
    manual: Callable[[list[Any], list[Any]], Any] | None
    rtol: float
    atol: float
    most: float

    def run(self, kernel: Callable[..., Any], inputs: Sequence[Any]) -> None:
        """Compare on these inputs. Raises ValueError: more elements are off than may be."""
        if self.reference is None:
            return
        copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        made, returned = self.reference(*copies), kernel(*inputs)
        if returned is None:  # both have changed tensors of theirs
            found, wanted = _tensors(inputs), _tensors(copies)
        else:
            found, wanted = _listed(returned), _listed(made)
        if self.manual is not None:
            self.manual(found, wanted)
            return
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            self._compare(number, one, other)

    def _compare(self, number: int, found: torch.Tensor, wanted: torch.Tensor) -> None:
        found, wanted = found.float(), wanted.to(found.device).float()
        wrong = int((~torch.isclose(found, wanted, self.rtol, self.atol, equal_nan=True)).sum())
        if wrong > self.most * wanted.numel():
            worst = float((found - wanted).abs().nan_to_num(torch.inf).max())
            raise ValueError(f"wrong: {wrong} of {wanted.numel()} elements of output {number}, by up to {worst:.3g}")


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _listed(returned: Any) -> list[torch.Tensor]:
    return list(returned) if isinstance(returned, list | tuple) else [returned]
