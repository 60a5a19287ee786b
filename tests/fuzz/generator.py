# SPDX-License-Identifier: MIT
"""Random programs of tile operations, deterministic by seed.

Every program has the same results in every order that its happens-before allows: blocks and devices have disjoint rows
of tensors; a barrier, a signal or the end of a launch precedes each use of others' data; and sums are of integers.
Threads are unrestricted: a statement may read data that other threads of its unit have just written.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.fuzz.buffers import DTYPES, EXACT, SLOTS, SMALL, Buffer, Group, Scope
from tests.fuzz.exchanges import Exchanges
from tests.fuzz.program import Fuzzed, Line

SIDES = (8, 16, 16, 32, 32, 64, 64)
ODD = (5, 7, 12, 20, 24, 33, 48)
VECTORS = (16, 32, 64, 96, 128)


def generate(seed: int, devices: int = 1) -> Fuzzed:
    """The program of a seed, for a number of devices."""
    return Generator(seed, devices).program()


class Generator(Exchanges):
    """Writes one program."""

    def __init__(self, seed: int, devices: int) -> None:
        super().__init__(random.Random(f"{devices} {seed}"))
        self.seed, self.devices = seed, devices
        self.scattered = random.Random(f"{devices} {seed} fragments")
        self.cluster = self.rng.choice((0, 0, 2, 4)) if devices == 1 else 0
        self.blocks = self.rng.choice((1, 2, 3, 5)) * max(self.cluster, 1)
        self.dtypes = self.rng.sample(DTYPES, 2)
        sides = SIDES if self.rng.random() < 0.75 else ODD
        self.rows, self.columns = self.rng.choice(sides), self.rng.choice(sides)

    def program(self) -> Fuzzed:
        body = [self.launch() for _ in range(self.rng.choice((1, 1, 1, 2)))]
        return Fuzzed(self.seed, self.devices, tuple(self.parameters), tuple(body))

    # -- launches ----------------------------------------------------------------------------------------------------

    def launch(self) -> Line:
        """A launch: tiles, statements on them, and stores of what they hold in the end."""
        self.threads = self.rng.choice((32, 64, 128, 128, 256, 256))
        self.kept = [b for b in self.buffers if b.kind == "global" and b.defined]
        self.buffers = [b for b in self.buffers if b.kind in ("input", "global")]
        self.at_head, self.at_begin = [], []
        body: list[Line] = []
        while not body:
            body = self.statements(Scope(), self.rng.randint(3, 8)) + self.stores()
        cluster = f"cta_cluster={self.cluster}, " if self.cluster else ""
        names = f"device={self.devices}, {cluster}block={self.blocks}, threads={self.threads}"
        scale = 'with T.Scale("block"):'
        if self.cluster:
            scale = 'with T.Scale("block") as (rank, size):'
        if self.devices > 1:
            scale = 'with T.Scale("block"), T.Scale("device") as (rank, size):'
        return Line(f"with T.Kernel({names}) as b:", [*self.at_head, Line(scale, [*self.at_begin, *body])])

    def stores(self) -> list[Line]:
        """Store tiles to tensors."""
        tiles = [b for b in self.buffers if b.kind in ("device", "shared", "fragment") and b.defined and not b.inner]
        found: list[Line] = []
        for tile in tiles:
            target = self.tensor(tile.shape, tile.dtype)
            target.defined, target.bound = True, tile.bound
            found.append(Line(f"T.copy({self.source(tile)}, {target.whole})"))
        return found

    # -- statements --------------------------------------------------------------------------------------------------

    def statements(self, scope: Scope, count: int) -> list[Line]:
        found: list[Line] = []
        while count > 0:
            lines = self.rng.choice(self.choices(scope))(scope)
            found += lines or []
            count -= 1
        return found

    def choices(self, scope: Scope) -> list[Callable[[Scope], list[Line] | None]]:
        """Statements that are possible here, weighted by their frequency."""
        simple = [self.load, *[self.elementwise] * 5, self.copy, self.copy, self.fill, self.reduce]
        if scope.group is not None:
            return [*[self.elementwise] * 4, self.copy, self.group_barrier]
        simple += [self.product, self.atomic]
        if len(scope.loops) < 2 and not scope.branched:
            simple += [self.loop, self.loop, self.pipelined]
        if not scope.branched:
            simple += [self.branch, *[self.exchange] * (3 if self.devices > 1 or self.cluster else 0)]
            if not scope.loops:
                simple += [self.groups, self.groups, self.threadwise]
        return simple

    def load(self, scope: Scope) -> list[Line] | None:
        """A tile of an input."""
        tile = self.target(scope, kinds=("shared", "fragment", "device"))
        if tile is None or len(tile.shape) != 2:
            return None
        source, slot = self.input(tile.shape, tile.dtype), str(self.rng.randrange(SLOTS))
        if scope.loops and self.rng.random() < 0.7:
            slot = f"{self.rng.choice(scope.loops)[0]} % {SLOTS}"
        self.note(scope, tile, SMALL)
        if tile.kind == "device":
            rows, columns = tile.shape
            return [Line(f"T.copy({source.name}[b, {slot}, 0:{rows}, 0:{columns}], {self.full(tile)})")]
        return [Line(f"T.copy({source.name}[b, {slot}, 0, 0], {tile.name})")]

    def copy(self, scope: Scope) -> list[Line] | None:
        """All of a tile, or some rows of it that others replace."""
        source = self.defined(scope)
        if source is None or not self.may_read(scope, source):
            return None
        holds = ("int32", "float32") if source.bound > SMALL else (source.dtype, *DTYPES[:-1])
        same = lambda b: b.shape == source.shape and b.dtype in holds  # noqa: E731
        target = self.target(scope, shape=source.shape, allowed=lambda b: b is not source and same(b))
        if target is None:
            return None
        if scope.group is not None:
            return self.group_copy(scope, source, target)
        rows = source.shape[0]
        both = "fragment" not in (source.kind, target.kind)
        if both and target.defined and rows % 2 == 0 and self.rng.random() < 0.4:
            half, rest = rows // 2, [(0, n) for n in source.shape[1:]]
            low, to = self.rng.choice((0, half)), self.rng.choice((0, half))
            target.bound = max(target.bound, source.bound)
            return [Line(f"T.copy({source.region([(low, low + half), *rest])}, "
                         f"{target.region([(to, to + half), *rest])})")]  # fmt: skip
        self.note(scope, target, source.bound)
        return [Line(f"T.copy({self.source(source, target)}, {self.source(target, source)})")]

    def fill(self, scope: Scope) -> list[Line] | None:
        target = self.target(scope, kinds=("shared", "fragment"))
        if target is None:
            return None
        self.note(scope, target, SMALL)
        if self.rng.random() < 0.3:
            return [Line(f"T.clear({target.name})")]
        return [Line(f"T.fill({target.name}, {self.rng.randint(-9, 9)})")]

    def elementwise(self, scope: Scope) -> list[Line] | None:
        """A loop over elements that reads those of others, and now and then writes some only."""
        target = self.target(scope)
        if target is None:
            return None
        fixed = target.kind == "fragment" or scope.group is not None
        order = list(range(len(target.shape)))
        if not fixed:
            self.rng.shuffle(order)
        variables = [f"i{n}" for n in range(len(order))]
        runs = [target.shape[axis] for axis in order]
        if target.kind == "fragment" and target.defined and runs[0] % 2 == 0 and self.scattered.random() < 0.03:
            runs[0] //= 2
        place = [""] * len(order)
        for variable, run, axis in zip(variables, runs, order, strict=True):
            place[axis] = variable if fixed else self.own(run, variable)
        if scope.group is not None:
            runs, place = self.share(scope, target, runs, place)
        terms = self.terms(scope, target, variables, runs, place)
        store = Line(f"{target.at(*place)} = {self.wrapped(terms, target.dtype)}")
        if target.defined and self.rng.random() < 0.15:
            store = Line(f"if {variables[-1]} % {self.rng.choice((2, 3))} == 0:", [store])
            self.note(scope.inside(branched=True), target, SMALL)
        else:
            self.note(scope, target, SMALL)
        names = ", ".join(variables)
        return [Line(f"for {names} in T.Parallel({', '.join(map(str, runs))}):", [store])]

    def terms(self, scope: Scope, target: Buffer, variables: list[str], runs: list[int], place: list[str]) -> list[str]:
        """Elements of other buffers, as numbers, and a value of the position itself."""
        found = [f"{variables[0]} * {self.rng.randint(0, 3)} + {self.rng.randint(0, 9)}"]
        for _ in range(self.rng.randint(1, 3)):
            buffer = self.defined(scope)
            if buffer is None:
                continue
            element = self.element(scope, buffer, target, variables, runs, place)
            if element is not None:
                factor = self.rng.choice(("", "", " * 2", " * -1"))
                found.append(self.value(buffer, element) + factor)
        return found

    def element(
        self, scope: Scope, buffer: Buffer, target: Buffer, variables: list[str], runs: list[int], place: list[str]
    ) -> str | None:
        """An element of a buffer in a loop; None where the loop may not read it."""
        if buffer is target:
            return buffer.at(*place)
        if buffer.kind == "fragment":
            if buffer.inner != (scope.group is not None):
                return None
            if buffer.shape == tuple(runs):
                if self.scattered.random() < 0.03:  # TileLang may have no layout for them, or one without some elements
                    variables = [f"{n - 1} - {v}" for n, v in zip(runs, variables, strict=True)]
                return buffer.at(*variables) if target.kind != "fragment" or target.shape == buffer.shape else None
            if len(buffer.shape) == 1 and len(runs) == 2 and buffer.shape[0] in runs:
                return buffer.at(variables[runs.index(buffer.shape[0])])
            return None
        if not self.may_read(scope, buffer):
            return None
        if buffer.name in (scope.group.written if scope.group else ()):
            return buffer.at(*place) if buffer.shape == target.shape and not target.inner else None
        if scope.group is not None:
            scope.group.crossed.add(buffer.name)
        axes = [self.rng.randrange(len(runs)) for _ in buffer.shape]
        if len(runs) == len(buffer.shape) and self.rng.random() < 0.8:
            axes = list(range(len(runs)))
            if self.rng.random() < 0.4:
                axes.reverse()
        inner = [self.coordinate(n, variables[a], runs[a], scope) for n, a in zip(buffer.shape, axes, strict=True)]
        return self.outer(buffer, scope).at(*inner)

    def reduce(self, scope: Scope) -> list[Line] | None:
        """Over one dimension of a fragment."""
        source = self.defined(scope, lambda b: b.kind == "fragment" and len(b.shape) == 2)
        if source is None:
            return None
        dim, exact = self.rng.randrange(2), source.dtype in ("int32", "float32")
        what = self.rng.choice(("sum", "max", "min", "absmax") if exact else ("max", "min"))
        bound = source.bound * source.shape[dim] if what == "sum" else source.bound
        target = self.target(
            scope, ("fragment",), (source.shape[1 - dim],), lambda b: b.dtype == source.dtype, source.dtype
        )
        if target is None or source.dtype == "int8" or bound > (SMALL * 128 if scope.loops else EXACT):
            return None
        keep = target.defined and self.rng.random() < 0.3 and target.bound + bound <= EXACT and not scope.loops
        self.note(scope, target, bound + target.bound if keep else bound)
        return [Line(f"T.reduce_{what}({source.name}, {target.name}, dim={dim}{', clear=False' if keep else ''})")]

    def product(self, scope: Scope) -> list[Line] | None:
        """A GEMM of tiles in shared memory."""
        if scope.loops or scope.branched:
            return None
        loads, multiply, c = self.multiplied()
        return [*loads, multiply] if c else None

    def multiplied(self) -> tuple[list[Line], Line, Buffer]:
        """Loads of two new tiles, and their GEMM, into an initialized tile."""
        dtype = self.rng.choice(("float16", "bfloat16"))
        k = self.rng.choice((16, 32, 64))
        shapes = [(m, n) for m in (16, 32, 64, 128) for n in (16, 32, 64) if m * n <= 4096]
        enough = [(m, n) for m, n in shapes if m // 16 * n // 8 >= self.threads // 8]
        m, n = self.rng.choice(enough if self.rng.random() < 0.9 else shapes)
        flip = self.rng.random() < 0.5
        a, b = self.tile((m, k), dtype, "shared"), self.tile((n, k) if flip else (k, n), dtype, "shared")
        c = self.tile((m, n), "float32", "fragment")
        self.at_begin.append(Line(f"T.clear({c.name})"))
        loads = []
        for tile in (a, b):
            source = self.input(tile.shape, dtype)
            loads.append(Line(f"T.copy({source.name}[b, {self.rng.randrange(SLOTS)}, 0, 0], {tile.name})"))
            tile.defined = True
        c.defined, c.bound = True, 8 * k * SMALL * SMALL
        return loads, Line(f"T.gemm({a.name}, {b.name}, {c.name}{', transpose_B=True' if flip else ''})"), c

    def atomic(self, scope: Scope) -> list[Line] | None:
        """Many threads add to few elements of a tensor or of shared memory."""
        few = lambda b: b.dtype == "int32" and b.kind != "fragment" and b.bound <= EXACT  # noqa: E731
        counts = self.defined(scope, lambda b: few(b) and b.kind != "input")
        source = self.defined(scope, lambda b: b.kind != "fragment" and b.bound <= SMALL)
        if counts is None or source is None or source is counts or scope.loops:
            return None
        variables = [f"i{n}" for n in range(len(source.shape))]
        place = [self.coordinate(n, self.rng.choice(variables), 1 << 30, scope) for n in counts.shape]
        counts.bound += SMALL * source.shape[0] * (source.shape[1] if len(source.shape) > 1 else 1)
        if counts.bound > EXACT:
            return None
        read = self.value(source, self.outer(source, scope).at(*variables))
        loop = f"for {', '.join(variables)} in T.Parallel({', '.join(map(str, source.shape))}):"
        return [Line(loop, [Line(f"T.atomic_add({counts.at(*place)}, {read})")])]

    # -- control flow ------------------------------------------------------------------------------------------------

    def loop(self, scope: Scope) -> list[Line]:
        """A serial loop, one that is unrolled, one that memory ends, or one with a condition."""
        self.made += 1
        name, count = f"k{self.made}", self.rng.randint(1, 4)
        kind = self.rng.choice(("serial", "serial", "unroll", "counted", "while"))
        inside = scope.inside(loops=(*scope.loops, (name, count)), branched=scope.branched or kind == "counted")
        before = {id(b): b.bound for b in self.buffers}
        body = self.statements(inside, self.rng.randint(1, 4)) or [Line("pass")]
        for b in self.buffers:
            b.bound = max(b.bound, before.get(id(b), 0))  # in the first iteration it may have been larger
        if kind == "counted":
            extent = f"T.max(T.min({self.chosen().at('b')}, {count}), 0)"
            return [Line(f"for {name} in T.serial({extent}):", body)]
        if kind == "while":
            begin = [Line(f'{name} = T.alloc_var("int32")'), Line(f"{name} = 0")]
            return [*begin, Line(f"while {name} < {count}:", [*body, Line(f"{name} = {name} + 1")])]
        return [Line(f"for {name} in T.{kind}({count}):", body)]

    def pipelined(self, scope: Scope) -> list[Line] | None:
        """Loads ahead, and their uses: a GEMM, or a loop over elements. There may be a serial loop around it."""
        if scope.loops:
            return None
        count, stages = self.rng.randint(1, 5), self.rng.choice((1, 2, 2, 3))
        turns = self.rng.randint(1, 3) if self.rng.random() < 0.5 else 0
        loops = ((f"k{self.made + 1}", turns),) if turns else ()
        self.made += len(loops)
        inside = scope.inside(loops=(*loops, ("k0", count)))
        slot, begin, in_loop, behind = self.slot(loops)
        if self.rng.random() < 0.5:
            loads, multiply, c = self.multiplied()
            c.bound *= turns or 1
            body = [*[Line(load.text.replace("[b, ", f"[b, ({slot} + ", 1).replace(", 0, 0]", f") % {SLOTS}, 0, 0]", 1))
                      for load in loads], multiply]  # fmt: skip
        else:
            tile = self.tile((self.rows, self.columns), self.rng.choice(self.dtypes), "shared")
            source = self.input(tile.shape, tile.dtype)
            tile.defined = True
            body = [Line(f"T.copy({source.name}[b, ({slot}) % {SLOTS}, 0, 0], {tile.name})")]
            body += self.elementwise(inside) or []
        lines = [Line(f"for k0 in T.Pipelined({count}, num_stages={stages}):", [*body, *in_loop]), *behind]
        return [*begin, *([Line(f"for {loops[0][0]} in T.serial({turns}):", lines)] if turns else lines)]

    def slot(self, loops: tuple[tuple[str, int], ...]) -> tuple[str, list[Line], list[Line], list[Line]]:
        """The place of loads in a pipelined loop, and lines before it and the loops, in it, and behind it."""
        if self.rng.random() < 0.6:
            return " + ".join(["k0", *(name for name, _ in loops)]), [], [], []
        self.made += 1
        name = f"at{self.made}"
        begin = [Line(f'{name} = T.alloc_var("int32")'), Line(f"{name} = {self.rng.randrange(SLOTS)}")]
        more = [Line(f"{name} = {name} + {self.rng.randint(1, 2)}")]
        return f"k0 + {name}", begin, *((more, []) if self.rng.random() < 0.5 else ([], more))

    def branch(self, scope: Scope) -> list[Line] | None:
        """Under a condition that is the same for all threads of the unit."""
        conditions = [f"b % {self.rng.choice((2, 3))} == 0", "b > 0", *[f"{name} > 0" for name, _ in scope.loops]]
        if self.devices > 1 or self.cluster:
            conditions.append(f"rank == {self.rng.randrange(max(self.devices, self.cluster))}")
        conditions.append(f"{self.chosen().at('b')} > 0")
        inside = scope.inside(branched=True)
        body = self.statements(inside, self.rng.randint(1, 3))
        if not body:
            return None
        lines = [Line(f"if {self.rng.choice(conditions)}:", body)]
        other = self.statements(inside, self.rng.randint(1, 2)) if self.rng.random() < 0.4 else []
        return [*lines, Line("else:", other)] if other else lines

    # -- units inside a block ----------------------------------------------------------------------------------------

    def groups(self, scope: Scope) -> list[Line] | None:
        """Warpgroups or warps, each with rows of its own, and barriers between."""
        level, threads = self.rng.choice((("warpgroup", 128), ("warp", 32)))
        units = self.threads // threads
        if units < 2 or self.rows % units:
            return None
        group = Group("u", units, threads)
        first = len(self.buffers)
        own = self.tile((self.rows // units, self.columns), self.rng.choice(self.dtypes), "fragment", inner=True)
        begin = self.at_begin.pop()
        body = self.statements(scope.inside(group=group), self.rng.randint(2, 6))
        del self.buffers[first : first + 1]
        assert own not in self.buffers
        return [Line(f'with T.Scale("{level}") as (u, _):', [begin, *body])] if body else None

    def group_barrier(self, scope: Scope) -> list[Line] | None:
        """The units of a group synchronize."""
        assert scope.group is not None
        if not scope.group.written | scope.group.crossed:
            return None
        scope.group.written.clear()
        scope.group.crossed.clear()
        return [Line("T.barrier()")]

    def group_copy(self, scope: Scope, source: Buffer, target: Buffer) -> list[Line] | None:
        if len(source.shape) != 2 or "fragment" in (source.kind, target.kind) or source.name == target.name:
            return None
        assert scope.group is not None
        share = source.shape[0] // scope.group.units
        if source.shape[0] % scope.group.units:
            return None
        rows, columns = f"{scope.group.rank} * {share}:({scope.group.rank} + 1) * {share}", f"0:{source.shape[1]}"
        self.note(scope, target, source.bound)
        return [Line(f"T.copy({source.at(rows, columns)}, {target.at(rows, columns)})")]

    def share(self, scope: Scope, target: Buffer, runs: list[int], place: list[str]) -> tuple[list[int], list[str]]:
        """A unit's part of a loop over elements."""
        assert scope.group is not None
        if target.inner:
            return runs, place
        share = runs[0] // scope.group.units
        return [share, *runs[1:]], [f"{scope.group.rank} * {share} + {place[0]}", *place[1:]]

    def threadwise(self, scope: Scope) -> list[Line] | None:
        """Each thread its own element, a barrier, and then another one's."""
        tile = self.tile((self.threads,), self.rng.choice(self.dtypes), "shared")
        target = self.tensor((self.threads,), "int32")
        tile.defined = target.defined = True
        shift = self.rng.randrange(self.threads)
        write = f"{tile.at('t')} = {self.wrapped([f't * 3 + {shift}'], tile.dtype)}"
        read = f"{target.at('t')} = {self.value(tile, tile.at(f'(t + {shift}) % {self.threads}'))}"
        return [Line('with T.Scale("thread") as (t, _):', [Line(write), Line("T.barrier()"), Line(read)])]
