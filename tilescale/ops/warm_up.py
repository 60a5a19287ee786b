# SPDX-License-Identifier: MIT
"""Compile all kernels of a model, or of a step, before it runs: at once, not one after another as it comes to them."""

from collections.abc import Callable
from typing import Any

import torch

from tilescale.comm import current_world, init
from tilescale.comm.refusal import notifies
from tilescale.errors import ArgumentError
from tilescale.ops.token_wise import finished
from tilescale.runtime import early
from tilescale.runtime.ahead import compile_all, dry_run
from tilescale.timing.no_gc import long_lived


@notifies(lambda *_, **__: current_world())
def warm_up(run: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Compile every TileScale kernel that `run(*args, **kwargs)` needs, over all CPU cores and ranks. Collective.

    `run` is called once, dry: operators that have never run return zeros, everything else is computed. So inputs may be
    zeros of the right shape and type. Kernels of GEMMs, norms and collectives for other row counts are compiled too, by
    processes of the least priority that continue after this returns. Random number generators are left as they were;
    what else `run` changes stays changed, so give it no optimizer.

    Args:
        run: a `torch.nn.Module`, whose gradients are computed as well where it is in training mode and gradients are
            enabled, without touching any `.grad`; or a function, such as one of a forward and a backward.
        args, kwargs: arguments of the call.

    Raises:
        ArgumentError: `run` cannot be called.
        UsageError: within another `warm_up`.
        The errors of the call itself, and of the compiler.
    """
    if not callable(run):
        raise ArgumentError(f"run is {type(run).__name__}", hint="pass a model, or a function of a step")
    device = init().device
    with long_lived():
        with dry_run(early.taken()) as needed, torch.random.fork_rng([] if device.type == "cpu" else [device]):
            results = run(*args, **kwargs)
            if isinstance(run, torch.nn.Module) and run.training:
                _differentiate(run, results)
        compile_all(needed)


def _differentiate(model: torch.nn.Module, results: Any) -> None:
    """Compute the gradients of all parameters, as far as a step does before its optimizer, and drop them."""
    leaves = torch.utils._pytree.tree_leaves(results)
    made = [x.sum() for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    wanted = [p for p in model.parameters() if p.requires_grad]
    if made and wanted:
        for parameter, grad in zip(wanted, torch.autograd.grad(made, wanted, allow_unused=True), strict=True):
            finished(parameter, grad)
