# SPDX-License-Identifier: MIT
"""Values that ranks compare when they synchronize: one for the tensors that peers reach, another for other tensors."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import tilescale.language as T
from tilescale.backends.cuda.running.barrier_kernel import purpose, site_of
from tilescale.backends.cuda.running.memory import ProgramMemory
from tilescale.backends.cuda.running.steps import ProgramCall
from tilescale.backends.tilelang.lowering.implemented import ON_TILES, Implementation, available
from tilescale.collectives import PROGRAMS, TENSORS, THREAD_GROUPS, TILES, CollectiveQuery
from tilescale.hda.current import current_machine
from tilescale.passes.pipeline import analyse
from tilescale.program import extents
from tilescale.program.mesh import Mesh
from tilescale.program.model import Program, Sequence


class Heap:
    """A heap of one tensor, in which offsets are those of the tensor."""

    @staticmethod
    def offset(tensor: torch.Tensor) -> int:
        return tensor.storage_offset() * tensor.itemsize


def digest(*tensors: torch.Tensor, reached: set[int] | None = None) -> int:
    """Value of a call with these tensors, all reachable by peers by default."""
    positions = set(range(len(tensors))) if reached is None else reached
    program = SimpleNamespace(launches=(), workspace_names={}, parameters=(), body=Sequence(()))
    own = SimpleNamespace(program=program, reached=positions, heap=Heap)
    return ProgramMemory(own, lambda: None).digest(ProgramCall(list(tensors)))


def test_a_digest_says_where_tensors_lie_and_what_they_are_like():
    whole = torch.zeros(64)
    same = digest(whole[:32], whole[32:])
    assert same == digest(torch.ones(64)[:32], torch.ones(64)[32:]), "values are no part of it"
    others = [(whole[32:], whole[:32]), (whole[:16], whole[32:]), (whole[:32].view(4, 8), whole[32:])]
    others += [(whole[:32].view(8, 4), whole[32:]), (whole[:32].view(8, 4).t(), whole[32:]), (whole[:32],)]
    assert len({same, *(digest(*tensors) for tensors in others)}) == 1 + len(others)


def test_a_digest_leaves_out_what_no_peer_reaches():
    whole = torch.zeros(64)
    assert digest(whole[:32], whole[32:], reached={0}) == digest(whole[:32], whole[:8], reached={0})
    assert digest(whole[:32], whole[32:], reached={0}) != digest(whole[8:40], whole[32:], reached={0})


def test_a_digest_has_the_extents_that_are_one_number_for_all_ranks():
    size, rows = 2, T.dynamic("rows")

    @T.prim_func
    def gather(X: T.Tensor((8, 4), "int32"), Y: T.Tensor((size * 8, 4), "int32"), Counted: T.Tensor((rows,), "int32")):
        with T.Kernel(device=size):
            with T.Scale("device"):
                T.all_gather(X, Y)

    def of(*shapes: tuple[int, ...], program: Program) -> int:
        memory = ProgramMemory(SimpleNamespace(program=program, reached=set(), heap=Heap), lambda: None)
        return memory.digest(ProgramCall([], extents.solve(program.parameters, shapes)))

    program = analyse(gather, current_machine())
    one, same, other = (of((8, 4), (16, 4), (n,), program=program) for n in (7, 7, 8))
    assert one == same != other
    parts = analyse(import_module("tilescale.ops.all_to_all_v").program(size, "int32"), current_machine())
    assert len({of((n, 4), (2,), (3 * n, 4), (2,), program=parts) for n in (7, 8)}) == 1, "unequal parts are unequal"
    assert of((7, 4), (2,), (9, 4), (2,), program=parts) != of((7, 8), (2,), (9, 8), (2,), program=parts)


@pytest.mark.parametrize("site", [0, 1, 1023])
@pytest.mark.parametrize("call", [0, 1, (1 << 22) - 1, 1 << 31])
def test_a_purpose_is_an_int32_that_names_its_place(site: int, call: int):
    word = purpose(site, call)
    assert -(1 << 31) <= word < 1 << 31
    assert site_of(word, 1024) == site and site_of(word, site) is None
    assert (word & (1 << 22) - 1) == call % (1 << 22)
    assert word != purpose(site, call + 1) and word != purpose((site + 1) % 1024, call)


@pytest.mark.parametrize("form", [TILES, PROGRAMS, THREAD_GROUPS])
@pytest.mark.parametrize("operation", ["allreduce", "all_gather"])
def test_collectives_on_tiles_are_made_as_the_table_of_their_kind_says(form: str, operation: str):
    wanted, made = CollectiveQuery(operation, form, "device", (0, 1)), SimpleNamespace(name=operation, level="device")
    target = SimpleNamespace(sizes=(("device", 2),), mesh=Mesh((("device", 2),)), devices=2, group_size=2)
    assert available(made, wanted, target).names == (ON_TILES[form][operation],)


def test_kinds_of_collectives_on_tiles_are_made_differently():
    made = {form: ON_TILES[form]["allreduce"] for form in (TILES, PROGRAMS, THREAD_GROUPS)}
    assert made == {TILES: "one_shot", PROGRAMS: "two_shot", THREAD_GROUPS: "one_shot"}


def test_algorithms_on_tensors_are_those_that_are_able_in_the_order_of_the_table(monkeypatch: pytest.MonkeyPatch):
    can, cannot = Implementation(lambda made, target: True), Implementation(lambda made, target: False)
    asked = Implementation(lambda made, target: True, on_request=lambda made, target: True)
    table = {
        ("allreduce", "one_shot"): (cannot, can),
        ("allreduce", "two_shot"): (cannot,),
        ("all_gather", "direct"): (can,),
        ("allreduce", "ring"): (asked,),
        ("allreduce", "nccl"): (can,),
    }
    monkeypatch.setattr("tilescale.backends.tilelang.lowering.implemented.ON_TENSORS", table)
    made = SimpleNamespace(name="allreduce", norm=None, wire=None)
    plain = available(made, CollectiveQuery("allreduce", TENSORS, "device", (0, 1)), None)
    assert plain.names == ("one_shot", "ring", "nccl") and plain.on_request == {"ring"}
    # Operations without a function gather, and apply the function afterwards.
    assert available(made, CollectiveQuery("allreduce", TENSORS, "device", (0, 1), function=True), None).names == (
        "nccl", "one_shot", "ring",
    )  # fmt: skip
