# SPDX-License-Identifier: MIT
"""Stock TileLang's specialisation of warps: what it makes of a function, asked before anything is generated."""

from __future__ import annotations

from typing import Any

import tilelang
import tilelang.cuda.transform
import tvm
from tilelang.backend.target import determine_target
from tvm import tirx
from tvm.tirx import stmt_functor

from tilelang_core import tl

__all__ = ["DISABLE", "STAGES", "branches", "is_load", "registers"]

STAGES = "num_stages"
"""Annotation of a pipelined loop: how many iterations are in flight."""

DISABLE = tl.DISABLE_WARP_SPECIALIZED
"""Pass setting that keeps all statements in the same threads."""

_SCOPE = "kWarpSpecializationScope"
_LOAD = tl.TMA_COPY

_STEPS = (
    tilelang.cuda.transform.AnnotateDeviceBoundTmaCopies,
    tilelang.transform.AddWrapperForSingleBufStore,
    tilelang.transform.LegalizeNegativeIndex,
    tilelang.transform.InjectAssumes,
    tilelang.transform.Simplify,
    tilelang.transform.CanonicalizeLegacyReducer,
    tilelang.cuda.transform.ProducerConsumerWarpSpecialized,
)
"""The passes of TileLang's pipeline for CUDA up to the one that makes a producer, those that only verify left out."""


_PRODUCER_THREADS, _REGISTERS, _MOST = 128, 64512, 240
"""Threads of a producer, registers of a program that TileLang hands out anew, and how many a thread can take."""


def registers(producer: int, threads: int) -> tirx.Stmt:
    """So many registers for each thread of the producer, as many as are left for each of the others."""
    others = min(_MOST, (_REGISTERS - producer * _PRODUCER_THREADS) // threads // 8 * 8)
    names = {tl.PRODUCER_REGISTERS: producer, tl.CONSUMER_REGISTERS: others}
    calls = [tirx.call_intrin("handle", tirx.op.Op.get(name), number) for name, number in names.items()]
    return tirx.SeqStmt([tirx.Evaluate(call) for call in calls])


def branches(func: tirx.PrimFunc, target: Any) -> tuple[tirx.Stmt, tirx.Stmt] | None:
    """What the producer and the other threads execute of a function's pipelined loop; None: it has no producer."""
    own = func.attrs["tilelang_pass_configs"] if func.attrs and "tilelang_pass_configs" in func.attrs else {}
    target = determine_target(target, return_object=True)
    with tvm.transform.PassContext(opt_level=3, config=dict(own)), target:
        module = tirx.transform.BindTarget(target)(tvm.IRModule({func.attrs["global_symbol"]: func}))
        module = tilelang.transform.MaterializeKernelLaunch(lower_thread_binding=True, default_threads=128)(module)
        for step in _STEPS:
            module = step()(module)
    found: list[tuple[tirx.Stmt, tirx.Stmt]] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.AttrStmt) and str(node.attr_key) == _SCOPE:
            found.append((node.body.then_case, node.body.else_case))

    stmt_functor.post_order_visit(next(iter(module.functions.values())).body, visit)
    return found[0] if found else None


def is_load(node: Any) -> bool:
    """Whether a node of a producer's branch is a bulk load."""
    is_copy = isinstance(node, tirx.Call) and getattr(node.op, "name", None) == _LOAD
    return is_copy and "barrier" in node.annotations
