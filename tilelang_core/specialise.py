# SPDX-License-Identifier: MIT
"""Stock TileLang's warp specialisation of a function, available before anything is generated."""

from __future__ import annotations

from typing import Any

import tilelang
import tilelang.cuda.transform
import tvm
from tilelang.backend.target import determine_target
from tvm import tirx

from tilelang_core import ir, tl
from tilelang_core.opaque_values import OpaqueValues
from tilelang_core.prover import proving
from tilelang_core.role_registers import keeping_registers

DISABLE = tl.DISABLE_WARP_SPECIALIZED
"""Pass setting that keeps all statements in the same threads."""

_LOAD = tl.TMA_COPY

_STEPS = (
    tilelang.cuda.transform.AnnotateDeviceBoundTmaCopies,
    tilelang.transform.AddWrapperForSingleBufStore,
    tilelang.transform.LegalizeNegativeIndex,
    tilelang.transform.InjectAssumes,
    tilelang.transform.Simplify,
    tilelang.transform.CanonicalizeLegacyReducer,
)
"""The passes of TileLang's pipeline for CUDA up to those that make roles, those that only verify left out."""

PRODUCER_THREADS = 128
"""Threads of a producer."""

_MOST = 240
"""Registers that a thread can take."""


def registers_left(registers: int, threads: int, *others: int, blocks: int = 1) -> int:
    """Registers for each of `threads` threads, if other warpgroups have the given numbers each, and the SM runs
    `blocks` blocks: a thread that requests more than its block's initial allocation, where all threads have alike,
    waits for ever."""
    everybody = threads + len(others) * PRODUCER_THREADS
    begun = registers // blocks // everybody // 8 * 8 * everybody
    return min(_MOST, (begun - sum(others) * PRODUCER_THREADS) // threads // 8 * 8)


def registers(producer: int, others: int) -> tirx.Stmt:
    """Set the registers of each thread of the producer, and of the others."""
    names = {tl.PRODUCER_REGISTERS: producer, tl.CONSUMER_REGISTERS: others}
    calls = [tirx.call_intrin("handle", tirx.op.Op.get(name), number) for name, number in names.items()]
    return tirx.SeqStmt([tirx.Evaluate(call) for call in calls])


def made_roles(func: tirx.PrimFunc, target: Any, last: str) -> tirx.PrimFunc:
    """A function after TileLang's passes up to the one named `last`, which makes its roles. Raises what that raises."""
    own = func.attrs["tilelang_pass_configs"] if func.attrs and "tilelang_pass_configs" in func.attrs else {}
    target = determine_target(target, return_object=True)
    with proving(), keeping_registers(), tvm.transform.PassContext(opt_level=3, config=dict(own)), target:
        module = tirx.transform.BindTarget(target)(tvm.IRModule({func.attrs["global_symbol"]: func}))
        module = tilelang.transform.MaterializeKernelLaunch(lower_thread_binding=True, default_threads=128)(module)
        values = OpaqueValues()
        module = tvm.IRModule({name: values.hidden(launched) for name, launched in module.functions.items()})
        for step in (*_STEPS, getattr(tilelang.cuda.transform, last)):
            module = step()(module)
    return values.shown(next(iter(module.functions.values())))


def branches(func: tirx.PrimFunc, target: Any) -> tuple[tirx.Stmt, tirx.Stmt] | None:
    """The producer's branch and the other threads' branch of a function's pipelined loop; None: it has no producer."""
    made = made_roles(func, target, "ProducerConsumerWarpSpecialized")
    roles = ir.nodes(made.body, ir.has_roles)
    return (roles[0].body.then_case, roles[0].body.else_case) if roles else None


def is_load(node: Any) -> bool:
    """Whether a node of a producer's branch is a bulk load."""
    is_copy = isinstance(node, tirx.Call) and getattr(node.op, "name", None) == _LOAD
    return is_copy and "barrier" in node.annotations
