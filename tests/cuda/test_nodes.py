# SPDX-License-Identifier: MIT
"""Copies and signals between devices that share no memory: what is planned and refused, and what every rank does."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.host_ranks import Post
from tests.cuda.support import notes, program
from tests.cuda.test_device_phases import steps
from tilescale.backends.cuda import headers
from tilescale.backends.cuda.running import messages, nccl  # noqa: F401 - messages registers its steps
from tilescale.backends.cuda.running.peer_group import PeerGroup
from tilescale.backends.cuda.running.phases import host_step
from tilescale.backends.cuda.running.steps import ProgramCall, run
from tilescale.backends.tilelang.lowering.host_step import HostStep
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.plan import plan
from tilescale.comm import AddressMap, Team, World
from tilescale.comm.heap import default
from tilescale.errors import LaunchError, PeerOutOfRangeError, UnsupportedError
from tilescale.hda import Machine
from tilescale.ops import whole_tensors
from tilescale.program.model import Control, GridPhase, Launch, Sequence

NODES, LOCAL = 2, 2
RANKS = NODES * LOCAL
BY_NODE, FLAT = {"node": NODES, "device": LOCAL}, {"device": RANKS}


@pytest.fixture
def machine(tmp_path: Path) -> str:
    """Two servers of two GPUs; the path of the description, which is in force."""
    path = tmp_path / "two.yaml"
    text = f"extends: h200-sxm-8x4\nlevels:\n  node:\n    count: {NODES}\n  device:\n    count: {LOCAL}\n"
    path.write_text(text, encoding="utf-8")
    with tilescale.use_machine(str(path)):
        yield str(path)


def in_phase(statements: Any, level: str, sizes: dict[str, int]) -> Any:
    """Traces the macro `statements(X, Y, flags, rank, size)` in a phase of a level."""

    @T.prim_func
    def f(X: T.Tensor((8, 4), "float32"), Y: T.Tensor((8, 4), "float32"), flags: T.Tensor((4,), "int32")):
        with T.Kernel(**sizes):
            with T.Scale(level) as (rank, size):
                statements(X, Y, flags, rank, size)

    return f


class Rank:
    """A rank that is a thread, and its view of all memory, of which it may access that of its node."""

    def __init__(self, rank: int, target: LoweringTarget, traced: Any, memory: list[torch.Tensor], post: Post):
        self.program, self.target, self.sizes = traced, target, target.sizes
        self.team, self.device, self.is_alone = SimpleNamespace(rank=rank), torch.device("cpu"), False
        self.peer_group = SimpleNamespace(size=LOCAL, everywhere=self._everywhere, slot=self._slot)
        self.transport, self.reached, self.named, self._memory = post.of(rank), set(), set(), memory
        self.values = [tensor[rank] for tensor in memory]

    def rank(self, level: str) -> int:
        names = [name for name, _ in self.sizes]
        finer = torch.Size(n for _, n in self.sizes[names.index(level) + 1 :]).numel()
        return self.team.rank // finer % dict(self.sizes)[level]

    def _everywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        return next(m for m, v in zip(self._memory, self.values, strict=True) if v.data_ptr() == tensor.data_ptr())

    def _slot(self, device: int) -> int:
        assert device // LOCAL == self.team.rank // LOCAL, "no memory of other nodes has an address"
        return device

    def run(self, part: Any, call: ProgramCall) -> None:
        """The steps of the host in order; grids, which wait here for what has come already, are left out."""
        if isinstance(part, Launch):
            self.run(part.body, call)
        elif isinstance(part, Sequence):
            for inner in part.parts:
                self.run(inner, call)
        elif isinstance(part, Control):
            begin, count = call.evaluate(part.stmt.min), call.evaluate(part.stmt.extent)
            for value in range(begin, begin + count):
                call.variables[part.stmt.loop_var] = value
                self.run(part.parts[0], call)
        elif isinstance(part, HostStep):
            run(host_step(self, part)(call))
        else:
            assert isinstance(part, GridPhase)


def run_all(func: Any, sizes: dict[str, int], machine: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors of all ranks after a run on threads, and after one on the emulator."""
    target = LoweringTarget(Machine.load(machine), tuple(sizes.items()), 1 << 36, headers.__name__)
    traced = program(func, machine)
    body, post = plan(traced, target)[0], Post(RANKS)
    memory = [torch.randn(RANKS, 8, 4), torch.zeros(RANKS, 8, 4), torch.zeros(RANKS, 4, dtype=torch.int32)]
    emulated = [tensor.clone() for tensor in memory]
    ranks = [Rank(rank, target, traced, memory, post) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        for done in [pool.submit(own.run, body, ProgramCall(own.values)) for own in ranks]:
            done.result(timeout=60)
    tilescale.emulate(func, [[tensor[rank] for tensor in emulated] for rank in range(RANKS)], check="none")
    return memory, emulated


@T.macro
def ring(X, Y, flags, rank, size):
    T.copy(X, Y, dst=(rank + 1) % size, signal=flags[0], value=3)
    T.wait(flags[0], ">=", 3)
    T.signal(flags[1], rank + 5, op="set", dst=(rank + size - 1) % size)
    T.wait(flags[1], ">=", 1)


@T.macro
def slices(X, Y, flags, rank, size):
    for turn in T.serial(2):
        first = turn * 4
        T.copy(X[first : first + 4, :], Y[4 - first : 8 - first, :], src=(rank + 1 + turn) % size)


@T.macro
def some(X, Y, flags, rank, size):
    last = size - 1
    if rank == last:
        where = rank * 0
        T.copy(X[where : where + 2, :], Y[2:4, :], dst=0, signal=flags[0])
    else:
        T.signal(flags[2], 7, dst=last)
    if rank == 0:
        T.wait(flags[0], ">=", 1)
        T.copy(X[4:8, 0:3], Y[0:4, 1:4], dst=last, signal=flags[1])
    if rank == last:
        T.wait(flags[1], ">=", 1)


@pytest.mark.parametrize(("level", "sizes"), [("node", BY_NODE), ("device", FLAT)])
@pytest.mark.parametrize("statements", [ring, slices, some], ids=["ring", "slices", "some"])
def test_every_rank_has_what_the_emulator_says(statements: Any, level: str, sizes: dict[str, int], machine: str):
    found, wanted = run_all(in_phase(statements, level, sizes), sizes, machine)
    for position, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), f"argument {position}"


def test_the_schedule_says_what_carries_a_message(machine: str):
    by_node, flat = (notes(in_phase(ring, *how), machine) for how in (("node", BY_NODE), ("device", FLAT)))
    assert "T.copy of X, Y between nodes: NCCL (" in by_node[0] and "T.signal of flags between nodes" in by_node[1]
    assert "between devices: peer memory inside, NCCL between (" in flat[0]
    inside = notes(in_phase(ring, "device", BY_NODE), machine)
    assert "NCCL" not in "".join(inside), "devices of a node share memory"


def test_collectives_know_which_devices_share_memory(machine: str):
    @T.prim_func
    def f(X: T.Tensor((8, 4), "float32")):
        with T.Kernel(device=RANKS):
            with T.Scale("device"):
                T.allreduce(X)

    assert steps(f, FLAT, machine)[0] in ("allreduce hierarchical_direct", "allreduce nccl")
    with pytest.raises(UnsupportedError, match="T.allreduce of X between devices has no CUDA lowering"):
        steps(f, FLAT, machine, nccl=False)


def test_operators_move_whole_tensors_between_nodes(machine: str):
    team = SimpleNamespace(size=RANKS)
    assert whole_tensors.spans_nodes(team)
    team = SimpleNamespace(size=LOCAL)
    assert not whole_tensors.spans_nodes(team)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_their_programs_between_nodes(name: str, machine: str):
    func = whole_tensors.program(RANKS, name, "uint8" if name == "all_to_all" else "float32", None)
    assert steps(func, FLAT, machine)[0].split()[0] == name
    source = 3 if name == "all_gather" else RANKS * 3
    target = 3 if name == "reduce_scatter" else RANKS * 3
    dtype = torch.uint8 if name == "all_to_all" else torch.float32
    args = [[torch.randint(9, (source,)).to(dtype), torch.zeros(target, dtype=dtype)] for _ in range(RANKS)]
    given = [x.clone() for x, _ in args]
    tilescale.emulate(func, args)
    wanted = {
        "all_gather": lambda r: torch.cat(given),
        "reduce_scatter": lambda r: torch.stack(given).sum(0).chunk(RANKS)[r],
        "all_to_all": lambda r: torch.cat([x.chunk(RANKS)[r] for x in given]),
    }[name]
    assert all(torch.equal(y, wanted(rank)) for rank, (_, y) in enumerate(args))


# -- where ranks are ---------------------------------------------------------------------------------------------------


def near(ranks: tuple[int, ...], rank: int) -> tuple[PeerGroup, Team]:
    """A rank of four, and those that its heap has."""
    addresses = AddressMap(1 << 40, 1 << 20, 1 << 20, ranks.index(rank), tuple(range(len(ranks))))
    heap = SimpleNamespace(team=Team(ranks=ranks, rank=ranks.index(rank)), addresses=addresses)
    team = Team(ranks=tuple(range(RANKS)), rank=rank)
    return PeerGroup.of(heap, team), team


def test_a_device_of_the_job_has_a_slot_in_the_heap_of_its_node():
    found, _ = near((2, 3), 3)
    assert (found.first, found.size, found.is_whole) == (2, 2, False)
    assert [found.slot(device) for device in (2, 3)] == [0, 1] == [(d + found.shift) % found.size for d in (2, 3)]
    for other in (1, 4):
        with pytest.raises(PeerOutOfRangeError):
            found.slot(other)
    everybody, _ = near((0, 1, 2, 3), 1)
    assert everybody.is_whole and everybody.shift == 0


@pytest.mark.parametrize(
    ("sizes", "ranks", "rank", "found"),
    [
        (FLAT, (0, 1), 1, None),
        (BY_NODE, (2, 3), 2, None),
        (FLAT, (0, 1, 2, 3), 2, None),
        (FLAT, (2,), 2, "ranks 2 and 3 share no memory"),
        (FLAT, (0, 1, 2), 0, "are not one of equal blocks"),
        (FLAT, (0, 1, 3), 0, "are not one of equal blocks"),
    ],
)
def test_ranks_are_placed_as_the_machine_says(sizes: Any, ranks: Any, rank: int, found: str | None, machine: str):
    here, team = near(ranks, rank)
    target = LoweringTarget(Machine.load(machine), tuple(sizes.items()), 1 << 36, headers.__name__)
    if found is None:
        here.check(team, target, None)
        return
    with pytest.raises(LaunchError, match=found):
        here.check(team, target, None)


def test_a_team_of_as_many_of_each_node_is_served(machine: str):
    """Nodes have the ranks 0 to 2 and 3 to 4: two of each are a team."""
    addresses = AddressMap(1 << 40, 1 << 20, 1 << 20, 1, (0, 1))
    team, heap = Team(ranks=(0, 1, 3, 4), rank=3), SimpleNamespace(team=Team(ranks=(3, 4), rank=1), addresses=addresses)
    here = PeerGroup.of(heap, team)
    here.check(team, LoweringTarget(Machine.load(machine), tuple(FLAT.items()), 1 << 36, headers.__name__), None)
    assert (here.first, here.size) == (2, 2)


@pytest.mark.parametrize(("spans", "ranks"), [(False, (2, 3)), (True, (0, 1, 2, 3))])
def test_a_heap_is_of_those_that_can_share_memory(spans: bool, ranks: Any, monkeypatch: pytest.MonkeyPatch):
    world = World(ranks=(0, 1, 2, 3), rank=2, launcher="", node_of=(0, 0, 1, 1))
    monkeypatch.setattr(World, "device", torch.device("cpu"), raising=False)
    monkeypatch.setattr(default, "_spans", lambda device, nodes: spans and nodes == 2)
    monkeypatch.setattr(default, "HeapGroup", lambda team: SimpleNamespace(all_gather=lambda call, value: [value] * 4))
    assert default._sharing(world, world).ranks == ranks
    assert default._sharing(Team(ranks=(2, 3), rank=0), world).ranks == (2, 3)


def test_memory_of_cpus_does_not_span_nodes():
    assert not default._spans(torch.device("cpu"), 2)


@pytest.mark.parametrize(
    ("ranks", "made"), [((0, 1, 2, 3), [([0, 2], False), ([1, 3], False)]), ((0, 1, 3, 5), [([1, 5], True)])]
)
def test_a_part_of_a_job_makes_its_own_groups(ranks: Any, made: Any, monkeypatch: pytest.MonkeyPatch):
    """With ranks of the job for devices of the program: no other rank of the job takes part."""
    world = World(ranks=(0, 1, 2, 3) if len(made) == 2 else tuple(range(6)), rank=1, launcher="", node_of=(0,) * 6)
    own = SimpleNamespace(team=Team(ranks=ranks, rank=ranks.index(1)), world=world, by_nccl=False)
    found = []

    def new_group(group: list[int], timeout: Any, use_local_synchronization: bool = False) -> tuple[int, ...]:
        found.append((group, use_local_synchronization))
        return tuple(group)

    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    monkeypatch.setattr(nccl, "_start", lambda own: None)
    monkeypatch.setattr(nccl, "_groups", {})
    mine = nccl.group_of(own, ((0, 2), (1, 3)))
    assert found == made and 1 in mine and own.by_nccl
    assert nccl.group_of(own, ((0, 2), (1, 3))) is mine


# -- what is declined --------------------------------------------------------------------------------------------------


@T.macro
def until_a_value(X, Y, flags, rank, size):
    while flags[0] < 3:
        T.copy(X, Y, dst=(rank + 1) % size)  # <-


@T.macro
def by_a_value(X, Y, flags, rank, size):
    T.copy(X, Y, dst=flags[3])  # <-


@T.macro
def as_often_as_the_rank(X, Y, flags, rank, size):
    for _ in T.serial(rank):
        T.copy(X, Y, dst=(rank + 1) % size)  # <-


@T.macro
def by_stores(X, Y, flags, rank, size):
    T.copy(X, Y, dst=0, impl="rdma")  # <-


@pytest.mark.parametrize(
    ("statements", "found"),
    [
        (until_a_value, "in a loop or branch that devices may take differently"),
        (by_a_value, "whose index, peer or condition is read from memory"),
        (as_often_as_the_rank, "in a loop or branch that devices may take differently"),
        (by_stores, "would go by NCCL, without impl='rdma'"),
    ],
)
def test_what_has_no_message_names_its_line(statements: Any, found: str, machine: str, mistake):
    func = in_phase(statements, "node", BY_NODE)
    with mistake(UnsupportedError, found):
        notes(func, machine)


@T.macro
def a_copy(tile, Y, flags, rank, size):
    T.copy(tile, Y, dst=(rank + 1) % size)  # <-


@T.macro
def a_signal(tile, Y, flags, rank, size):
    T.signal(flags[0], dst=(rank + 1) % size)  # <-


@T.macro
def a_barrier(tile, Y, flags, rank, size):
    T.barrier()  # <-


@T.macro
def a_sum(tile, Y, flags, rank, size):
    T.allreduce(tile)  # <-


@pytest.mark.parametrize(
    ("statement", "level", "sizes"),
    [(a_copy, "node", BY_NODE), (a_signal, "device", FLAT), (a_barrier, "device", FLAT), (a_sum, "node", BY_NODE)],
    ids=["copy", "signal", "barrier", "sum"],
)
def test_programs_reach_no_memory_of_other_nodes(
    statement: Any, level: str, sizes: dict[str, int], machine: str, mistake
):
    @T.prim_func
    def f(Y: T.Tensor((8, 4), "float32"), flags: T.Tensor((4,), "int32")):
        with T.Kernel(**sizes, block=1, threads=32):
            tile = T.alloc((8, 4), "float32", level="l1")
            with T.Scale("block"), T.Scale(level) as (rank, size):
                T.clear(tile)
                statement(tile, Y, flags, rank, size)

    with mistake(UnsupportedError, "of programs between", "TILESCALE_HEAP=nvshmem", "whole tensors go by NCCL"):
        notes(f, machine)
