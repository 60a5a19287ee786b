# SPDX-License-Identifier: MIT
"""Random numbers of threads and of iterations of parallel loops are those of cuRAND."""

import functools

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import blank
from tests.halves import half_at_night
from tilescale.backends.emulator.numerics.mrg32k3a import Mrg32k3a
from tilescale.backends.emulator.numerics.random import Philox, philox
from tilescale.backends.emulator.numerics.xorwow import Xorwow
from tilescale.errors import UnsupportedError, UsageError

GENERATORS = {
    "curandStatePhilox4_32_10_t": Philox,
    "curandStateXORWOW_t": Xorwow,
    "curandStateMRG32k3a_t": Mrg32k3a,
}
F32, F64 = np.dtype("float32"), np.dtype("float64")
FAR = 81985529216486895, 8589934592, 1000003
"""Seed, sequence and offset with bits in all places."""


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_has_the_known_answers(counter, key, words):
    """The vectors of Random123 (kat_vectors)."""
    state = [np.array(x, np.uint32)[:, None] for x in (counter, key)]
    assert philox(*state)[:, 0].tolist() == words


def seeded(kind, count, seed, sequence, offset):
    """Generators, and the mask of all of them."""
    made, which = kind(count), np.ones(count, bool)
    filled = [np.broadcast_to(np.array(x, np.uint64).view(np.int64), count) for x in (seed, sequence, offset)]
    made.seed(which, *filled)
    return made, which


# fmt: off
@pytest.mark.parametrize(
    ("kind", "start", "words", "uniform", "fine", "normal", "fine_normal", "pair", "fine_pair", "last"),
    [
        (Philox, (0, 0, 0), [1713891541, 3781805453, 3159862348, 2600524760, 4175744164, 1555169499],
         [0.693930924, 0.037094079, 0.0194494221], [0.31944576813839376, 0.14094660757109523, 0.27174698677845299],
         [0.351582348, -0.595407069, 0.445406258], [-0.42620584005128648, 0.74154154805475236, 2.1108304989755458],
         [-0.768665552, 0.289800137], [0.68536164773251951, 2.5023676501588579], 3092701944),
        (Philox, FAR, [1138226632, 4091193035, 589368767, 2949159738, 1457668526, 2090369253],
         [0.30180192, 0.384525418, 0.712202489], [0.24380047712475061, 0.53005024767480791, 0.76726259011775255],
         [0.62266618, 0.467644006, 0.955600321], [0.90573855494366706, -0.23832936795252169, -0.39930339357220868],
         [0.885859132, -0.329213232], [-1.1717537141703711, -0.64728122871279836], 999387344),
        (Xorwow, (0, 0, 0), [3179217846, 1883133293, 2220552389, 674260989, 306521119, 1986458431],
         [0.227643266, 0.329358488, 0.144065306], [0.91538356654639008, 0.97466113748392091, 0.65316052297526617],
         [1.45361459, -0.907904029, -0.209039018], [-0.57644480034708589, -1.6666374883915756, 0.99873728875055434],
         [-0.337144047, -0.131672964], [-0.049045484166638849, -1.195699776813141], 88267520),
        (Xorwow, FAR, [152172234, 293219661, 2458070578, 3347904429, 1052563764, 3796025554],
         [0.427612752, 0.337989569, 0.61618048], [0.3768262454441858, 0.91788554581646054, 0.0061071380664437513],
         [-0.957800806, 0.611904263, 0.759074211], [0.2933740513305067, 1.0947371017255643, 0.042452738602462514],
         [0.534137487, -0.224794075], [-0.17790518608089664, 0.5080510664819653], 1825055925),
        (Mrg32k3a, (0, 0, 0), [545508615, 1368065476, 1327943825, 3546985268, 951893240, 2290915747],
         [0.480774194, 0.355559886, 0.135988414], [0.75585223733752915, 0.57555531903427604, 0.41006409369953806],
         [1.49382663, 0.0904216766, -0.563033938], [0.33092455900715839, 1.5183148411062757, 0.20498228391940712],
         [0.683744907, 0.313743591], [2.1988094253269757, 0.45213501000232115], 2915576331),
        (Mrg32k3a, FAR, [677456033, 1525075129, 1274487022, 3051411297, 1537255709, 2901488528],
         [0.703932762, 0.482764006, 0.34450826], [0.85862801839906167, 0.91011350001527969, 0.71442120948667476],
         [-1.90100849, -0.326211095, 0.405345589], [-1.5715735683680456, -0.91318873589065541, -1.8799420441766417],
         [-2.23516798, 0.327651709], [1.8942611963766989, -0.12195406437764444], 3780459103),
    ],
)
# fmt: on
def test_generators_are_those_of_curand(
    kind, start, words, uniform, fine, normal, fine_normal, pair, fine_pair, last
):
    """Numbers that curand_kernel.h of CUDA 13 gives on a CPU, one after another, of one state."""
    made, which = seeded(kind, 1, *start)
    singles = (("word", F32, words), ("uniform", F32, uniform), ("uniform", F64, fine), ("normal", F32, normal),
               ("normal", F64, fine_normal))  # fmt: skip
    for of, dtype, wanted in singles:
        found = [made.draw(of, dtype, which)[0] for _ in wanted]
        np.testing.assert_allclose(found, wanted, rtol=0 if of == "word" else 1e-6 if dtype == F32 else 1e-13)
    np.testing.assert_allclose(made.vector("normal", F32, 2, which)[:, 0], pair, rtol=1e-6)
    np.testing.assert_allclose(made.vector("normal", F64, 2, which)[:, 0], fine_pair, rtol=1e-13)
    assert made.words(which)[0] == last


def test_vectors_of_philox_are_those_of_curand():
    """curand_uniform2_double takes two words for a number, where curand_uniform_double takes one."""
    made, which = seeded(Philox, 1, 7, 3, 1)
    fine, four = made.vector("uniform", F64, 2, which), made.vector("normal", F32, 4, which)
    np.testing.assert_allclose(fine[:, 0], [0.16271341347772533, 0.58739435727528821], rtol=1e-13)
    np.testing.assert_allclose(four[:, 0], [0.539849818, 1.1234653, 0.816637814, -0.79531455], rtol=1e-6)


@pytest.mark.parametrize("kind", GENERATORS.values())
def test_sequences_and_offsets_are_far_apart_and_in_one_stream(kind):
    ahead, which = seeded(kind, 1, 9, 4, 3)
    stepped, _ = seeded(kind, 1, 9, 4, 0)
    for _ in range(3):
        stepped.words(which)
    assert ahead.words(which) == stepped.words(which)
    several, all_ = seeded(kind, 64, 9, np.arange(64), 0)
    assert np.unique(several.words(all_)).size == 64


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generator", GENERATORS)
def test_threads_draw_from_streams_of_their_own(generator):
    @T.prim_func
    def program(W: T.Tensor((64, 6), "uint32"), U: T.Tensor((64, 8), "float32"), N: T.Tensor((64, 8), "float64")):
        with T.Kernel(2, threads=32) as b:
            t = T.get_thread_binding()
            T.rng_init(42, b * 32 + t, 0, generator=generator)
            for i in T.serial(6):
                W[b * 32 + t, i] = T.rng_rand()
            for i in T.serial(8):
                U[b * 32 + t, i] = T.rng_rand_float()
            for i in T.serial(8):
                N[b * 32 + t, i] = T.rng_rand_float(bit=64, dist="normal")

    args = [torch.zeros(64, 6, dtype=torch.uint32), blank(64, 8), torch.zeros(64, 8, dtype=torch.float64)]
    tilescale.emulate(program, args)
    made, which = seeded(GENERATORS[generator], 64, 42, np.arange(64), 0)
    assert args[0].numpy().tolist() == np.stack([made.words(which) for _ in range(6)], 1).tolist()
    assert args[1].numpy().tolist() == np.stack([made.uniform(which, F32) for _ in range(8)], 1).tolist()
    assert args[2].numpy().tolist() == np.stack([made.normal(which, F64) for _ in range(8)], 1).tolist()


def test_a_number_before_the_first_seed_is_an_error():
    @T.prim_func
    def program(X: T.Tensor((32,), "uint32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            if t < 16:
                T.rng_init(1)
            X[t] = T.rng_rand()

    with pytest.raises(UsageError, match="before T.rng_init"):
        tilescale.emulate(program, [torch.zeros(32, dtype=torch.uint32)])


# -- parallel loops ----------------------------------------------------------------------------------------------------


def loop(count, threads, dtype, draws, generator="curandStatePhilox4_32_10_t"):
    @T.prim_func
    def program(X: T.Tensor((count,), dtype)):
        with T.Kernel(1, threads=threads):
            T.rng_init(1, generator=generator)
            for i in T.Parallel(count):
                X[i] = draws()

    return program


@pytest.mark.parametrize(
    ("generator", "kind", "dtype", "lanes", "count", "threads", "most"),
    half_at_night(
        [*GENERATORS],
        [("word", "uint32", 4), ("uniform", "float32", 4), ("normal", "float32", 4), ("uniform", "float64", 2),
         ("normal", "float64", 2)],
        [(512, 64, 4), (64, 1, 4), (96, 128, 1), (200, 128, 2)],
    ),
)  # fmt: skip
def test_iterations_draw_from_the_streams_of_their_threads(generator, kind, dtype, lanes, count, threads, most):
    """In vectors, which have functions of their own, where no thread would be idle for them."""
    lanes = min(lanes, most)
    bits = 64 if dtype == "float64" else 32
    draws = T.rng_rand if kind == "word" else functools.partial(T.rng_rand_float, bit=bits, dist=kind)
    program, X = loop(count, threads, dtype, draws, generator), torch.zeros(count, dtype=getattr(torch, dtype))
    tilescale.emulate(program, [X])
    made, which = seeded(GENERATORS[generator], threads, 1, np.arange(threads), 0)
    rounds = -(-count // (threads * lanes))
    drawn = [made.vector(kind, np.dtype(dtype), lanes, which).T.reshape(-1) for _ in range(rounds)]
    assert X.numpy().tolist() == np.concatenate(drawn)[:count].tolist()


def test_several_numbers_of_an_iteration_come_one_after_another():
    """Numbers of vectors too: TileLang adds them lane by lane."""

    @T.prim_func
    def program(X: T.Tensor((512,), "float32"), Y: T.Tensor((512,), "float32"), n: T.int32):
        with T.Kernel(1, threads=64):
            T.rng_init(1)
            for i in T.Parallel(512):
                X[i] = T.rng_rand_float() - T.rng_rand_float()
            for i in T.Parallel(512):
                Y[i] = 0.0
                for _ in T.serial(n):
                    Y[i] += T.rng_rand_float(dist="normal")
                if i % 3 == 0:
                    Y[i] *= T.rng_rand_float()

    X, Y = torch.zeros(512), torch.zeros(512)
    tilescale.emulate(program, [X, Y, 3])
    made, which = seeded(Philox, 64, 1, np.arange(64), 0)
    lanes = np.stack([made.uniform(which, F32) - made.uniform(which, F32) for _ in range(8)])
    assert X.numpy().tolist() == lanes.reshape(2, 4, 64).transpose(0, 2, 1).reshape(-1).tolist()
    for step in range(8):
        mine = sum(made.normal(which, F32) for _ in range(3))
        some = (step * 64 + np.arange(64)) % 3 == 0
        mine[some] *= made.uniform(some, F32)[some]
        assert Y[step * 64 : step * 64 + 64].tolist() == mine.tolist()


def test_loops_of_one_iteration_are_left_out():
    @T.prim_func
    def program(X: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=1):
            T.rng_init(1)
            for i, j in T.Parallel(1, 64):
                if i * 64 + j < 64:
                    X[i * 64 + j] = T.rng_rand_float(dist="normal")

    X = torch.zeros(64)
    tilescale.emulate(program, [X])
    made, which = seeded(Philox, 1, 1, 0, 0)
    assert X.tolist() == np.concatenate([made.vector("normal", F32, 4, which) for _ in range(16)])[:, 0].tolist()


def test_fragments_and_unknown_extents():
    @T.prim_func
    def program(X: T.Tensor((512,), "float32"), Y: T.Tensor((512,), "float32"), n: T.int32):
        with T.Kernel(1, threads=128):
            T.rng_init(1)
            tile = T.alloc_fragment((512,), "float32")
            for i in T.Parallel(512):
                tile[i] = T.rng_rand_float(dist="normal")
            T.copy(tile, X)
            for i in T.Parallel(n):
                Y[i] = T.rng_rand_float()

    X, Y = torch.zeros(512), torch.zeros(512)
    tilescale.emulate(program, [X, Y, 300])
    made, which = seeded(Philox, 128, 1, np.arange(128), 0)
    assert X.numpy().tolist() == made.vector("normal", F32, 4, which).T.reshape(-1).tolist()
    found = np.concatenate([made.uniform(which, F32) for _ in range(3)])
    assert Y[:300].tolist() == found[:300].tolist() and not Y[300:].any()


def test_the_last_seed_in_the_text_counts():
    """TileLang gives each T.rng_init a state of its own, for the draws that follow in the text."""

    @T.prim_func
    def program(X: T.Tensor((2, 32), "uint32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            T.rng_init(1)
            X[0, t] = T.rng_rand()
            T.rng_init(1, generator="curandStateXORWOW_t")
            X[1, t] = T.rng_rand()

    X = torch.zeros(2, 32, dtype=torch.uint32)
    tilescale.emulate(program, [X])
    for row, kind in zip(X, (Philox, Xorwow), strict=True):
        made, which = seeded(kind, 32, 1, np.arange(32), 0)
        assert row.tolist() == made.words(which).tolist()


# -- refusals ----------------------------------------------------------------------------------------------------------


@T.macro
def of_replicated_fragments(X):
    tile = T.alloc_fragment((32,), "float32")
    for i in T.Parallel(32):
        tile[i] = T.rng_rand_float()
    T.copy(tile, X[0:32])


@T.macro
def of_some_threads(X):
    if T.get_thread_binding() < 64:
        for i in T.Parallel(512):
            X[i] = T.rng_rand_float()


@T.macro
def in_vectors_of_threads(X):
    for i in T.vectorized(4):
        X[T.get_thread_binding() * 4 + i] = T.rng_rand_float(dist="normal")


@T.macro
def seeded_by_iterations(X):
    for i in T.Parallel(512):
        T.rng_init(i)
        X[i] = T.rng_rand_float()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (of_replicated_fragments, "which thread draws"),
        (of_some_threads, "which thread draws"),
        (in_vectors_of_threads, "a vector of 4 random numbers"),
        (seeded_by_iterations, "T.rng_init in T.Parallel"),
    ],
)
def test_what_cannot_be_known_is_refused_with_its_line(body, words):
    @T.prim_func
    def program(X: T.Tensor((512,), "float32")):
        with T.Kernel(1, threads=128):
            T.rng_init(1)
            body(X)

    with pytest.raises(UnsupportedError, match=words) as caught:
        tilescale.emulate(program, [blank(512)])
    assert caught.value.where and caught.value.hint
