# SPDX-License-Identifier: MIT
"""The thread of a unit that makes an access, as far as it is known before stock TileLang distributes iterations.

Why: two accesses of an element by the same thread need no barrier. Three rules decide: the index names the thread; a
nest of parallel loops is distributed in the order of its iterations, by vectors as long as its accesses allow; an
iteration that accesses an element of a fragment runs on the thread that holds it. An element then has one thread if its
index determines the iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tilelang_core import accesses, ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import Gemm
from tilescale.backends.tilelang.lowering.markers import ExecutingThreads
from tilescale.program.fragments import is_whole, spread, steps
from tilescale.program.parallel_loops import is_fragment, loops_of, vector_lengths
from tilescale.program.regions import BoundVariables


@cache
def _axis(number: int) -> ir.Var:
    """A canonical variable of an iteration where two statements are compared: of its loops, or of its fragment."""
    return ir.Var(f"axis{number}", "int32")


@dataclass(frozen=True)
class PhaseBuffers:
    """Properties of a phase's buffers, from its statements.

    Attributes:
        threads: the thread index variables, and their extents.
        held: data variables of fragments whose elements each belong to one thread.
        steady: data of variables (`T.alloc_var`) with a single value in all indices that read them.
    """

    threads: Mapping[ir.Var, int]
    held: frozenset[ir.Var] = frozenset()
    steady: frozenset[ir.Var] = frozenset()

    @classmethod
    def of(cls, stmt: ir.Stmt, threads: Mapping[ir.Var, int], by: ExecutingThreads) -> PhaseBuffers:
        """The properties of all statements of a phase."""
        return cls(threads, _held(stmt, by), _steady(stmt))

    def is_fixed(self, index: Any) -> bool:
        """Whether an index has the same value whenever it is evaluated for the same iteration."""
        return ir.is_pure(tir.rewrite(tir.evaluate(index), enter=self._unread).value)

    def _unread(self, node: ir.Node) -> Any:
        return _unloaded(node) if isinstance(node, ir.BufferLoad) and node.buffer.data in self.steady else None


@dataclass(frozen=True)
class ThreadMap:
    """The mapping from elements of an access to threads.

    Attributes:
        rule: the distribution of iterations over threads.
        place: the index along each dimension of the tensor, by iteration; None where the iteration does not determine
            it.
    """

    rule: tuple[Any, ...]
    place: tuple[Any, ...] = ()

    def agrees(self, other: ThreadMap) -> bool:
        """Whether the same thread makes both accesses of any element that both touch."""
        return _alike(self.rule, other.rule) and _alike(self.place, other.place)

    def substituted(self, new: Mapping[ir.Var, Any]) -> ThreadMap:
        """The map with variables substituted."""
        return replace(self, place=tuple(n if n is None else ir.substitute(n, dict(new)) for n in self.place))


def of_index(access: Any, known: PhaseBuffers) -> ThreadMap | None:
    """The map of a statement that all threads execute; None if several threads may access one element."""
    (thread,) = known.threads if len(known.threads) == 1 else (None,)
    if thread is None:
        return None
    place = tuple(n if known.is_fixed(n) and _is_affine(n, thread) else None for n in access.begins or ())
    return ThreadMap(("index",), place) if any(n is not None for n in place) else None


def of_copy(found: Iterable[accesses.BufferAccess], known: PhaseBuffers) -> ThreadMap | None:
    """The map of a copy between a tensor and a whole fragment with known holders: by element of the fragment."""
    tensors, fragments = _by_kind(found)
    if len(tensors) != 1 or len(fragments) != 1 or not is_whole(fragments[0]):
        return None
    tensor, fragment = tensors[0], fragments[0]
    extents, shape = ir.constants(tensor.extents or ()), ir.constants(fragment.buffer.shape)
    if tensor.begins is None or extents is None or shape is None or fragment.buffer.data not in known.held:
        return None
    wide = [n for n in shape if n > 1]
    if [n for n in extents if n > 1] != wide:
        return None
    axes = map(_axis, range(len(wide)))
    indices = [b + next(axes) if n > 1 else b for b, n in zip(tensor.begins, extents, strict=True)]
    return _map(("held", fragment.buffer.data), indices, wide, set(), known)


def of_loops(
    nest: ir.For, found: list[accesses.BufferAccess], known: PhaseBuffers, threads: int
) -> Callable[[Any], ThreadMap | None]:
    """The map of each access of a nest of parallel loops."""
    loops = loops_of(nest)
    extents = ir.constants(loop.extent for loop in loops)
    if extents is None:
        return lambda access: None
    rule, order = _rule(nest, loops, found, known.held, threads)
    if rule is None:
        return lambda access: None
    names = {loops[at].loop_var: _axis(axis) for axis, at in enumerate(order)}
    bound, sizes = BoundVariables.of(nest).names - names.keys(), [extents[at] for at in order]
    return lambda access: _map(rule, [ir.substitute(n, names) for n in access.begins or ()], sizes, bound, known)


def of_condition(condition: ir.PrimExpr, known: PhaseBuffers) -> ThreadMap | None:
    """The map of a branch that one thread takes, with a constant index; None if another may take it too, or later."""
    equal = [test for test in ir.conjuncts(condition) if isinstance(test, ir.EQ)]
    sides = [pair for test in equal for pair in ((test.a, test.b), (test.b, test.a))]
    index = {thread: ir.constant(number) for thread, number in sides if thread in known.threads}
    rule = tuple(index.get(thread) for thread in known.threads)
    return None if None in rule else ThreadMap(("one", *rule))


def _held(stmt: ir.Stmt, by: ExecutingThreads) -> frozenset[ir.Var]:
    """Data variables of fragments whose elements each belong to one thread: accumulators of GEMMs, and spread
    fragments."""
    found = list(steps(stmt, by.threads, _unit))
    products = [Gemm.of(s.value) for s, _ in found if isinstance(s, ir.Evaluate) and ir.op_name(s.value) == tl.GEMM]
    return spread(found) | {ir.region_parts(product.c)[0].data for product in products}


def _unit(stmt: ir.Stmt) -> int | None:
    unit = ExecutingThreads.of(stmt)
    return unit.threads if unit is not None else None


def _steady(stmt: ir.Stmt) -> frozenset[ir.Var]:
    """Data variables of variables that are stored to once, before all loops."""
    stores = [s.buffer.data for s in ir.statements(stmt) if isinstance(s, ir.BufferStore) and _is_variable(s.buffer)]
    looped = {
        inner.buffer.data
        for loop in ir.statements(stmt)
        if isinstance(loop, ir.For | ir.While)
        for inner in ir.statements(loop)
        if isinstance(inner, ir.BufferStore)
    }
    return frozenset(data for data in stores if stores.count(data) == 1 and data not in looped)


def _is_variable(buffer: ir.Buffer) -> bool:
    return bool(buffer.scope() == ir.VARIABLE)


def _rule(
    nest: ir.For, loops: list[ir.For], found: list[accesses.BufferAccess], held: frozenset[ir.Var], threads: int
) -> tuple[tuple[Any, ...] | None, list[int]]:
    """The distribution of a nest, and the order of its loops for it."""
    variables = [loop.loop_var for loop in loops]
    for access in found:
        order = _order(access.begins, variables)
        if access.buffer.data in held and order is not None:
            return ("held", access.buffer.data), order
    plain, lengths = list(range(len(loops))), vector_lengths(loops, found, threads)
    if lengths is None:
        return None, plain
    extents = [ir.integer(loop.extent) for loop in loops]
    if lengths == [1]:
        return ("loops", *extents), plain
    alike = _vectors(nest, variables, found)
    return None if alike is None else ("loops", *extents, *alike), plain


def _order(begins: tuple[Any, ...] | None, variables: list[ir.Var]) -> list[int] | None:
    """The loop variable of each index, if the indices are those of all loops."""
    found = [next((at for at, v in enumerate(variables) if v.same_as(n)), None) for n in begins or ()]
    order = [at for at in found if at is not None]
    return order if len(order) == len(found) and sorted(order) == list(range(len(variables))) else None


def _vectors(nest: ir.For, variables: list[ir.Var], found: list[accesses.BufferAccess]) -> list[str] | None:
    """The factors that decide the vector width of a nest; None if its values matter in addition to its accesses."""
    names: dict[ir.Var, Any] = {variable: _axis(axis) for axis, variable in enumerate(variables)}
    said: set[str] = set()
    for access in found:
        if access.begins is None:
            return None
        tile = hash(access.buffer.data) if ir.scope_kind(access.buffer) == "shared" else ""  # it may be swizzled
        indices = [ir.simplify(ir.substitute(n, names), {}) for n in access.begins]
        said.add(f"{access.buffer.dtype} {access.buffer.shape} {indices} {tile}")
    for inner in ir.statements(nest):
        if isinstance(inner, ir.BufferStore):
            value = tir.rewrite(tir.evaluate(inner.value), enter=_unloaded).value
            if ir.variables(value) & names.keys() or ir.contains(value, lambda node: isinstance(node, ir.Call)):
                return None
            said.update(f"to {cast.dtype}" for cast in ir.instances(value, ir.Cast))
        elif not isinstance(inner, ir.For | ir.SeqStmt) or isinstance(inner, ir.For) and inner.loop_var not in names:
            return None
    return sorted(said)


def _unloaded(node: ir.Node) -> Any:
    return ir.Var("loaded", str(node.dtype)) if isinstance(node, ir.BufferLoad) else None


def _map(
    rule: tuple[Any, ...], indices: Iterable[Any], extents: list[int], bound: set[ir.Var], known: PhaseBuffers
) -> ThreadMap | None:
    """A map, if the index of an element determines the iteration; `bound` are names with a value in each iteration."""
    sizes = {_axis(number): extent for number, extent in enumerate(extents)}
    place = tuple(_fixed_index(index, sizes.keys(), bound, known) for index in indices)
    determined = {v for n in place if n is not None and _is_injective(n, sizes) for v in ir.variables(n)}
    return ThreadMap(rule, place) if all(v in determined or n == 1 for v, n in sizes.items()) else None


def _fixed_index(index: Any, axes: Set[ir.Var], bound: set[ir.Var], known: PhaseBuffers) -> Any:
    """An index that depends on the iteration, and has the same value at each evaluation; None for others."""
    used = ir.variables(index)
    return ir.simplify(index, {}) if used & axes and not used & bound and known.is_fixed(index) else None


def _is_injective(index: Any, sizes: Mapping[ir.Var, int]) -> bool:
    strides = [(_stride(index, var), n) for var, n in sizes.items() if var in ir.variables(index)]
    reach = 0
    for stride, n in sorted((abs(s or 0), n) for s, n in strides):
        if n > 1 and stride <= reach:
            return False
        reach += stride * (n - 1)
    return True


def _stride(index: Any, var: ir.Var) -> int | None:
    """The stride of an index in a variable; None unless it is constant."""
    return ir.constant(ir.simplify(ir.substitute(index, {var: var + 1}) - index, {}))


def _is_affine(index: Any, thread: ir.Var) -> bool:
    """Whether an index is the thread index plus a uniform value."""
    return thread not in ir.variables(ir.simplify(index - thread, {}))


def _alike(one: Any, other: Any) -> bool:
    """Whether two things that decide on a thread are equal."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(_alike(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, ir.PrimExpr):
        return isinstance(other, ir.PrimExpr) and ir.same(one, other)
    return type(one) is type(other) and bool(one == other)


def _by_kind(found: Iterable[accesses.BufferAccess]) -> tuple[list[accesses.BufferAccess], list[accesses.BufferAccess]]:
    """Accesses of device memory, and of fragments."""
    listed = list(found)
    return [a for a in listed if a.buffer.scope() == "global"], [a for a in listed if is_fragment(a)]
