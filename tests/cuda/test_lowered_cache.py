# SPDX-License-Identifier: MIT
"""Lowered programs on disk: reading returns the lowered program; another program or another world finds none."""

from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tilelang  # noqa: F401 - it brings tvm
import torch
from tvm import tirx

import tilescale.language as T
from tests.cuda import programs
from tests.cuda.fakes import Device
from tests.cuda.support import lowered
from tests.cuda.test_execute_calls import put
from tests.cuda.test_execute_queue import Queue
from tests.cuda.test_golden_text import PROGRAMS
from tilescale import backends
from tilescale.backends.cuda import lowered_cache, support
from tilescale.backends.cuda.running import execute, queued, queued_exchange
from tilescale.comm import Team
from tilescale.hda import Machine
from tilescale.ops import ag_gemm_programs, row_counts, whole_tensors
from tilescale.ops.gemm_tiles import GemmSpec, at_once, concurrent_stores, tiling
from tilescale.passes import mod_analysis
from tilescale.passes.mod_analysis import written_by_peers, written_parameters
from tilescale.program.builder import ProgramBuilder, call_name
from tilescale.runtime.compile import compile as compile_program
from tilescale.settings import settings


@pytest.fixture
def lowerings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The programs that are lowered, on a computer that runs them, with an empty cache."""
    made: list[Any] = []
    lower = lowered_cache.lower
    monkeypatch.setattr(lowered_cache, "has_gpu", lambda: True)
    monkeypatch.setattr(lowered_cache, "objection", lambda folder: None)
    monkeypatch.setattr(lowered_cache.stock, "keeps_kernels", lambda: True)
    monkeypatch.setattr(lowered_cache.stock, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(lowered_cache, "lower", lambda *given: made.append(given) or lower(*given))
    return made


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_read_as_it_was_lowered(name: str, lowerings: list[Any]):
    first, second = (lowered(PROGRAMS[name]()) for _ in range(2))
    assert len(lowerings) == 1
    assert first.source({}) == second.source({})
    for one, other in zip(first.kernels, second.kernels, strict=True):
        assert one.func.script(show_meta=True) == other.func.script(show_meta=True)
        assert len(one.arguments) == len(other.arguments)
    assert (first.notes, first.lowered.sites, first.lowered.target) == (
        second.notes,
        second.lowered.sites,
        second.lowered.target,
    )


def test_what_is_read_says_what_it_writes(lowerings: list[Any], monkeypatch: pytest.MonkeyPatch):
    """Each process asks, and finding it takes as long as reading the file."""
    first = lowered(put())
    written = written_parameters(first.program), written_by_peers(first.program)
    digests = [kernel.digest for kernel in first.kernels]
    monkeypatch.setattr(mod_analysis, "names_of", lambda program: pytest.fail("found again"))
    monkeypatch.setattr(tirx.PrimFunc, "script", lambda func, **_: pytest.fail("printed again"))
    second = lowered(put())
    assert (written_parameters(second.program), written_by_peers(second.program)) == written and any(written)
    assert [kernel.digest for kernel in second.kernels] == digests != []


def test_what_was_read_runs(lowerings: list[Any], monkeypatch: pytest.MonkeyPatch):
    launched = []
    for _ in range(2):
        device = Device(monkeypatch)
        x, y = device.heap.zeros((64, 64), torch.float32), device.heap.zeros((64, 64), torch.float32)
        device.program(put())([x, y])
        launched.append([entry if isinstance(entry, str) else (entry[0], len(entry)) for entry in device.log])
    assert launched[0] == launched[1] != [] and len(lowerings) == 1


def product(rows: int) -> GemmSpec:
    """A GEMM of an operator, for two ranks with a number of rows each."""
    return GemmSpec(2048, 1024, "bfloat16", tiling(rows, 2, 2048, True, 1), True, False)


OPERATORS = {
    "ag_gemm": lambda: ag_gemm_programs.program(2, product(512)),
    "ag_gemm_persistent": lambda: ag_gemm_programs.program(2, concurrent_stores(product(2048)), blocks=at_once()),
    "gemm_rs": lambda: import_module("tilescale.ops.gemm_rs").program(2, product(512)),
    "gemm_rs_persistent": lambda: import_module("tilescale.ops.gemm_rs").program(
        2, concurrent_stores(product(2048)), at_once()
    ),
    "gemm_ar": lambda: import_module("tilescale.ops.gemm_ar").program(2, product(512), 0),
    "all_to_all": lambda: import_module("tilescale.ops.all_to_all").program(2, 64, "bfloat16", 1024, False),
    "all_reduce": lambda: whole_tensors.sum_program(2, "bfloat16"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_built_from_it(name: str, lowerings: list[Any], monkeypatch: pytest.MonkeyPatch):
    built = []
    for module in (queued, queued_exchange):
        monkeypatch.setattr(module, "copy_queue", lambda device: Queue([]))
    for _ in range(2):
        Device(monkeypatch)
        own = execute.DeviceProgram(lowered(OPERATORS[name](), devices=2).lowered, {})
        texts = [getattr(job, "text", "") or job._keyed.script(show_meta=True) for job in own.compilations()]
        own.build()
        built.append((texts, list(map(str, own.sites)), own.reached, own.fixed, own._waits))
    assert built[0] == built[1] and len(lowerings) == 1


def test_the_program_of_a_builder_is_found_without_a_trace(lowerings: list[Any], monkeypatch: pytest.MonkeyPatch):
    """By its arguments, for as many units."""
    builder = ProgramBuilder(whole_tensors.sum_program, (2, "bfloat16"))
    machine = Machine.load("h200-sxm-8")
    assert support.find(builder.name, machine, 2) is None
    made = lowered(builder.build(), devices=2)
    other = ProgramBuilder(whole_tensors.sum_program, (2, "float32"))
    assert support.find(other.name, machine, 2) is support.find(builder.name, machine, 4) is None
    monkeypatch.setattr(backends, "find", support.find)
    monkeypatch.setattr(ProgramBuilder, "build", lambda own: pytest.fail("traced"))
    team = Team(ranks=(0, 1), rank=0)
    kernel = compile_program(builder, machine=machine, team=team, schedule="sequential")
    assert kernel.lower().source({}) == made.source({}) and kernel.program.name == made.program.name
    assert len(lowerings) == 1


@dataclass(frozen=True)
class _Form:
    rows: int
    kind: str = field(repr=False)


def test_builders_with_plain_arguments_have_names():
    def name(function: Any, *arguments: Any) -> str:
        return ProgramBuilder(function, arguments).name

    build = whole_tensors.sum_program
    named = [name(build, 2, _Form(1, "a")), name(build, 2, _Form(1, "b")), name(build, 2, (1, "a")), name(build, "2")]
    assert "" not in named and len(set(named)) == len(named)
    foreign = test_builders_with_plain_arguments_have_names
    assert name(build, object()) == name(foreign) == name(lambda: None) == name(partial(build, 2)) == ""


def test_calls_with_functions_and_types_have_names():
    """Such as an operator's choice of kernels."""
    choice, build = import_module("tilescale.ops.gemm_rs")._kernel, whole_tensors.sum_program
    of_other = import_module("tilescale.ops.gemm_ar")._kernel
    given = [(choice, build, torch.bfloat16), (of_other, build, torch.bfloat16), (choice, build, torch.float16)]
    assert len({"", *(call_name(row_counts.prepare, each) for each in given)}) == 4
    assert call_name(row_counts.prepare, (choice, lambda: None)) == call_name(lambda: None, ()) == ""


def test_a_file_says_that_kernels_are_in_the_caches(
    lowerings: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    machine = Machine.load("h200-sxm-8")
    assert support.done_file("", machine) is None
    assert support.done_file("a", machine) == support.done_file("a", machine) != support.done_file("b", machine)
    assert support.done_file("a", machine) != support.done_file("a", Machine.load("h100-sxm-8"))
    lowered(put())
    support.done_file("a", machine).touch()
    monkeypatch.setattr(lowered_cache, "MOST", 2)
    for make in (programs.barrier, programs.steps):
        lowered(make())
    assert not support.done_file("a", machine).exists(), "some of its kernels may be gone"
    monkeypatch.setattr(lowered_cache.stock, "keeps_kernels", lambda: False)
    assert support.done_file("a", machine) is None


def two_lines_apart(first: bool) -> Any:
    """Two programs that differ in their lines only."""
    if first:

        @T.prim_func
        def f(X: T.Tensor((64,), "float32")):
            with T.Kernel(device=2):
                with T.Scale("device"):
                    T.allreduce(X)

    else:

        @T.prim_func
        def f(X: T.Tensor((64,), "float32")):
            with T.Kernel(device=2):
                with T.Scale("device"):
                    T.allreduce(X)

    return f


def test_other_lines_other_targets_and_other_settings_are_lowered_anew(
    lowerings: list[Any], monkeypatch: pytest.MonkeyPatch
):
    lowered(two_lines_apart(True))
    lowered(two_lines_apart(False))
    assert len(lowerings) == 2, "errors name lines"
    lowered(two_lines_apart(True), machine="h100-sxm-8")
    assert len(lowerings) == 3
    monkeypatch.setattr(lowered_cache, "settings", lambda: replace(settings(), wait_s=7.0, progress="off"))
    lowered(two_lines_apart(True))
    assert len(lowerings) == 3, "of calls, not of programs"
    monkeypatch.setattr(lowered_cache, "settings", lambda: replace(settings(), share_gpus=True))
    lowered(two_lines_apart(True))
    assert len(lowerings) == 4
    monkeypatch.setattr(lowered_cache, "source_digest", lambda: "another version")
    lowered(two_lines_apart(True))
    assert len(lowerings) == 5


@pytest.mark.parametrize("damage", [b"", b"not what zlib makes"])
def test_a_damaged_file_is_replaced(damage: bytes, lowerings: list[Any], tmp_path: Path):
    lowered(programs.barrier())
    (path,) = (tmp_path / "lowered").iterdir()
    path.write_bytes(damage)
    lowered(programs.barrier())
    lowered(programs.barrier())
    assert len(lowerings) == 2


def test_the_folder_is_bounded(lowerings: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lowered_cache, "MOST", 2)
    for make in (programs.barrier, programs.steps, programs.put_with_own_flags):
        lowered(make())
    assert len(list((tmp_path / "lowered").iterdir())) == 2


def test_where_others_may_write_nothing_is_read(lowerings: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Reading executes the file's content."""
    lowered(programs.barrier())
    monkeypatch.setattr(lowered_cache, "objection", lambda folder: "all users can write there")
    lowered(programs.barrier())
    assert len(lowerings) == 2


def test_the_source_is_its_files_and_their_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    digest, found = lowered_cache.source_digest.__wrapped__, []
    monkeypatch.setattr(lowered_cache.tilescale, "__file__", str(tmp_path / "tilescale" / "__init__.py"))
    for path, text in (("a/b.py", "x"), ("a/__pycache__/b.pyc", "x"), ("a/b.py", "y"), ("a/c.yaml", "x")):
        (tmp_path / "tilescale" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tilescale" / path).write_text(text)
        found.append(digest())
    (tmp_path / "tilescale" / "a").rename(tmp_path / "tilescale" / "d")
    assert found[0] == found[1] and len({*found, digest()}) == 4


def test_without_gpus_nothing_is_kept(lowerings: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(lowered_cache, "has_gpu", lambda: False)
    lowered(programs.barrier())
    assert not (tmp_path / "lowered").exists()
