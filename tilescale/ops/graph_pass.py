# SPDX-License-Identifier: MIT
"""A pass of inductor that puts TileScale's operators in place of functional collectives and the GEMMs or norms at them.

PyTorch's own pass, `_micro_pipeline_tp`, replaces two patterns, in groups that symmetric memory was enabled for. This
one runs before it, on every graph that is compiled while it is installed. `graph_patterns.py` has the patterns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort

from tilescale.ops import graph_patterns


class OperatorFusion(CustomGraphPass):
    """Inductor pass that replaces patterns by operators, after earlier custom passes. `before`: the earlier pass, a
    list of passes, or None."""

    def __init__(self, before: Any):
        self.before = before

    @property
    def _others(self) -> list[Any]:
        found = self.before if isinstance(self.before, list | tuple) else [self.before]
        return [one for one in found if one is not None]

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Rewrite a graph after autograd, forward or backward."""
        for other in self._others:
            other(graph)
        if not graph_patterns.patterns.apply(graph):
            return
        stable_topological_sort(graph)
        graph.eliminate_dead_code(graph_patterns.is_impure)
        graph.lint()

    def uuid(self) -> Any:
        """The key of inductor's cache: graphs of other patterns are compiled again. None, so that nothing is cached,
        where another pass has no key."""
        others = [getattr(other, "uuid", lambda: None)() for other in self._others]
        return None if None in others else (get_hash_for_files((__file__, graph_patterns.__file__)), *others)


def install() -> None:
    """Let inductor run the pass, once."""
    if not isinstance(config.post_grad_custom_pre_pass, OperatorFusion):
        graph_patterns.replaced.clear()
        _set(OperatorFusion(config.post_grad_custom_pre_pass))


def uninstall() -> None:
    """Leave inductor with the pass that was there before."""
    if isinstance(config.post_grad_custom_pre_pass, OperatorFusion):
        _set(config.post_grad_custom_pre_pass.before)


def _set(value: Any) -> None:
    """Set it in this thread, and as the default of others: autograd's, in which inductor compiles backwards."""
    config._config["post_grad_custom_pre_pass"].default = value  # type: ignore[attr-defined]
    config.post_grad_custom_pre_pass = value
