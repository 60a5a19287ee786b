# SPDX-License-Identifier: MIT
"""Effects of each operation: reads, writes, signals, waits, and completion."""

from dataclasses import replace

import pytest

import tilescale.language as T
from tests.program.support import effects_at, taken_apart, text
from tilescale.passes.mod_analysis import written_by_peers, written_parameters
from tilescale.program.effects import Completion, ProgramNames
from tilescale.program.model import Program


def in_a_block() -> Program:
    """Statements of a block, each on a line with its mark."""

    @T.prim_func
    def f(X: T.Tensor((64, 64), "float32"), F: T.Tensor((8,), "int32"), N: T.Tensor((8,), "int32")):
        with T.Kernel(device=2, block=8, threads=256) as bx:
            with T.Scale("block"):
                tile = T.alloc((64, 64), "float32")
                regs = T.alloc_fragment((64, 64), "float32")
                sums = T.alloc_fragment((64,), "float32")
                flat = T.view(tile, (4096,))
                T.copy(X[bx * 8, 0], tile[0:8, 0:64])  # <load>
                T.clear(tile)  # <fill>
                T.gemm(tile, tile, regs)  # <gemm>
                T.gemm(tile, tile, regs, clear_accum=True)  # <fresh gemm>
                T.reduce_sum(regs, sums, dim=1)  # <reduce>
                T.atomic_add(F[bx], 1)  # <atomic>
                T.atomic_add(X, tile)  # <tile atomic>
                for i, j in T.Parallel(64, 64):  # <loop>
                    X[i, j] = flat[i * 64 + j] + X[N[0], j]
                T.assume(bx >= N[0])  # <assume>
                T.call_extern("handle", "foo", T.address_of(tile[0, 0]), X.data)  # <extern>
                with T.Scale("device") as (rank, _):
                    T.copy(tile, X, dst=1 - rank)  # <put>
                    T.copy(tile, X, dst=1 - rank, signal=F[bx], value=3)  # <put with signal>
                    T.copy(X, tile, src=1 - rank)  # <get>
                    T.signal(F[N[1]], dst=1 - rank)  # <signal a peer>
                    T.barrier()  # <barrier>
                    T.allreduce(tile)  # <allreduce>
                    T.broadcast(tile, root=1)  # <broadcast>
                T.signal(F[2])  # <signal>
                T.wait(F[bx], ">=", N[3])  # <wait>
                with T.Scale("warpgroup") as (wg, _):
                    part = T.view(tile, layout=T.FullRow)
                    T.fill(part[0:8, 0:8], 1.0)  # <share>

    return taken_apart(f)


@pytest.fixture(scope="module")
def block() -> Program:
    return in_a_block()


ALL = "0+64, 0+64"


@pytest.mark.parametrize(
    ("mark", "accesses"),
    [
        ("load", ["r X[bx * 8+8, 0+64]", "w tile[0+8, 0+64]"]),
        ("fill", [f"w tile[{ALL}]"]),
        ("gemm", [f"r tile[{ALL}]", f"r tile[{ALL}]", f"rw regs[{ALL}]"]),
        ("fresh gemm", [f"r tile[{ALL}]", f"r tile[{ALL}]", f"rw regs[{ALL}]"]),
        ("reduce", [f"r regs[{ALL}]", "rw sums[0+64]"]),
        ("atomic", ["rwa F[bx]"]),
        ("tile atomic", [f"r tile[{ALL}]", f"rwa X[{ALL}]"]),
        ("loop", ["w X[i, j]", "r tile[i * 64 + j]", "r X[N[0], j]", "r N[0]"]),
        ("assume", ["r N[0]"]),
        ("put", [f"r tile[{ALL}]", f"w X@device[{ALL}]"]),
        ("put with signal", [f"r tile[{ALL}]", f"w X@device[{ALL}]", "rwa F@device[bx]"]),
        ("get", [f"r X@device[{ALL}]", f"w tile[{ALL}]"]),
        ("signal a peer", ["rwa F@device[N[1]]", "r N[1]"]),
        ("signal", ["rwa F[2]"]),
        ("wait", ["ra F[bx]", "r N[3]"]),
        ("barrier", []),
        ("allreduce", [f"rw tile[{ALL}]"]),
        ("broadcast", [f"rw tile[{ALL}]"]),
        ("share", [f"w tile[{ALL}]"]),
    ],
)
def test_what_a_statement_of_a_block_reads_and_writes(block: Program, mark: str, accesses: list[str]):
    effects = effects_at(block, mark)
    assert text(block, effects) == accesses
    assert not effects.opaque


def test_an_external_function_is_opaque_and_may_write_what_it_is_handed(block: Program):
    effects = effects_at(block, "extern")
    assert effects.opaque and effects.orders
    assert text(block, effects) == ["rw tile[]", "rw X[]"]


def test_signals_and_waits_say_of_which_flag_and_whose(block: Program):
    (own,), (far,) = effects_at(block, "signal").releases, effects_at(block, "signal a peer").releases
    assert own.flag.at is None and far.flag.at.level == "device" and (str(own.value), own.op) == ("1", "add")
    (release,) = effects_at(block, "put with signal").releases
    assert str(release.value) == "3" and str(release.flag.begins[0]) == "bx" and release.flag.at.level == "device"
    (acquire,) = effects_at(block, "wait").acquires
    assert (acquire.compare, str(acquire.value)) == (">=", "N[3]") and acquire.flag.at is None


def test_who_synchronizes(block: Program):
    def barriers(mark: str) -> list:
        return [(m.level, m.all_arrived) for m in effects_at(block, mark).synchronizes]

    assert barriers("barrier") == barriers("allreduce") == [("device", True)]
    assert barriers("broadcast") == [("device", False)]
    assert barriers("put with signal") == []


def test_when_statements_of_a_block_are_complete(block: Program):
    def completes(mark: str) -> Completion:
        return effects_at(block, mark).completes

    assert completes("put") is completes("put with signal") is Completion.DEFERRED
    assert completes("get") is completes("load") is completes("signal") is Completion.AT_ONCE


def test_statements_of_a_device_phase():
    @T.prim_func
    def f(X: T.Tensor((64, 8), "float32"), Y: T.Tensor((16, 8), "float32"), F: T.Tensor((8,), "int32")):
        with T.Kernel(device=4, block=8, threads=128) as bx:
            with T.Scale("device") as (rank, size):
                mine = T.view(X, layout=T.FullRow)
                T.copy(mine[2:4, 0:8], Y[0:2, 0:8], dst=(rank + 1) % 4)  # <in order>
                T.copy(mine, Y, dst=(rank + 1) % 4, signal=F[rank])  # <asynchronous>
                T.all_to_all(Y, mine)  # <all_to_all>
            Y[bx, 0] = 1.0

    program = taken_apart(f)
    assert effects_at(program, "in order").completes is Completion.DEFERRED
    queued = effects_at(program, "asynchronous")
    assert queued.completes is Completion.QUEUED and len(queued.releases) == 1
    assert text(program, queued) == ["r X[0+16, 0+8]", "w Y@device[0+16, 0+8]", "rwa F@device[rank]"]
    assert text(program, effects_at(program, "in order"))[0] == "r X[2+2, 0+8]"
    assert text(program, effects_at(program, "all_to_all")) == ["r Y[0+16, 0+8]", "w X[0+16, 0+8]"]


def test_which_tensors_a_program_and_its_peers_write(block: Program):
    assert written_parameters(block) == {0, 1}
    assert written_by_peers(block) == {"X", "F"}


def test_effects_of_a_models_programs_are_found_once(block: Program, monkeypatch: pytest.MonkeyPatch):
    """Each part of a build asks for those of one program after the other."""
    programs, asked, effects = [replace(block) for _ in range(16)], [], ProgramNames._effects_of
    monkeypatch.setattr(ProgramNames, "_effects_of", lambda *given: [asked.append(1), effects(*given)][1])
    counts = []
    for _ in range(2):
        for program in programs:
            assert written_parameters(program) == {0, 1} and written_by_peers(program) == {"X", "F"}
        counts.append(len(asked))
    assert 0 < counts[0] == counts[1]
