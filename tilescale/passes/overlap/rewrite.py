# SPDX-License-Identifier: MIT
"""The rewrite: from a sequential program to one whose collectives overlap with its grids.

Collective by collective, in program order. Each step is from a traced function to a traced function, so the result is a
program of the language: it can be printed, checked, emulated, timed and lowered as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.errors import UsageError
from tilescale.hda import Machine
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps
from tilescale.passes.overlap.estimate import pays
from tilescale.passes.overlap.exchange import overlap_exchange
from tilescale.passes.overlap.gather import Gathers, overlap_gather, overlap_gathers
from tilescale.passes.overlap.legality import CollectiveSite, ShiftSite, check, sites
from tilescale.passes.overlap.prefetch import overlap_prefetch
from tilescale.passes.overlap.rotation import grids_first
from tilescale.passes.overlap.scatter import overlap_reduction
from tilescale.passes.overlap.schedule import ACCUMULATORS, CALLER, COLLECTIVE, QUEUE, WIRES, Move, Schedule
from tilescale.passes.overlap.shift import overlap_shift
from tilescale.passes.retrace import for_machine
from tilescale.passes.structure import structure
from tilescale.program.dependence import Dependence, ProgramStep
from tilescale.program.model import Program, location

LIKELY = 4096
"""Value of a symbolic extent for decisions: the schedule is that of the same program with numbers for its extents."""

_PATTERNS: dict[str, Callable[[CollectiveSite, ProgramStep, Dependence, AccessMaps, Move], ir.PrimFunc]] = {
    "all_gather": overlap_gather,
    "reduce_scatter": overlap_reduction,
    "allreduce": overlap_reduction,
    "all_to_all": overlap_exchange,
}


def overlap(func: ir.PrimFunc, machine: Machine, schedule: Schedule | None = None) -> tuple[ir.PrimFunc, Schedule]:
    """The program with collectives overlapped where that is legal, and the decision for each.

    Args:
        func: a traced function.
        schedule: what to do with each collective; None leaves that to the compiler.

    Raises:
        UsageError: a schedule of another program.
        PhaseError, ...: as `passes.pipeline.analyse`.
    """
    func = for_machine(func, machine)
    program = structure(func, machine)
    found = [site for site, _ in sites(Dependence(program, machine))]
    moves = [Move(s.name, s.tensors, where=location(s.stmt)) for s in found]
    if schedule is not None:
        moves = _asked(schedule, moves)
    symbolic = _likely_extents(program) if moves else {}
    if symbolic:
        likely = overlap(tir.with_values(func, symbolic), machine, schedule)[1].moves
        moves = [
            replace(
                m,
                **{name: getattr(own, name) for name in ("adds", "ordered", "local", "group", "blocks")},
                chunk=own.chunk or m.chunk,
            )
            for m, own in zip(likely, moves, strict=True)
        ]
    state = _RewriteState(func, machine, by_cost=schedule is None and not symbolic, symbolic=symbolic)
    for together in _together(moves):
        state.take(together)
    return state.func, Schedule(moves)


def _asked(schedule: Schedule, moves: list[Move]) -> list[Move]:
    """Copies of the moves of a given schedule. Raises UsageError if it is one of another program."""
    given, own = ([(m.collective, m.tensors) for m in each] for each in (schedule.moves, moves))
    if given != own:
        raise UsageError(
            f"the schedule is for {given or 'no collectives'}, the program has {own or 'none'}",
            hint="take the schedule of this program, kernel.moves, and change that",
        )
    for move in schedule.moves:
        _check_fields(move)
    return [
        replace(m, where=mine.where, axis=0, why="", in_order_s=None, overlapped_s=None, estimates={})
        for m, mine in zip(schedule.moves, moves, strict=True)
    ]


def _together(moves: list[Move]) -> list[list[Move]]:
    """The moves in order; consecutive gathers are in one list if tiles read local rows of all from the sources."""
    found: list[list[Move]] = []
    for move in moves:
        if found and _reads_source(move) and _reads_source(found[-1][0]):
            found[-1].append(move)
        else:
            found.append([move])
    return found


def _reads_source(move: Move) -> bool:
    return move.overlapped and move.collective == "all_gather" and move.local is not None


def _check_fields(move: Move) -> None:
    is_rasterized = move.carrier == QUEUE and (move.group is not None or move.blocks is not None)
    has_carrier = move.collective == "all_gather" and (is_rasterized or move.carrier == CALLER and _reads_source(move))
    for name in ("adds",) if has_carrier else ("carrier", "adds"):
        if getattr(move, name) is not None and _PATTERNS.get(move.collective) is not overlap_reduction:
            raise UsageError(
                f"{move.title}: {name}={getattr(move, name)!r} is for reductions: nothing of it is added up",
                hint=f"set {name}=None",
            )


@dataclass
class _RewriteState:
    """A function during the rewrite.

    Attributes:
        by_cost: whether collectives without an estimated gain stay sequential.
        symbolic: extents that are known at launch only, each with the value for which `moves` were decided.
        kept: how many collectives stay in order until now.
        flags: flags of earlier rewrites.
    """

    func: ir.PrimFunc
    machine: Machine
    by_cost: bool
    symbolic: dict[ir.Var, int]
    kept: int = 0
    flags: set[ir.Var] = field(default_factory=set)

    def take(self, moves: list[Move]) -> None:
        """Continue with the next collectives: one, or gathers that one grid reads, else one by one."""
        move, *others = moves
        try:
            if not move.overlapped:
                raise Declined(move.why or "as requested")
            self._overlap(moves)
            for each in moves:
                each.why += "".join(f", {var} as {value}" for var, value in self.symbolic.items())
        except Declined as reason:
            if others:
                for each in moves:
                    self.take([each])
                return
            self.kept += 1
            move.overlapped = False
            move.why = reason.reason
            if reason.where is not None and reason.where != move.where:
                move.why += f" (line {reason.where.line})"

    def _overlap(self, moves: list[Move]) -> None:
        move = moves[0]
        site, mine, graph, uses = self._next(self.func)
        before = _flags(uses.program)
        level = site.made[0].level if isinstance(site, ShiftSite) else site.made.level
        asks = move.carrier == COLLECTIVE or move.adds == ACCUMULATORS or move.local or move.group
        if uses.sizes[level] == 1 and not asks:
            raise Declined("there is one unit only")
        if isinstance(site, ShiftSite) and (turned := grids_first(site, uses)) is not None:
            site, mine, graph, uses = self._next(turned)
        if isinstance(site, ShiftSite):
            changed = overlap_shift(site, mine, graph, uses, move, self.flags)
        elif move.wire in WIRES and _PATTERNS.get(site.name) is not overlap_reduction:
            raise Declined(f"only parts of a reduction are rounded to {move.wire}")
        elif site.name == "all_gather" and mine.around:
            changed = overlap_prefetch(site, mine, graph, uses, move)
        elif len(moves) > 1:
            changed = overlap_gathers(self._gathers(moves, graph), graph, uses)
        elif site.name in _PATTERNS:
            check(site, mine, graph, self.flags)
            changed = _PATTERNS[site.name](site, mine, graph, uses, move)
        else:
            raise Declined(f"there is no rewrite of {site.name}")
        if self.by_cost and not pays(move):
            raise Declined("it is not estimated to save time")
        self.func = changed
        self.flags |= _flags(structure(self.func, self.machine)) - before

    def _gathers(self, moves: list[Move], graph: Dependence) -> Gathers:
        """The next gathers. Raises Declined if they are not of one device phase."""
        found: list[tuple[CollectiveSite, ProgramStep, Move]] = []
        for (site, mine), move in zip(sites(graph)[self.kept :], moves, strict=False):
            assert isinstance(site, CollectiveSite)
            check(site, mine, graph, self.flags)
            found.append((site, mine, move))
            if site.phase is not found[0][0].phase:
                raise Declined("the gather before is in another phase")
        return found

    def _next(self, func: ir.PrimFunc) -> tuple[CollectiveSite | ShiftSite, ProgramStep, Dependence, AccessMaps]:
        """The next collective of a function, its first statement, and the analyses of the function."""
        program = structure(func, self.machine)
        graph = Dependence(program, self.machine)
        return *sites(graph)[self.kept], graph, AccessMaps(program, self.machine, _sizes(program), bool(self.symbolic))


def _sizes(program: Program) -> dict[str, int]:
    """Units of each launched level. Raises Declined if they are known at launch only."""
    known = {name: ir.constant(extent) for name, extent in program.extents}
    if None in known.values():
        raise Declined("how many units there are is known at launch only", program.launches[0].where)
    return {name: size for name, size in known.items() if size is not None}


def _flags(program: Program) -> set[ir.Var]:
    """Flags that are zero when a call begins."""
    return {data for launch in program.launches for data in launch.flags}


def _likely_extents(program: Program) -> dict[ir.Var, int]:
    """The symbolic extents of a program's tensors, each with a likely value; those of the rows of one tensor have a
    likely product."""
    units = {var for _, extent in program.extents for var in ir.variables(extent)}
    shapes = [[*map(ir.int_node, p.buffer.shape)] for p in program.parameters if p.buffer is not None]
    found = {var: LIKELY for shape in shapes for n in shape for var in sorted(ir.variables(n) - units, key=str)}
    for shape in shapes:
        rows = {var for n in shape[:-1] for var in ir.variables(n) - units}
        found |= {var: min(found[var], round(LIKELY ** (1 / len(rows)))) for var in rows}
    return found
