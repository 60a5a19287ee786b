# SPDX-License-Identifier: MIT
"""All names of TileLang's language keep their meaning: the same objects, and the same IR for the extended ones."""

import linecache
import textwrap

import pytest
import tilelang.language
from tvm.ir import structural_equal

import tilescale
import tilescale.language

STOCK = tilelang.language
OURS = tilescale.language


def public(module: object) -> set[str]:
    return {name for name in dir(module) if not name.startswith("_")}


def test_only_the_extended_names_differ():
    names = {*STOCK.__all__, *public(STOCK)}
    assert {name for name in names if getattr(OURS, name) is not getattr(STOCK, name)} == set(OURS.EXTENDED)


def test_added_names_are_new():
    assert not [name for name in OURS.ADDED if hasattr(STOCK, name)]


def test_all_names_are_listed():
    assert set(OURS.__all__) == {*STOCK.__all__, *OURS.ADDED}
    assert len(OURS.__all__) == len(set(OURS.__all__))
    assert public(STOCK) | set(OURS.__all__) <= set(dir(OURS))


def test_star_import_gives_both():
    names: dict[str, object] = {}
    exec("from tilescale.language import *", names)
    assert names["Scale"] is OURS.Scale and names["copy"] is OURS.copy and names["clear"] is STOCK.clear


@pytest.mark.parametrize(
    ("module", "name", "advice"),
    [
        (OURS, "all_reduce", "; did you mean 'allreduce'?"),
        (tilescale, "emulat", "; did you mean 'emulate'?"),
        (tilescale.ops, "allreduce", "; did you mean 'all_reduce'?"),
        (OURS, "nothing_like_this", ""),
        (tilescale, "nothing_like_this", ""),
    ],
)
def test_a_name_that_nobody_has_is_an_attribute_error(module, name: str, advice: str):
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert str(caught.value) == f"module {module.__name__!r} has no attribute {name!r}{advice}"


STATEMENTS = {
    "copy, positional": "T.copy(A[bx * 64, 0], a)",
    "copy, by keyword": "T.copy(src=A[bx * 64, 0], dst=a)",
    "copy, dst by keyword": "T.copy(A[bx * 64, 0], dst=a)",
    "copy, slices": "T.copy(A[0:64, 0:64], a[0:64, 0:64])",
    "copy, hints": "T.copy(A[bx * 64, 0], a, coalesced_width=4, disable_tma=True)",
    "copy, eviction": "T.copy(A[bx * 64, 0], a, eviction_policy='evict_first')",
    "copy, annotations": "T.copy(A[bx * 64, 0], a, annotations={'disable_tma': True})",
    "view, shape": "v = T.view(a, (4096,)); T.clear(v)",
    "view, shape by keyword": "v = T.view(a, shape=[32, 128]); T.clear(v)",
    "view, source by keyword": "v = T.view(src=a, shape=[32, 128]); T.clear(v)",
    "view, dtype": "v = T.view(a, dtype='int32'); T.clear(v)",
    "view, shape and dtype": "v = T.view(a, (64, 128), 'float16'); T.clear(v)",
    "view, neither": "v = T.view(a); T.clear(v)",
    "broadcast": "T.evaluate(T.broadcast(T.float32(1.0), 4))",
    "broadcast, by keyword": "T.evaluate(T.broadcast(value=T.float32(1.0), lanes=4))",
    "broadcast, an element": "T.evaluate(T.broadcast(a[0, 0], 2))",
    "broadcast, a number": "T.evaluate(T.broadcast(1, 4))",
    "alloc_shared": "s = T.alloc_shared((8, 8), 'float16'); T.clear(s)",
    "alloc_shared, scope": "s = T.alloc_shared((8, 8), 'float16', scope='shared'); T.clear(s)",
    "alloc_shared, int": "s = T.alloc_shared(8, 'float16'); T.clear(s)",
    "alloc_fragment": "s = T.alloc_fragment((8, 8), 'float32'); T.clear(s)",
    "alloc_fragment, keywords": "s = T.alloc_fragment(shape=(8, 8), dtype='float32'); T.clear(s)",
    "alloc_barrier": "b = T.alloc_barrier(128); T.barrier_arrive(b)",
    "alloc_barrier, several": "b = T.alloc_barrier([32, 64]); T.barrier_arrive(b[1])",
    "a tensor of an address": "x = T.make_tensor(T.cast(A[0, 0], 'int64'), (64,), 'float32'); T.clear(x)",
    "a row for each thread": "r = T.alloc_local((32,), 'float32'); T.copy(A[T.get_thread_binding(), 0:32], r)",
    "an atomic of a thread": "r = T.alloc_local([1], 'float32'); T.copy(A[0, 0:1], r); T.atomic_add(A[0:1, 0], r)",
    "a vector": "a[0, T.Ramp(0, 1, 4)] = A[0, T.Ramp(4, 1, 4)]",
    "a word": "v = T.ldg128(A[0, 0:4])",
    "a shuffle": "T.evaluate(T.tvm_warp_shuffle(T.uint32(0xFFFFFFFF), a[0, 0], 0, 32, 32))",
    "random numbers": "T.rng_init(7); r = T.rng_rand()",
    "a reducer": "r = T.alloc_reducer(64, 'float32', op='sum', replication='all'); T.clear(r); T.finalize_reducer(r)",
    "a function of C": "a[0, 0] = T.call_extern('float32', 'f', A[0, 0])",
}

LAUNCHES = {
    "one axis": "T.Kernel(4, threads=128) as bx",
    "no threads": "T.Kernel(4) as bx",
    "two axes": "T.Kernel(4, 2, threads=128) as (bx, by)",
    "three axes": "T.Kernel(4, 2, 3, threads=128) as (bx, by, bz)",
    "threads as a tuple": "T.Kernel(4, threads=(64, 2)) as bx",
    "threads as a list": "T.Kernel(4, threads=[32, 2, 2]) as bx",
    "prelude": "T.Kernel(4, threads=128, prelude='// nothing') as bx",
    "cluster of two": "T.Kernel(4, threads=128, cluster_dims=2) as bx",
    "cluster as a tuple": "T.Kernel(4, threads=128, cluster_dims=(2, 1, 1)) as bx",
    "ClusterKernel": "T.ClusterKernel(4, cluster_dims=2, threads=128) as bx",
    "one in a tuple": "T.Kernel(4, threads=128) as (bx,)",
    "threads alone": "T.Kernel(threads=8)",
    "nothing": "T.Kernel()",
}


def build(language: object, launch: str, statement: str):
    source = textwrap.dedent(f"""
        @T.prim_func
        def f(A: T.Tensor((256, 64), "float32")):
            with {launch}:
                a = T.alloc_shared((64, 64), "float32")
                {statement}
    """)
    name = f"<{id(language)} {launch} {statement}>"
    # TileLang reads the source of a function; this one has no file.
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    names = {"T": language}
    exec(compile(source, name, "exec"), names)
    return names["f"]


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS.keys())
def test_statements_trace_to_the_same_ir(statement: str):
    launch = LAUNCHES["one axis"]
    assert structural_equal(build(OURS, launch, statement), build(STOCK, launch, statement), map_free_vars=True)


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_launches_trace_to_the_same_ir(launch: str):
    statement = STATEMENTS["copy, slices"]
    assert structural_equal(build(OURS, launch, statement), build(STOCK, launch, statement), map_free_vars=True)


@pytest.mark.parametrize(
    "statement",
    ["T.copy(A, a, nonsense=1)", "T.copy(A)", "T.broadcast()", "T.view()", "T.view(a, (7,))", "T.alloc_shared()"],
)
def test_what_tilelang_refuses_is_refused_alike(statement: str):
    launch = LAUNCHES["one axis"]
    with pytest.raises(Exception) as ours:  # noqa: PT011, B017 - both raise the same error
        build(OURS, launch, statement)
    with pytest.raises(Exception) as stock:  # noqa: PT011, B017
        build(STOCK, launch, statement)
    assert type(ours.value) is type(stock.value)
    assert str(ours.value) == str(stock.value)
