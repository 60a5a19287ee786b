# SPDX-License-Identifier: MIT
"""Mixture of experts: which experts a token takes, and how much of each, from the logits of a router."""

from dataclasses import dataclass

import torch

from tilescale.errors import ArgumentError
from tilescale.ops.arguments import SUMS, check_count, check_number, check_same, check_tensor

SCORINGS = ("softmax", "sigmoid")

BEST_OF_GROUP = 2
"""Experts whose scores a group is chosen by, where a bias corrects them (DeepSeek-V3)."""


@dataclass(frozen=True)
class Router:
    """Choice of experts from logits.

    Attributes:
        choices: experts of each token.
        scoring: "softmax" over all experts, as in Mixtral and Qwen3-MoE, or "sigmoid" of each, as in DeepSeek-V3.
        normalize: whether the weights of a token's experts are divided by their sum.
        groups, top_groups: experts are in `groups` equal groups, and a token's experts are in its best `top_groups`
            groups (DeepSeek-V2 and V3). A group is as good as its best expert, or with a bias as the sum of its best
            two.
        scale: of all weights, in the end.
    """

    choices: int
    scoring: str = "softmax"
    normalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Raises ArgumentError for what no router does."""
        for name in ("choices", "groups", "top_groups"):
            check_count(name, getattr(self, name))
        check_number("scale", self.scale)
        if self.scoring not in SCORINGS:
            raise ArgumentError(f"scoring is {self.scoring!r}", hint=f"supported: {', '.join(SCORINGS)}")
        if self.top_groups > self.groups:
            raise ArgumentError(f"top_groups is {self.top_groups}, groups is {self.groups}", hint="choose fewer")

    def choose(self, logits: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, int64, and their weights, float32, both (tokens, choices).

        Args:
            logits: (tokens, experts), float32, bfloat16 or float16; scores are made in float32.
            bias: (experts,), is added to the scores that experts are chosen by, not to their weights; or None.

        Raises:
            ArgumentError: an unsupported argument; names it, and the supported ones.
        """
        check_tensor("logits", logits, 2, SUMS)
        tokens, experts = logits.shape
        if experts % self.groups or experts // self.groups * self.top_groups < self.choices:
            raise ArgumentError(
                f"logits has {experts} experts, of {self.groups} groups {self.top_groups} are chosen",
                hint=f"groups are equal, and those chosen have {self.choices} experts at least",
            )
        if bias is not None:
            check_tensor("bias", bias, 1, SUMS)
            check_same("device", "bias", bias, "logits", logits)
            if len(bias) != experts:
                raise ArgumentError(f"bias has {len(bias)} numbers, logits has {experts} experts", hint="one for each")
        numbers = logits.float()
        scores = numbers.softmax(-1) if self.scoring == "softmax" else numbers.sigmoid()
        wanted = scores.detach() if bias is None else scores.detach() + bias.detach()
        if self.groups > 1:
            grouped = wanted.view(tokens, self.groups, experts // self.groups)
            best = grouped.topk(1 if bias is None else min(BEST_OF_GROUP, grouped.shape[-1]), -1).values.sum(-1)
            is_open = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(self.top_groups).indices, True)
            wanted = grouped.masked_fill(~is_open[..., None], -torch.inf).view(tokens, experts)
        chosen = wanted.topk(self.choices).indices
        weights = scores.gather(1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(torch.float32).tiny)
        return chosen, weights * self.scale if self.scale != 1 else weights
