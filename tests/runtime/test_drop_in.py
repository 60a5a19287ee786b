# SPDX-License-Identifier: MIT
"""A kernel where TileLang's is expected: its public names, its profiler."""

import inspect

import pytest
import tilelang
import torch
from tilelang import JITKernel

import tilescale
import tilescale.language as T
from tilescale.errors import ArgumentError, UnsupportedError, UsageError


def scaled(n: int, block: int = 32, factor: float = 2.0):
    @T.prim_func
    def program(X: T.Tensor((n,), "float32"), Y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=32) as bx:
            for i in T.Parallel(block):
                Y[bx * block + i] = X[bx * block + i] * factor

    return program


def test_it_has_what_tilelangs_kernel_has():
    kernel = tilescale.compile(scaled(64), out_idx=-1, machine="h200-sxm-8")
    assert isinstance(kernel, JITKernel)
    for name in (name for name in vars(JITKernel) if not name.startswith("_")):
        mine, stock = inspect.getattr_static(kernel, name), inspect.getattr_static(JITKernel, name)
        assert callable(getattr(type(kernel), name)) == callable(getattr(JITKernel, name)) or stock is None, name
        assert not inspect.isfunction(stock) or inspect.isfunction(mine), name


def test_what_it_says_of_itself(tmp_path, capsys):
    kernel = tilescale.compile(scaled(64), out_idx=-1, machine="h200-sxm-8")
    assert [(str(p.dtype), p.shape) for p in kernel.params] == [("float32", [64])] * 2
    assert kernel.out_idx == [1]
    assert kernel.kernel_source == kernel.get_kernel_source() == kernel.source
    assert str(kernel.target.attrs["arch"]) == "sm_90a"
    kernel.show_source()
    assert capsys.readouterr().out.strip() == kernel.source.strip()
    kernel.export_sources(kernel_path=str(tmp_path / "kernel.cu"))
    assert (tmp_path / "kernel.cu").read_text() == kernel.source
    assert kernel.adapter is kernel and kernel.execution_backend == "tilescale"
    x = torch.randn(64)
    assert torch.equal(kernel.torch_function(x), 2 * x)
    with pytest.raises(UnsupportedError, match="no artifact: TileLang has not compiled it"):
        _ = kernel.artifact
    with pytest.raises(UnsupportedError, match="has no host text"):
        kernel.get_host_source()
    with pytest.raises(UnsupportedError, match="no executable"):
        kernel.adapter.get_exportable_executable()
    with pytest.raises(UnsupportedError, match="no kernels"):
        _ = kernel.adapter.kernels


def test_a_kernel_of_a_wrong_program_has_a_name():
    @T.prim_func
    def empty(X: T.Tensor((64,), "float32")):
        T.evaluate(0)

    kernel = tilescale.compile(empty, machine="h200-sxm-8")
    assert repr(kernel) == "<tilescale.Kernel empty for h200-sxm-8>"
    with pytest.raises(UsageError, match="launches nothing"):
        kernel(torch.zeros(64))


def test_outputs_are_declared_in_one_way():
    @T.prim_func
    def program(X: T.Tensor((64,), "float32")):
        Y = T.empty((64,), "float32")
        with T.Kernel(1, threads=64):
            T.copy(X, Y)
        return Y

    assert torch.equal(tilescale.compile(program)(torch.ones(64)), torch.ones(64))
    with pytest.raises(UsageError, match=r"out_idx=\[-1\]: 'program' returns tensors that it declares with T.empty"):
        tilescale.compile(program, out_idx=[-1])(torch.ones(64))


def test_a_grid_of_no_blocks_is_an_error():
    """As in TileLang, where CUDA refuses it: the tensors stay as they are."""
    n = T.dynamic("n")

    @T.prim_func
    def program(X: T.Tensor((n,), "float32")):
        with T.Kernel(n, threads=1) as b:
            X[b] = 1.0

    tilescale.compile(program)(x := torch.zeros(4))
    assert torch.equal(x, torch.ones(4))
    with pytest.raises(ArgumentError, match=r"program launches a grid of no blocks: \(0,\)"):
        tilescale.compile(program)(torch.zeros(0))


def test_parameters_of_shards_and_numbers():
    @T.prim_func
    def program(X: T.Tensor((64, 8), "float16"), k: T.int32):
        with T.Kernel(device=4, block=1, threads=32):
            with T.Scale("device"):
                T.fill(T.view(X, layout=T.FullRow), k)

    x, k = tilescale.compile(program, machine="h200-sxm-8").params
    assert [int(n) for n in x.shape] == [16, 8] and k.is_scalar()


def test_entries_take_what_tilelangs_take(tmp_path):
    for mine, stock in ((tilescale.compile, tilelang.compile), (tilescale.autotune, tilelang.autotune)):
        taken, given = inspect.signature(mine).parameters, list(inspect.signature(stock).parameters)
        assert [name for name in taken if name in given] == [name for name in given if name in taken]
        assert any(p.kind is p.VAR_KEYWORD for p in taken.values()) or set(given) <= set(taken)

    @tilescale.jit(out_idx=-1, machine="h200-sxm-8", debug_root_path=str(tmp_path))
    def factory(n, block):
        return scaled(n, block)

    kernel, none = factory.par_compile([(64, 32), {"n": 64, "tile": 1}], num_workers=2, ignore_error=True)
    assert none is None
    assert (tmp_path / "tilelang_jit_kernel_factory.c").read_text().strip() == kernel.source.strip()
    assert "def program" in (tmp_path / "tilelang_jit_program_factory.py").read_text()


# -- profiler ----------------------------------------------------------------------------------------------------------


def test_the_profiler_compares_and_tells_simulated_time():
    kernel = tilescale.compile(scaled(256), out_idx=1, machine="h200-sxm-8")
    profiler = kernel.get_profiler()
    profiler.assert_allclose(lambda x: x * 2)
    with pytest.raises(AssertionError):
        profiler.assert_allclose(lambda x: x * 3)
    profiler.assert_consistent(repeat=1)
    report = tilescale.emulate(scaled(256), [torch.zeros(256), torch.zeros(256)], machine="h200-sxm-8")
    assert profiler.do_bench() == profiler.do_bench(input_tensors=[torch.zeros(256)])
    assert profiler.do_bench() == pytest.approx(report.time_us * 1e-3)
    assert profiler.do_bench(quantiles=[0.5, 0.9]) == [profiler.do_bench()] * 2
    assert profiler.do_bench(lambda x: x + 1, warmup=1, rep=1) > 0


def test_the_profiler_of_a_whole_machine_needs_no_job():
    @T.prim_func
    def program(X: T.Tensor((4096,), "float32")):
        with T.Kernel(device=T.ALL, block=1, threads=32):
            with T.Scale("device"):
                T.allreduce(X)

    kernels = [tilescale.compile(program, machine=machine) for machine in ("h200-sxm-8", "a100-sxm-8")]
    times = [kernel.get_profiler().do_bench() for kernel in kernels]
    assert 0 < times[0] < times[1]


def test_the_profiler_runs_with_data_where_time_depends_on_it():
    @T.prim_func
    def program(X: T.Tensor((32,), "float32"), count: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            for _ in T.serial(count[0]):
                for i in T.Parallel(32):
                    X[i] = X[i] + 1.0

    profiler = tilescale.compile(program, machine="h200-sxm-8").get_profiler()
    x = torch.zeros(32)
    short, long = (profiler.do_bench(input_tensors=[x, torch.tensor([n], dtype=torch.int32)]) for n in (1, 50))
    assert short < long and not x.any()


def test_open_extents_are_given_to_the_profiler():
    n = T.dynamic("n")
    kernel = tilescale.compile(scaled(n), machine="h200-sxm-8")
    assert kernel.get_profiler().do_bench(dynamic_symbolic_constraints={"n": 100}) > 0
