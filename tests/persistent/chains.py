# SPDX-License-Identifier: MIT
"""Random chains of phases, deterministic by seed: each is a grid of its own over tensors that other phases use.

Elementwise tiles of many extents, reductions of rows, norms, GEMMs, neighbouring rows, and rows that an index in memory
names; on several devices also all-reduces of whole tensors. Tensors are used again, so phases also wait for readers.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from tests.fuzz.program import Fuzzed, Line, Parameter

ROWS, COLUMNS, TENSORS, LAYERS = 128, 64, 4, 3


class Chain:
    """Writes one chain of phases."""

    def __init__(self, seed: int, devices: int, *, looped: bool = False) -> None:
        self.rng, self.seed, self.devices = random.Random(f"{devices} {seed} {looped}"), seed, devices
        self.layer = "layer" if looped else "0"
        self.body = [self.phase() for _ in range(4 if looped else 5)]
        if looped:
            self.layer = "0"
            loop = Line(f"for layer in T.serial({LAYERS}):", self.body)
            self.body = [self.phase(), loop, self.phase()]

    def program(self) -> Fuzzed:
        """The program, one launch for each phase."""
        shape, tensors = (ROWS, COLUMNS), range(TENSORS)
        parameters = [
            *(Parameter(f"X{i}", shape, "bfloat16", is_input=True) for i in tensors),
            Parameter("W", (COLUMNS, COLUMNS), "bfloat16", is_input=True),
            Parameter("V", (ROWS,), "float32", is_input=True),
            Parameter("R", (ROWS // self.devices, COLUMNS), "bfloat16", is_input=True),
            Parameter("U", (LAYERS, COLUMNS, COLUMNS), "bfloat16", is_input=True),
            Parameter("I", (ROWS,), "int32", is_input=True),
        ]
        return Fuzzed(self.seed, self.devices, tuple(parameters), tuple(self.body))

    def phase(self) -> Line:
        kinds: list[Callable[[], Line]] = [
            *[self.elementwise] * 3, self.reduction, self.scaled, self.norm, self.gemm, self.linear, self.linear,
            self.gather, self.scatter, self.neighbours, self.columns,
        ]  # fmt: skip
        if self.devices > 1:
            kinds += [self.allreduce, self.allreduce, self.scattered, self.exchanged]
        return self.rng.choice(kinds)()

    def launch(self, grid: str, names: str, lines: list[str | Line]) -> Line:
        head = f"with T.Kernel(device={self.devices}, block={grid}, threads=128) as {names}:"
        return Line(head, [line if isinstance(line, Line) else Line(line) for line in lines])

    def two(self) -> tuple[str, str]:
        first, second = self.rng.sample(range(TENSORS), 2)
        return f"X{first}", f"X{second}"

    def elementwise(self) -> Line:
        """A grid that computes a tensor elementwise from two others, or in place."""
        high, wide = self.rng.choice((8, 16, 32, 40, 64)), self.rng.choice((16, 32, 64))
        (a, b), c = self.two(), f"X{self.rng.randrange(TENSORS)}"
        at = f"by * {high}, bx * {wide}"
        loop = Line(f"for i, j in T.Parallel({high}, {wide}):", [Line("x[i, j] = x[i, j] * 0.5 + y[i, j]")])
        body = [
            f'x = T.alloc(({high}, {wide}), "float32", level="l0")',
            f'y = T.alloc(({high}, {wide}), "float32", level="l0")',
            *(f"T.copy({a}[{at}], x)", f"T.copy({b}[{at}], y)", loop, f"T.copy(x, {c}[{at}])"),
        ]
        return self.launch(f"({COLUMNS // wide}, {-(-ROWS // high)})", "(bx, by)", body)

    def reduction(self) -> Line:
        """Sums of rows."""
        high, (a, _) = self.rng.choice((8, 32)), self.two()
        body = [
            f'x = T.alloc(({high}, {COLUMNS}), "float32", level="l0")',
            f'total = T.alloc(({high},), "float32", level="l0")',
            *(f"T.copy({a}[by * {high}, 0], x)", "T.reduce_sum(x, total, dim=1)", f"T.copy(total, V[by * {high}])"),
        ]
        return self.launch(f"{ROWS // high}", "by", body)

    def scaled(self) -> Line:
        """Rows times numbers."""
        high, (a, b) = self.rng.choice((16, 64)), self.two()
        at = f"by * {high}"
        loop = Line(f"for i, j in T.Parallel({high}, {COLUMNS}):", [Line(f"x[i, j] = x[i, j] * V[{at} + i] * 0.125")])
        body = [
            f'x = T.alloc(({high}, {COLUMNS}), "float32", level="l0")',
            *(f"T.copy({a}[{at}, 0], x)", loop, f"T.copy(x, {b}[{at}, 0])"),
        ]
        return self.launch(f"{ROWS // high}", "by", body)

    def norm(self) -> Line:
        """RMSNorm, possibly in place."""
        high, a, b = self.rng.choice((4, 16)), f"X{self.rng.randrange(TENSORS)}", f"X{self.rng.randrange(TENSORS)}"
        shape = f"for i, j in T.Parallel({high}, {COLUMNS}):"
        body = [
            f'x = T.alloc(({high}, {COLUMNS}), "float32", level="l0")',
            f'squares = T.alloc(({high}, {COLUMNS}), "float32", level="l0")',
            f'total = T.alloc(({high},), "float32", level="l0")',
            f"T.copy({a}[by * {high}, 0], x)",
            Line(shape, [Line("squares[i, j] = x[i, j] * x[i, j]")]),
            "T.reduce_sum(squares, total, dim=1)",
            Line(shape, [Line(f"x[i, j] = 4 * x[i, j] * T.rsqrt(total[i] / {COLUMNS} + 1)")]),
            f"T.copy(x, {b}[by * {high}, 0])",
        ]
        return self.launch(f"{ROWS // high}", "by", body)

    def gemm(self) -> Line:
        """A tensor times the weights."""
        a, b = self.two()
        loop = Line("for k in T.Pipelined(2, num_stages=2):")
        loop.body += [
            Line(f"T.copy({a}[by * 64, k * 32], x)"),
            Line("T.copy(W[k * 32, bx * 32], w)"),
            Line("T.gemm(x, w, y)"),
        ]
        body = [
            'x = T.alloc((64, 32), "bfloat16", level="l1")',
            'w = T.alloc((32, 32), "bfloat16", level="l1")',
            'y = T.alloc((64, 32), "float32", level="l0")',
            *("T.clear(y)", loop),
            Line("for i, j in T.Parallel(64, 32):", [Line("y[i, j] = y[i, j] * 0.015625")]),
            f"T.copy(y, {b}[by * 64, bx * 32])",
        ]
        return self.launch(f"({COLUMNS // 32}, {ROWS // 64})", "(bx, by)", body)

    def linear(self) -> Line:
        """A tensor times a layer's weights, which are loaded ahead."""
        a, b = self.two()
        loop = Line("for k in T.Pipelined(2, num_stages=2):")
        loop.body += [
            Line(f"T.copy(U[{self.layer}, bx * 16, k * 32], w)"),
            Line("T.gemm(x[:, k * 32 : (k + 1) * 32], w, y, transpose_B=True)"),
        ]
        body = [
            f'x = T.alloc((64, {COLUMNS}), "bfloat16", level="l1")',
            'w = T.alloc((16, 32), "bfloat16", level="l1")',
            'y = T.alloc((64, 16), "float32", level="l0")',
            *(f"T.copy({a}[by * 64, 0], x)", "T.clear(y)", loop),
            Line("for i, j in T.Parallel(64, 16):", [Line("y[i, j] = y[i, j] * 0.015625")]),
            f"T.copy(y, {b}[by * 64, bx * 16])",
        ]
        return self.launch(f"({COLUMNS // 16}, {ROWS // 64})", "(bx, by)", body)

    def gather(self) -> Line:
        """Rows that an index names."""
        (a, b), high = self.two(), 16
        store = Line(f"{b}[by * {high} + i, j] = {a}[I[by * {high} + i], j]")
        return self.launch(f"{ROWS // high}", "by", [Line(f"for i, j in T.Parallel({high}, {COLUMNS}):", [store])])

    def scatter(self) -> Line:
        """Rows to where an index says."""
        (a, b), high = self.two(), 32
        store = Line(f"{b}[I[by * {high} + i], j] = {a}[by * {high} + i, j]")
        return self.launch(f"{ROWS // high}", "by", [Line(f"for i, j in T.Parallel({high}, {COLUMNS}):", [store])])

    def neighbours(self) -> Line:
        """Sums of neighbouring rows."""
        (a, b), high = self.two(), self.rng.choice((8, 32))
        row = f"by * {high} + i"
        store = Line(f"{b}[{row}, j] = {a}[T.max({row} - 1, 0), j] * 0.5 + {a}[T.min({row} + 1, {ROWS - 1}), j] * 0.5")
        return self.launch(f"{ROWS // high}", "by", [Line(f"for i, j in T.Parallel({high}, {COLUMNS}):", [store])])

    def columns(self) -> Line:
        """Whole columns, in place."""
        wide, a = self.rng.choice((16, 32)), f"X{self.rng.randrange(TENSORS)}"
        body = [
            f'x = T.alloc(({ROWS}, {wide}), "float32", level="l0")',
            f"T.copy({a}[0, bx * {wide}], x)",
            Line(f"for i, j in T.Parallel({ROWS}, {wide}):", [Line("x[i, j] = x[i, j] * 0.5 - 3")]),
            f"T.copy(x, {a}[0, bx * {wide}])",
        ]
        return self.launch(f"{COLUMNS // wide}", "bx", body)

    def allreduce(self) -> Line:
        """The sum of all devices' tensors, in place."""
        return self.collectives(f"T.allreduce(X{self.rng.randrange(TENSORS)})")

    def scattered(self) -> Line:
        """The same in two steps, into another tensor."""
        a, b = self.two()
        return self.collectives(f"T.reduce_scatter({a}, R)", f"T.all_gather(R, {b})")

    def exchanged(self) -> Line:
        """Parts for each device from all others."""
        a, b = self.two()
        return self.collectives(f"T.all_to_all({a}, {b})", f'T.allreduce({b}, op="max", out={a})')

    def collectives(self, *texts: str) -> Line:
        return self.launch("1", "bx", [Line('with T.Scale("device"):', [Line(text) for text in texts])])


def arguments(program: Fuzzed, launch: int = 0) -> list[list[torch.Tensor]]:
    """Tensors for each device; the index is a permutation of the rows."""
    found = program.arguments(launch)
    for rank, tensors in enumerate(found):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(16 * (program.seed + launch) + rank))
        tensors[-1].copy_(order)
    return found
