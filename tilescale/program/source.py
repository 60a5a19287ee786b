# SPDX-License-Identifier: MIT
"""Programs as Python source in our language: readable output of a rewrite.

Executing the text gives the program again. It has the language's additions to TileLang, and those of TileLang's
operations that GEMMs and elementwise grids use; any other statement is an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.loop_tiles import ITERATIONS
from tilelang_core.tiles import Fill, Gemm, Reduce, TileCopy
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine
from tilescale.program.effects import phases
from tilescale.program.expressions import Expressions, quoted
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Parameter, Part, Program, location
from tilescale.program.norm import Norm
from tilescale.program.operations import (
    AtomicAdd,
    Barrier,
    Collective,
    Copy,
    InvokeOne,
    Rank,
    Signal,
    TileView,
    Wait,
    operation,
)
from tilescale.program.ops import SCALE

_INDENT = "    "
_WIDTH = 120


def source_of(program: Program, machine: Machine) -> str:
    """The text of a program, a module that defines it under its name. Raises UnsupportedError: an operation that the
    text cannot express, with its location."""
    writer = _Writer(program, machine)
    given = list(map(writer.parameter, program.parameters))
    head = f"def {program.name}({', '.join(given)}):"
    heads = [head] if len(head) <= _WIDTH else [f"def {program.name}(", *(f"{_INDENT}{g}," for g in given), "):"]
    lines = ["import tilescale.language as T", "", "", "@T.prim_func", *heads]
    return "\n".join([*lines, *writer.indented(writer.part(program.body))]) + "\n"


class _Writer:
    """The lines of phases and statements."""

    def __init__(self, program: Program, machine: Machine):
        self.text, self.machine = Expressions(["T", "_", program.name]), machine
        self.used = {var for phase, _ in phases(program.body) for s in ir.statements(phase.stmt) for var in _read(s)}
        self.level = machine.program_level.name
        """The level that operations speak of."""
        self.after_grid = False
        """Whether a following grid needs explicit scales to be a phase."""

    def parameter(self, parameter: Parameter) -> str:
        buffer = parameter.buffer
        if buffer is None:
            return f"{self.text.name(parameter.var)}: T.{parameter.var.dtype}"
        name = self.text.name(buffer.data, buffer.name)
        return f"{name}: T.Tensor({self.text.shape(buffer.shape)}, {quoted(buffer.dtype)})"

    def indented(self, lines: Iterable[str]) -> Iterator[str]:
        """Lines one step further in; `pass` where there are none."""
        return (_INDENT + line for line in list(lines) or ["pass"])

    # -- phases --------------------------------------------------------------------------------------------------------

    def part(self, part: Part) -> Iterator[str]:
        if isinstance(part, Launch):
            yield from self._launch(part)
        elif isinstance(part, DevicePhase):
            yield from self._device(part)
        elif isinstance(part, GridPhase):
            yield from self._grid(part)
        elif isinstance(part, Control):
            yield from self._control(part.stmt, [self._body(inner) for inner in part.parts])
        else:
            for inner in part.parts:
                yield from self.part(inner)

    def _body(self, part: Part) -> Iterator[str]:
        """The body of a loop or branch around phases, not of a part of a grid."""
        self.after_grid = True
        yield from self.part(part)
        self.after_grid = True

    def _device(self, phase: DevicePhase) -> Iterator[str]:
        lines = list(self._scale(self.machine.tensor_level.name, phase.stmt))
        if lines[1:] != [f"{_INDENT}pass"]:
            self.after_grid = False
            yield from lines

    def _grid(self, phase: GridPhase) -> Iterator[str]:
        stmt, program = phase.stmt, self.machine.program_level.name
        if not self.after_grid:
            yield from self.stmt(stmt)
        else:  # two grids side by side would be one
            scaled = isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == SCALE and str(stmt.value.value) == program
            yield f"with T.Scale({quoted(self.machine.tensor_level.name)}), T.Scale({quoted(program)}):"
            yield from self.indented(self.stmt(stmt.body if scaled else stmt))
        self.after_grid = True

    def _launch(self, launch: Launch) -> Iterator[str]:
        if launch.cluster_size > 1:
            raise UnsupportedError("a launch with clusters has no source text", where=launch.where)
        levels = [f"{name}={self.text.value(extent)}" for name, extent in launch.extents]
        grid = f"{self.machine.program_level.name}={self.text.shape(launch.grid)}"
        names = ", ".join(self.text.name(var, f"b{axis}") for var, axis in zip(launch.programs, "xyz", strict=False))
        threads = launch.threads[0] if launch.threads[1:] == (1, 1) else launch.threads
        bound = f"({names},)" if len(launch.programs) == 1 else f"({names})"
        order = ", in_order=True" if launch.in_order else ""
        yield f"with T.Kernel({', '.join([*levels, grid])}, threads={threads}{order}) as {bound}:"
        allocated = [self._allocated(buffer, launch) for buffer in launch.buffers]
        yield from self.indented([*allocated, *self.part(launch.body)])

    def _allocated(self, buffer: ir.Buffer, launch: Launch) -> str:
        name, shape = self.text.name(buffer.data, buffer.name), self.text.shape(buffer.shape)
        if buffer.data in launch.flags:
            return f"{name} = T.alloc_flags({shape})"
        if (arrivals := dict(launch.barriers).get(buffer.data)) is not None:
            return f"{name} = T.alloc_barrier({list(arrivals)})"
        kind = ir.scope_kind(buffer)
        if kind not in ("global", "shared", "fragment"):
            raise UnsupportedError(f"memory of scope {buffer.scope()!r} has no source text", where=launch.where)
        return f"{name} = T.alloc({shape}, {quoted(buffer.dtype)}, level={quoted(self.machine.layer_for(kind).name)})"

    # -- statements ----------------------------------------------------------------------------------------------------

    def _scale(self, level: str, stmt: ir.Stmt) -> Iterator[str]:
        first = stmt.seq[0] if isinstance(stmt, ir.SeqStmt) else stmt
        made = operation(first.value) if isinstance(first, ir.Bind) else None
        bound = ""
        if isinstance(made, Rank) and made.level == level and first.var in self.used:
            bound = f" as ({self.text.name(first.var)}, _)"
            self.used.discard(first.var)
        yield f"with T.Scale({quoted(level)}){bound}:"
        yield from self.indented(self._within(level, self.stmt(stmt)))

    def _within(self, level: str, lines: Iterator[str]) -> Iterator[str]:
        before, self.level = self.level, level
        yield from list(lines)
        self.level = before

    def stmt(self, stmt: ir.Stmt) -> Iterator[str]:
        text = self.text
        if isinstance(stmt, ir.SeqStmt):
            for inner in stmt.seq:
                yield from self.stmt(inner)
        elif isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == SCALE:
            yield from self._scale(str(stmt.value.value), stmt.body)
        elif isinstance(stmt, ir.Bind):
            yield from self._bind(stmt)
        elif isinstance(stmt, ir.For | ir.While | ir.IfThenElse):
            yield from self._loop_or_branch(stmt)
        elif isinstance(stmt, ir.BufferStore):
            yield f"{text.name(stmt.buffer.data)}[{text.values(stmt.indices)}] = {text.value(stmt.value)}"
        elif isinstance(stmt, ir.Evaluate):
            if not tir.is_nothing(stmt):
                yield from self._operation(stmt)
        else:
            raise self._wordless(stmt)

    def _bind(self, stmt: ir.Bind) -> Iterator[str]:
        made = operation(stmt.value)
        if isinstance(made, Rank):
            if stmt.var not in self.used:  # a scale binds it
                return
            value = f"T.rank({quoted(made.level)})"
        elif isinstance(made, TileView):
            if made.level != self.level:
                raise self._wordless(stmt)
            value = f"T.view({self.text.region(made.region)}, layout={self._layout(made)})"
        else:
            value = self.text.value(stmt.value)
        yield f"{self.text.name(stmt.var)} = {value}"

    def _layout(self, view: TileView) -> str:
        layout, last = view.layout, len(view.base.shape) - 1
        if layout.block is not None:
            return f"T.Shard({layout.dim}, block={layout.block})"
        return {None: "T.Replica", 0: "T.FullRow", last: "T.FullCol"}.get(layout.dim, f"T.Shard({layout.dim})")

    def _loop_or_branch(self, stmt: ir.For | ir.While | ir.IfThenElse) -> Iterator[str]:
        if isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL:
            yield from self._parallel(stmt)
        else:
            yield from self._control(stmt, [self.stmt(inner) for inner in ir.children(stmt)])

    def _control(self, stmt: ir.Stmt, bodies: list[Iterator[str]]) -> Iterator[str]:
        if isinstance(stmt, ir.For):
            yield f"for {self.text.name(stmt.loop_var)} in {self._range(stmt)}:"
        elif isinstance(stmt, ir.IfThenElse):
            yield f"if {self.text.value(stmt.condition)}:"
        else:
            yield f"while {self.text.value(stmt.condition)}:"
        yield from self.indented(bodies[0])
        if len(bodies) > 1:
            yield "else:"
            yield from self.indented(bodies[1])

    def _range(self, loop: ir.For) -> str:
        notes = {str(key): value for key, value in dict(loop.annotations or {}).items()}
        begin, end = self.text.value(loop.min), self.text.value(ir.simplify(loop.min + loop.extent, {}))
        if loop.kind == ir.ForKind.SERIAL and notes.keys() == {"num_stages"} and ir.constant(loop.min) == 0:
            return f"T.Pipelined({end}, num_stages={self.text.value(notes['num_stages'])})"
        kinds = {ir.ForKind.SERIAL: "serial", ir.ForKind.UNROLLED: "unroll", ir.ForKind.VECTORIZED: "vectorized"}
        if notes.keys() - {ITERATIONS} or loop.kind not in kinds:
            raise self._wordless(loop)
        bounds = [end] if ir.constant(loop.min) == 0 else [begin, end]
        bounds += [f"annotations={{{quoted(ITERATIONS)}: 1}}"] if notes else []
        return f"T.{kinds[loop.kind]}({', '.join(bounds)})"

    def _parallel(self, loop: ir.For) -> Iterator[str]:
        names, extents = [], []
        body: ir.Stmt = loop
        while isinstance(body, ir.For) and body.kind == ir.ForKind.PARALLEL:
            if dict(body.annotations or {}) or ir.constant(body.min) != 0:
                raise self._wordless(body)
            names.append(self.text.name(body.loop_var))
            extents.append(body.extent)
            body = body.body
        yield f"for {', '.join(names)} in T.Parallel({self.text.values(extents)}):"
        yield from self.indented(self.stmt(body))

    # -- operations ----------------------------------------------------------------------------------------------------

    def _operation(self, stmt: ir.Evaluate) -> Iterator[str]:
        made = operation(stmt.value)
        level = getattr(made, "level", None) or self.level
        if level != self.level:
            yield f"with T.Scale({quoted(level)}):"
            yield from self.indented(self._within(level, iter([self._ours(made, stmt)])))
        else:
            yield self._stock(stmt) if made is None else self._ours(made, stmt)

    def _stock(self, stmt: ir.Evaluate) -> str:
        name, text = ir.op_name(stmt.value), self.text
        if dict(stmt.value.annotations or {}) and name not in (tl.GEMM, tl.TMA_COPY):
            raise self._wordless(stmt)
        if name == tl.COPY:
            copy = TileCopy.of(stmt.value)
            return f"T.copy({text.pair(copy.source, copy.target)})"
        if name == tl.FILL:
            fill = Fill.of(stmt.value)
            return f"T.fill({text.region(fill.target)}, {text.value(fill.value)})"
        if name == tl.TMA_COPY:
            return self._bulk_load(stmt)
        if name in (tl.WAIT_BARRIER_PARITY, tl.ARRIVE_BARRIER):
            word = "barrier_arrive" if name == tl.ARRIVE_BARRIER else "mbarrier_wait_parity"
            return f"T.{word}({text.values(stmt.value.args)})"
        if name == tl.GEMM:
            return self._gemm(Gemm.of(stmt.value), stmt)
        if name == tl.REDUCE:
            made = Reduce.of(stmt.value)
            tiles = f"{text.region(made.source)}, {text.region(made.target)}"
            return f"T.reduce_{made.kind}({tiles}, dim={made.dim}, clear={made.clear})"
        raise self._wordless(stmt)

    def _bulk_load(self, stmt: ir.Evaluate) -> str:
        copy, notes = TileCopy.of(stmt.value), dict(stmt.value.annotations)
        if set(map(str, notes)) != {"barrier", "is_tma_copy"}:
            raise self._wordless(stmt)
        return f"T.tma_copy({self.text.pair(copy.source, copy.target)}, barrier={self.text.value(notes['barrier'])})"

    def _gemm(self, made: Gemm, stmt: ir.Stmt) -> str:
        if not made.is_plain or None in made.notes.values():
            raise self._wordless(stmt)
        notes = [f"transpose_{side}=True" for side, on in (("A", made.transpose_a), ("B", made.transpose_b)) if on]
        if ir.constant(made.policy):
            notes.append(f"policy={self.text.value(made.policy)}")
        if ir.constant(made.clear) != 0:
            notes.append(f"clear_accum={self.text.value(made.clear)}")
        if made.notes:
            notes.append(f"annotations={made.notes!r}")
        return f"T.gemm({', '.join([*map(self.text.region, made.operands), *notes])})"

    def _ours(self, made: Any, stmt: ir.Stmt) -> str:
        text = self.text
        if isinstance(made, Wait):
            wanted = f"({text.flags(made.flag)}, {quoted(made.compare)}, {text.value(made.value)})"
            return f"T.wait{wanted}" if made.index is None else f"{text.element(made.index)} = T.wait_any{wanted}"
        if isinstance(made, AtomicAdd):
            return self._atomic_add(made)
        if isinstance(made, InvokeOne):
            result = "" if made.result is None else f"{text.element(made.result)} = "
            return f"{result}T.invoke_one({text.value(made.value)})"
        if isinstance(made, Signal):
            op = "" if made.op == "add" else f", op={quoted(made.op)}"
            to = "" if made.peer is None else f", dst={text.value(made.peer)}"
            return f"T.signal({text.element(made.flag)}, {text.value(made.value)}{op}{to})"
        if isinstance(made, Copy):
            return self._copy(made)
        if isinstance(made, Barrier):
            return "T.barrier()"
        if isinstance(made, Collective) and made.combine is None:
            return self._collective(made)
        raise self._wordless(stmt)

    def _atomic_add(self, made: AtomicAdd) -> str:
        text = self.text
        if made.is_of_tiles:
            pair = f"{text.region(made.target)}, {text.region(made.value)}"
        else:
            pair = f"{text.element(made.target)}, {text.value(made.value)}"
        notes = [f"dst={text.value(made.peer)}"]
        notes += [] if made.order == "relaxed" else [f"memory_order={quoted(made.order)}"]
        notes += [] if made.impl is None else [f"impl={quoted(made.impl)}"]
        if made.previous is None:
            return f"T.atomic_add({', '.join([pair, *notes])})"
        return f"{text.element(made.previous)} = T.atomic_add({', '.join([pair, *notes, 'return_prev=True'])})"

    def _copy(self, made: Copy) -> str:
        text = self.text
        notes = [f"{'dst' if made.to_peer else 'src'}={text.value(made.peer)}"]
        if made.signal is not None:
            notes.append(f"signal={text.element(made.signal)}")
            if ir.constant(made.value) != 1:
                notes.append(f"value={text.value(made.value)}")
            if made.op != "add":
                notes.append(f"op={quoted(made.op)}")
        if made.after is not None:
            after = made.after
            notes.append(f"after=({text.element(after.flag)}, {quoted(after.compare)}, {text.value(after.value)})")
        if made.impl is not None:
            notes.append(f"impl={quoted(made.impl)}")
        return f"T.copy({', '.join([text.pair(made.source, made.target), *notes])})"

    def _collective(self, made: Collective) -> str:
        text = self.text
        notes = [f"root={text.value(made.root)}"] if made.root is not None else []
        for key in ("op", "dim", "impl", "chunk", "wire"):
            value = getattr(made, key)
            if value is not None and (key, value) not in (("dim", 0), ("op", "sum")):
                notes.append(f"{key}={quoted(value) if isinstance(value, str) else value}")
        if made.flags is not None:
            notes.append(f"signal={text.region(made.flags)}")
        if made.sent is not None:
            notes.insert(0, text.region(made.sent))
        if made.counts:
            size = math.isqrt(len(made.counts))
            notes.insert(0, repr([list(made.counts[r * size : (r + 1) * size]) for r in range(size)]))
        if made.received is not None:
            notes.append(f"received={text.region(made.received)}")
        tiles = [*map(text.region, made.tiles)]
        if made.norm is not None:
            return self._norm(made, made.norm)
        if made.name == "allreduce" and not made.is_in_place:
            tiles[1] = f"out={tiles[1]}"
        return f"T.{made.name}({', '.join([*tiles, *notes])})"

    def _norm(self, made: Collective, norm: Norm) -> str:
        region = self.text.region
        bias, normed = ("None" if tile is None else region(tile) for tile in (norm.bias, norm.normed))
        weights = [region(norm.weight), *([bias] if norm.centered else [])]
        tiles = [region(made.source), *weights, normed, region(made.target)]
        named = ("residual", norm.residual), ("quantized", norm.quantized), ("scales", norm.scales)
        notes = [f"{name}={region(tile)}" for name, tile in named if tile is not None]
        notes.append(f"eps={norm.eps!r}")
        notes += [f"weight_offset={norm.offset!r}"] if norm.offset else []
        notes += [] if norm.scaling is None else [f"scaling={quoted(norm.scaling)}"]
        notes += ["power_of_two=True"] if norm.power else []
        notes += [] if made.impl is None else [f"impl={quoted(made.impl)}"]
        name = "allreduce_layer_norm" if norm.centered else "allreduce_rms_norm"
        return f"T.{name}({', '.join([*tiles, *notes])})"

    def _wordless(self, stmt: ir.Stmt) -> UnsupportedError:
        what = ir.op_name(stmt.value) if isinstance(stmt, ir.Evaluate) else type(stmt).__name__
        return UnsupportedError(
            f"{what} has no source text", hint="print kernel.ir, in TileLang's notation", where=location(stmt)
        )


def _read(stmt: ir.Stmt) -> list[ir.Var]:
    """The variables that a statement uses, but for one that it binds."""
    return [var for var in ir.uses(stmt) if not (isinstance(stmt, ir.Bind) and var.same_as(stmt.var))]
