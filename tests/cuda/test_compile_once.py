# SPDX-License-Identifier: MIT
"""A kernel is lowered once: its check sees the text for nvcc; ranks share the compilation of a program."""

import importlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tilelang
from tilelang.backend.target import determine_target
from tilelang.cache.kernel_cache import KernelCache
from tilelang.transform.pass_config import normalize_pass_configs

import tilescale.language as T
from tests.cuda.fakes import Device
from tests.cuda.support import lowered
from tilelang_core import compile as stock
from tilelang_core import ir
from tilelang_core.source_rewrites import keyed
from tilescale.backends import processes
from tilescale.backends.cuda.running import execute
from tilescale.backends.cuda.running.barrier_kernel import barrier_function
from tilescale.backends.cuda.support import DeviceLowered
from tilescale.backends.cuda.target import target_for
from tilescale.backends.tilelang.lowering.check import GeneratedTextError, KernelCheck
from tilescale.backends.tilelang.text import REWRITES, check_of
from tilescale.errors import AllocationTooLargeError
from tilescale.hda import Machine
from tilescale.ops import whole_tensors

MACHINE = Machine.load("h200-sxm-8")
TARGET = target_for(MACHINE)


def two_grids() -> DeviceLowered:
    @T.prim_func
    def doubled_twice(X: T.Tensor((512, 64), "float32"), n: T.int32):
        with T.Kernel(device=2, block=4, threads=128) as tile:
            with T.Scale("block"):
                kept = T.alloc((128, 64), "float32", level="l1")
                for _ in T.serial(n):  # may have no step, so its text is rewritten
                    T.copy(X[tile * 128, 0], kept)
                    T.copy(kept, X[tile * 128, 0])
            with T.Scale("device"):
                pass
            with T.Scale("block"):
                X[tile, 0] = 2.0

    return lowered(doubled_twice)


@pytest.fixture
def nvcc(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts for nvcc; they are not compiled or kept."""
    engine, texts = importlib.import_module("tilelang.engine.lower"), []

    def codegen(device_mod: Any, context: Any) -> Any:
        made = engine.device_codegen_without_compile(device_mod, context)
        texts.append(str(made.inspect_source()))
        return made

    def compile_function(func: Any, target: Any) -> None:
        with determine_target(target, return_object=True) as taken:
            engine.lower(func, target=taken, enable_device_compile=True)

    monkeypatch.setattr(engine, "device_codegen", codegen)
    monkeypatch.setattr(tilelang, "compile", compile_function)
    return texts


def test_the_check_sees_what_nvcc_gets(nvcc: list[str], monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(KernelCheck, "__call__", lambda own, *given: seen.append(given))
    made = two_grids()
    kernel = made.kernels[0]
    check = check_of(kernel, made.lowered.program, MACHINE)
    stock.KernelCompilation(kernel.func, REWRITES, check, {"target": TARGET}).run()
    shown = stock.generate(kernel.func, TARGET, None, REWRITES)
    assert seen == [(nvcc[0], shown.dynamic_shared)]
    assert nvcc == [stock.checked_text(shown)]
    loaded = stock.compiled(SimpleNamespace(get_kernel_source=lambda: nvcc[0]))
    assert loaded == replace(shown, text=nvcc[0])
    assert shown.dynamic_shared >= 128 * 64 * 4


def test_the_text_is_prepared_once_for_the_check_and_for_nvcc(nvcc: list[str], monkeypatch: pytest.MonkeyPatch):
    engine, prepared = importlib.import_module("tilelang.engine.lower"), []
    prepare = engine._prepare_device_codegen_mod
    monkeypatch.setattr(engine, "_prepare_device_codegen_mod", lambda mod: (prepared.append(mod), prepare(mod))[1])
    made = two_grids()
    kernel = made.kernels[0]
    stock.KernelCompilation(
        kernel.func, REWRITES, check_of(kernel, made.lowered.program, MACHINE), {"target": TARGET}
    ).run()
    assert len(nvcc) == len(prepared) == 1


def test_what_fails_the_check_is_not_compiled(nvcc: list[str]):
    made = two_grids()
    kernel, program = made.kernels[0], made.lowered.program
    check = check_of(kernel, program, MACHINE)
    for rewrite, error, said in (
        (lambda text: text + "\n__shared__ float a[65536];\n", AllocationTooLargeError, "doubled_twice"),
        (lambda text: text.replace("float* X", "float* __restrict__ X"), GeneratedTextError, "__restrict__"),
    ):
        with pytest.raises(error, match=said):
            stock.KernelCompilation(kernel.func, (rewrite,), check, {"target": TARGET}).run()
    assert nvcc == []


def test_lowering_leaves_the_program_as_it_is():
    """Ranks compare the program's text, and one of them lowers it. Lowering a GEMM by mma names variables."""

    @T.prim_func
    def multiplied(A: T.Tensor((32, 32), "bfloat16"), C: T.Tensor((32, 32), "float32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("block"):
                a = T.alloc((32, 32), "bfloat16", level="l1")
                c = T.alloc((32, 32), "float32", level="l0")
                T.copy(A, a)
                T.clear(c)
                T.gemm(a, a, c)
                T.copy(c, C)

    before = ir.fingerprint(multiplied)
    assert "mma" in lowered(multiplied).source({})
    assert ir.fingerprint(multiplied) == before


def test_a_kernel_is_kept_under_what_checked_it():
    made = two_grids()
    func, check = made.kernels[0].func, check_of(made.kernels[0], made.lowered.program, MACHINE)
    keys = [
        str(keyed(func, REWRITES, given).attrs["tilescale.text"])
        for given in (None, check, replace(check, where=()), replace(check, ahead=("X",)), replace(check, available=1))
    ]
    assert keys[1] == keys[2] and len(set(keys)) == 4


def test_a_kernel_is_printed_once_for_the_keys_of_the_cache(monkeypatch: pytest.MonkeyPatch):
    made, scripts = two_grids(), []
    kernel, script = made.kernels[0], tilelang.tvm.tirx.PrimFunc.script
    check = check_of(kernel, made.lowered.program, MACHINE)

    def printed(func: Any, **options: Any) -> str:
        scripts.append(options)
        return script(func, **options)

    monkeypatch.setattr(tilelang.tvm.tirx.PrimFunc, "script", printed)

    def cached(own: Any, func: Any, out_idx: Any, *, backend_context: Any, **given: Any) -> str:
        """With the key of stock's function of this name."""
        del given["verbose"]
        given |= {"target": backend_context.target, "target_host": backend_context.target_host, "args": ()}
        given["pass_configs"] = normalize_pass_configs(given["pass_configs"])
        return own._generate_key(out_idx=out_idx, func=func, execution_backend="tvm_ffi", **given)

    monkeypatch.setattr(KernelCache, "cached", cached)
    keys = set()
    for _ in range(2):
        again = stock.KernelCompilation(kernel.func, REWRITES, check, {"target": TARGET})
        assert not again.is_done
        keys.add(again.run())
    assert len(keys) == 1 and scripts.count({"show_meta": True}) == 1
    found = []
    for digest, rewrites in (("known", REWRITES[:2]), ("known", REWRITES[:1]), ("other", REWRITES[:2])):
        known = replace(again, rewrites=rewrites, digest=digest)
        assert not known.is_done
        found.append(known.run())
    assert len({*keys, *found}) == 4 and scripts.count({"show_meta": True}) == 1
    assert stock.KernelCompilation(kernel.func, (), check, {"target": TARGET}).run() not in keys


@pytest.mark.parametrize(("ranks", "shares"), [((0, 1), [[0], [1]]), ((1, 0), [[0], [1]]), ((0, 2), [[0, 1], [0, 1]])])
def test_ranks_of_a_node_share_out_kernels(
    ranks: tuple[int, ...], shares: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    """Of a job of two nodes: ranks 0 and 1, and 2 and 3. A rank that is alone on its node compiles all."""
    made = two_grids()
    monkeypatch.setattr(stock, "keeps_kernels", lambda: True)
    monkeypatch.setattr(stock.KernelCompilation, "pinned", lambda own: own)
    monkeypatch.setattr(stock.KernelCompilation, "is_done", False)
    monkeypatch.setattr(processes, "run_in_processes", lambda runs, *of: found.append([run.__self__ for run in runs]))
    monkeypatch.setattr(execute.DeviceProgram, "on_all", lambda own, make: make())
    found: list[Any] = []
    for number, rank in enumerate(ranks):
        own = object.__new__(execute.DeviceProgram)
        own._lowered, own.program, own.target = made.lowered, made.lowered.program, made.lowered.target
        own.options, own.is_alone = {}, True
        own.team = SimpleNamespace(ranks=ranks, rank=number)
        own.world = SimpleNamespace(node_of=(0, 0, 1, 1), node=rank // 2)
        own._compile_ahead()
    functions = [k.func for k in made.kernels]
    assert [[functions.index(job.func) for job in each] for each in found] == shares


def test_kernels_that_were_compiled_ahead_are_loaded_in_one_agreement(monkeypatch: pytest.MonkeyPatch):
    own, agreed = object.__new__(execute.DeviceProgram), []
    own.options, own._loaded = {}, []
    own._ahead = [stock.KernelCompilation(grid.kernel.func, REWRITES) for grid in two_grids().lowered.grids]
    monkeypatch.setattr(own, "on_all", lambda make: [agreed.append(1), make()][1], raising=False)
    monkeypatch.setattr(own, "_compiled", lambda made: made.func, raising=False)
    for made in (*own._ahead, *own._ahead):
        assert own.compile(made.func) is made.func
    assert len(own._ahead) > 1 and len(agreed) == 1


def test_equal_kernels_are_compiled_once_and_long_ones_first(monkeypatch: pytest.MonkeyPatch):
    found: list[Any] = []
    monkeypatch.setattr(stock.KernelCompilation, "is_done", False)
    monkeypatch.setattr(stock.TextCompilation, "is_done", False)
    monkeypatch.setattr(processes, "run_in_processes", lambda runs, *of: found.append([run.__self__ for run in runs]))
    text, barrier = stock.TextCompilation("text", TARGET), barrier_function(2, 1 << 36)
    short, again = (stock.KernelCompilation(barrier, REWRITES, None, {"target": TARGET}) for _ in range(2))
    long = replace(short, func=two_grids().kernels[0].func)
    for number in range(2):
        processes.compile_missing([text, short, again, replace(text), long], number, ranks=2)
    assert [[type(job) for job in each] for each in found] == [[type(long), type(text)], [type(short)]]
    assert found[0][0].func is long.func


def test_a_missing_text_is_found_out_without_an_error_of_a_callback(monkeypatch: pytest.MonkeyPatch):
    """Such an error takes a second, for the lines of its frames."""
    monkeypatch.setattr(tilelang.contrib.nvcc, "compile_cuda", lambda *given, **options: pytest.fail("compiled"))
    load = stock.CUDABinaryCache.load
    for binary in (None, b"binary"):
        monkeypatch.setattr(stock.CUDABinaryCache, "load", lambda key, kind, binary=binary: binary)
        assert stock.TextCompilation("text", TARGET).is_done == (binary is not None)
    monkeypatch.undo()
    assert stock.CUDABinaryCache.load == load


def sum_of(elements: Any, impl: str | None = None) -> Any:
    """A sum of whole tensors of a known number of elements, or one that calls say."""

    @T.prim_func
    def whole_sum(X: T.Tensor((elements,), "bfloat16"), Y: T.Tensor((elements,), "bfloat16")):
        with T.Kernel(device=2), T.Scale("device"):
            T.allreduce(X, out=Y, impl=impl)

    return whole_sum


PROGRAMS = {
    "sum of 512": lambda: sum_of(512),
    "sum of 1M": lambda: sum_of(1 << 20),
    "sum of any": lambda: whole_tensors.sum_program(2, "bfloat16", "sum", "two_shot"),
    **{
        f"{name} of any": lambda name=name: whole_tensors.program(2, name, "bfloat16", "direct")
        for name in ("all_gather", "reduce_scatter", "all_to_all")
    },
    "broadcast of any": lambda: whole_tensors.broadcast_program(2, 1, "direct"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_of_messages_are_known_before_a_program_is_built(name: str, monkeypatch: pytest.MonkeyPatch):
    made = PROGRAMS[name]()
    Device(monkeypatch)
    asked: list[str] = []
    monkeypatch.setattr(execute.DeviceProgram, "device_code", lambda own, text: asked.append(text) or text.encode())
    own = execute.DeviceProgram(lowered(made, devices=2).lowered, {})
    ahead = [job.text for job in own.compilations() if isinstance(job, stock.TextCompilation)]
    own.build()
    assert ahead == asked
    assert len(set(ahead)) >= 3 if name.endswith("any") else len(ahead) == 1


def test_a_sum_of_few_elements_has_a_kernel_of_messages(monkeypatch: pytest.MonkeyPatch):
    Device(monkeypatch)
    own = execute.DeviceProgram(lowered(sum_of(512), devices=2).lowered, {})
    assert [type(job) for job in own.compilations()] == [stock.KernelCompilation, stock.TextCompilation]


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_forked_processes_leave_kernels_in_the_cache(tmp_path: Path):
    """In a process of its own, as TileLang reads the place of its cache when it is loaded."""
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.cuda.test_compile_once import MACHINE, REWRITES, TARGET, check_of, stock, two_grids\n"
        "from tilescale.backends.processes import compile_missing\n"
        "made = two_grids()\n"
        "check = check_of(made.kernels[0], made.lowered.program, MACHINE)\n"
        "jobs = [stock.KernelCompilation(made.kernels[0].func, REWRITES, check, {'target': TARGET})]\n"
        "jobs.append(stock.TextCompilation('extern \"C\" __global__ void nothing() {}', TARGET))\n"
        "print([job.is_done for job in jobs])\n"
        "compile_missing(jobs)\n"
        "print([job.is_done for job in jobs])\n"
        "print(stock.compiled(jobs[0].run()).dynamic_shared > 0, b'nothing' in jobs[1].run())\n"
    )
    root = Path(__file__).parents[2]
    given = os.environ | {"PYTHONPATH": str(root), "TILELANG_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], env=given, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == [str([False] * 2), str([True] * 2), "True True"], done.stderr
