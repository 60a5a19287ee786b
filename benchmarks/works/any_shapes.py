# SPDX-License-Identifier: MIT
"""GEMMs with communication at random shapes: any number of rows, weights of published models."""

from __future__ import annotations

import functools
import itertools
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import overlap
import scaled
import strategies
import torch
import torch.distributed as dist
import trials
from scaled import FLOAT8

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

BASELINE = "nccl+cublas"

MODES = "eager", "graph"

MOST_ROWS = 16384

PLACES = 3
"""Sets of inputs, and results that are kept: consecutive calls have tensors at different addresses."""

CALLS, GROUP_FLOPS = {"eager": (4, 20), "graph": (1, 4)}, 4e12
"""Calls of a group, or replays of a graph of several calls, at least and at most, and floating-point operations of a
group: an interruption of the host spoils the time of a few calls that the host limits."""

SETTLED = 44
"""Calls after which the next ones are alike: a form is recorded in its first 5 calls, else tried again at 8, 16, 32."""

ROWS_OF_EACH = 10
"""Number of row counts drawn for each weight: kernels are compiled for weights."""

MODELS = {
    "Llama 3.2 3B": (3072, 24, 8, 128, 8192),
    "Llama 3 8B": (4096, 32, 8, 128, 14336),
    "Llama 3 70B": (8192, 64, 8, 128, 28672),
    "Llama 2 13B": (5120, 40, 40, 128, 13824),
    "Mistral Nemo 12B": (5120, 32, 8, 128, 14336),
    "Mistral Small 24B": (5120, 32, 8, 128, 32768),
    "Mistral Large 123B": (12288, 96, 8, 128, 28672),
    "Qwen2.5 7B": (3584, 28, 4, 128, 18944),
    "Qwen2.5 32B": (5120, 40, 8, 128, 27648),
    "Qwen2.5 72B": (8192, 64, 8, 128, 29568),
    "Qwen3 8B": (4096, 32, 8, 128, 12288),
    "Qwen3 14B": (5120, 40, 8, 128, 17408),
    "Gemma 2 9B": (3584, 16, 8, 256, 14336),
    "Gemma 2 27B": (4608, 32, 16, 128, 36864),
    "Gemma 3 12B": (3840, 16, 8, 256, 15360),
    "Gemma 3 27B": (5376, 32, 16, 128, 21504),
    "Phi-4 14B": (5120, 40, 10, 128, 17920),
    "Yi 34B": (7168, 56, 8, 128, 20480),
    "Granite 8B": (4096, 32, 8, 128, 12800),
    "Command R 35B": (8192, 64, 64, 128, 22528),
}
"""Hidden size, heads, key heads, features of a head, and inner size."""


@dataclass(frozen=True)
class Shape:
    """A GEMM M x N x K with a collective: N of each GPU for the gather, K of each GPU for the sums."""

    work: str
    m: int
    n: int
    k: int
    dtype: str


def drawn(seed: int, weights: int, gpus: int) -> list[Shape]:
    """Draw numbers of rows for some weights, log-uniform; the ranks must be able to share them."""
    chance, models = random.Random(seed), list(MODELS.values())
    chance.shuffle(models)
    kinds = list(itertools.product(WORKS, ("bfloat16", "float8_e4m3fn")))
    found: list[Shape] = []
    for number in range(weights):
        if number % len(kinds) == 0:
            chance.shuffle(kinds)
        name, dtype = kinds[number % len(kinds)]
        hidden, heads, keys, features, inner = models[number % len(models)]
        into = ((heads + 2 * keys) * features // gpus, hidden), (2 * inner // gpus, hidden)
        back = (hidden, heads * features // gpus), (hidden, inner // gpus)
        n, k = chance.choice(into if name == "ag_gemm" else back)
        step = 1 if name == "gemm_ar" else gpus
        rows = [max(round(2 ** chance.uniform(0, 14)) // step, 1) * step for _ in range(ROWS_OF_EACH)]
        found += [Shape(name, m, n, k, dtype) for m in rows]
    return list(dict.fromkeys(found))


class Work(ABC):
    """A GEMM of one shape: its inputs, its expected result, and its contenders.

    An input is a tuple (a, b, of_a, of_b); bfloat16 has no scales.
    """

    def __init__(self, shape: Shape):
        self.shape, self.size = shape, tilescale.init().size
        self.scaled = shape.dtype != "bfloat16"

    @property
    @abstractmethod
    def rows(self) -> int:
        """Shape of a on each rank."""

    @abstractmethod
    def reference(self, seed: int, given: Sequence[torch.Tensor]) -> trials.Case:
        """Result of the GEMM, in float32."""

    @abstractmethod
    def libraries(self, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        """NCCL and cuBLAS, one after the other."""

    @abstractmethod
    def ours(self, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        """The operator."""

    @abstractmethod
    def symm_mem(self, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        """PyTorch's fused operator, or its GEMM and its sum. Raises where it is unsupported."""

    def heat(self, mode: str, others: bool) -> Heat:
        """Contenders of the race; `others`: with PyTorch's operators on symmetric memory."""
        calls = {BASELINE: self.libraries, **({"symm_mem": self.symm_mem} if others else {}), "tilescale": self.ours}
        entries = [Contender(name, functools.partial(self._runner, call)) for name, call in calls.items()]
        s = self.shape
        flops = 2 * s.m * s.n * s.k
        least, most = CALLS[mode]
        calls = min(max(round(GROUP_FLOPS / flops), least), most)
        return Heat(s.work, (s.m, s.n, s.k), s.dtype, self.size, mode, BASELINE, entries, flops, calls=calls)

    def settle(self, others: bool) -> None:
        """Note the operator's strategy; call NCCL with cuBLAS, and the operator, until calls are alike."""
        self.way  # noqa: B018 - recorded calls choose none
        for call in (self.libraries, self.ours):
            for places in itertools.islice(itertools.cycle(self.places), SETTLED):
                call(*places)
        if others:
            self._load_kernels()

    def _load_kernels(self) -> None:
        """Load the kernels of PyTorch's operators: loading waits for the device, on which they wait for peers."""
        a, b, *scales = self.places[0]
        rows = -(-self.shape.m // self.size)
        part = multiplied(a[:rows], b, *(x[:rows] for x in scales[:1]), *scales[1:])
        torch.stack([part] * 2).sum(0)
        torch.cuda._sleep(1)
        torch.cuda.synchronize()

    def dry(self) -> None:
        """TileScale's operator on inputs without values, for compiling."""
        self.ours(*self._inputs())

    def _runner(self, call: Callable[..., torch.Tensor]) -> Runner:
        results: deque[torch.Tensor] = deque(maxlen=PLACES)
        number = itertools.count()

        def again() -> torch.Tensor:
            results.append(call(*self.places[next(number) % PLACES]))
            return results[-1]

        def check(seed: int) -> None:
            case = self.case
            for places in self.places:
                trials.into(*places)(*case.inputs)
            trials.nothing(self.shape.m * self.shape.n)  # value of a result that was not written
            trials.skew(seed)
            result = again()
            torch.cuda.synchronize()
            trials.compare(result, case)

        return Runner(again, check, way=(lambda: self.way) if call == self.ours else None)

    @functools.cached_property
    def way(self) -> str:
        """Strategy of the operator; it is chosen in the first calls, later ones are recorded."""
        return strategies.taken(self.dry)

    @functools.cached_property
    def places(self) -> list[tuple[torch.Tensor, ...]]:
        """Inputs at different addresses; a weight stays in place."""
        first = self._inputs()
        return [first, *((torch.empty_like(first[0]), *first[1:]) for _ in range(PLACES - 1))]

    @functools.cached_property
    def case(self) -> trials.Case:
        """Random inputs and the expected result."""
        dtype = FLOAT8 if self.scaled else torch.bfloat16
        given = trials.randoms(self.shape.m, dtype, (self.rows, self.shape.k), (self.shape.n, self.shape.k))
        if self.scaled:
            scales = trials.randoms(1, torch.float32, (self.rows, 1), (1, self.shape.n))
            given += [1 + scale.abs() for scale in scales]
        return self.reference(0, given)

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        dtype, made = FLOAT8 if self.scaled else torch.bfloat16, functools.partial(torch.ones, device=trials.device())
        a, b = made(self.rows, self.shape.k).to(dtype), made(self.shape.n, self.shape.k).to(dtype)
        return (a, b, made(self.rows, 1), made(1, self.shape.n)) if self.scaled else (a, b)


def multiplied(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    """A B^T by cuBLAS."""
    return scaled.multiplied(a, b, *scales) if scales else torch.mm(a, b.t())


def products(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A B^T in float32, and magnitudes, or a squared spread, for its error bound."""
    if len(given) == 2:
        return list(trials.product(*given))
    want, spread = scaled.reference(*given)
    return [want, spread.square_()]


def bound(want: torch.Tensor, rounded: torch.Tensor, other: torch.Tensor, terms: int, is_scaled: bool) -> torch.Tensor:
    """Error bound of each element; `rounded`: the magnitudes of intermediate values that are rounded to bfloat16."""
    if is_scaled:
        return scaled.bound(rounded, other.sqrt())
    return trials.product_bound(terms, 2 * want.abs() + rounded, other)


class Gathered(Work):
    """GEMM after a gather: rows of A are split over the GPUs, each has columns of C."""

    @property
    def rows(self) -> int:
        """Number of rows of a rank."""
        return self.shape.m // self.size

    def reference(self, seed: int, given: Sequence[torch.Tensor]) -> trials.Case:
        """All rows times this rank's B."""
        whole = list(given)
        for i in (0, 2)[: 1 + self.scaled]:
            whole[i] = _gathered(given[i])
        want, other = products(whole)
        return trials.Case(tuple(given), want, bound(want, want.abs(), other, self.shape.k, self.scaled))

    def libraries(self, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        """Gather rows and their scales first."""
        whole = _gathered(a)
        return multiplied(whole, b, *((_gathered(scales[0]), scales[1]) if scales else ()))

    def ours(self, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        return tilescale.ops.all_gather_matmul(a, b.t(), scales=scales or None)

    def symm_mem(self, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        made, group = torch.ops.symm_mem, overlap.fused_group()
        if not scales:
            return made.fused_all_gather_matmul(a, [b.t()], 0, group)[1][0]
        types = [[None], [None], [torch.bfloat16], [True]]
        return made.fused_all_gather_scaled_matmul(a, [b.t()], scales[0], [scales[1]], 0, group, *types)[1][0]


class Summed(Work):
    """GEMM with an all-reduce: the inner dimension is split over the GPUs, each ends with all of C."""

    @property
    def rows(self) -> int:
        return self.shape.m

    def reference(self, seed: int, given: Sequence[torch.Tensor]) -> trials.Case:
        """Sum of all ranks' results."""
        want, other = products(given)
        rounded = want.abs()  # each part, before all are added up
        for x in (want, rounded, other):
            dist.all_reduce(x)
        return trials.Case(tuple(given), *self.own(want, bound(want, rounded, other, self.shape.k * 2, self.scaled)))

    def own(self, *whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This rank's part of the result."""
        return whole

    def libraries(self, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        """Sum by NCCL after the GEMM."""
        c = multiplied(a, b, *scales)
        dist.all_reduce(c)
        return c

    def ours(self, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        return tilescale.ops.matmul_all_reduce(a, b.t(), scales=scales or None)

    def symm_mem(self, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        """cuBLAS, then a two-shot sum on symmetric memory."""
        c = _symmetric(self.shape.m, self.shape.n)
        c.copy_(multiplied(a, b, *scales)) if scales else torch.mm(a, b.t(), out=c)
        return torch.ops.symm_mem.two_shot_all_reduce_(c, "sum", overlap.fused_group())


class Scattered(Summed):
    """GEMM with a reduce-scatter: the inner dimension is split over the GPUs, each ends with rows of C."""

    def own(self, *whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.chunk(self.size)[tilescale.init().rank] for x in whole)

    def libraries(self, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        """Sum by NCCL after the GEMM."""
        c = a.new_empty(self.shape.m // self.size, self.shape.n, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(c, multiplied(a, b, *scales))
        return c

    def ours(self, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        return tilescale.ops.matmul_reduce_scatter(a, b.t(), scales=scales or None)

    def symm_mem(self, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        made, group = torch.ops.symm_mem, overlap.fused_group()
        if not scales:
            return made.fused_matmul_reduce_scatter(a, b.t(), "sum", 0, group)
        shape = [self.shape.m, self.shape.n]
        how = "sum", 0, 0, group, shape, None, None, torch.bfloat16, True
        return made.fused_scaled_matmul_reduce_scatter(a, b.t(), *scales, *how)


WORKS = {"ag_gemm": Gathered, "gemm_rs": Scattered, "gemm_ar": Summed}


def _gathered(x: torch.Tensor) -> torch.Tensor:
    """Rows of all ranks, by NCCL."""
    whole = x.new_empty(tilescale.init().size * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(whole.view(torch.uint8), x.view(torch.uint8))
    return whole


@functools.lru_cache(1)
def _symmetric(*shape: int) -> torch.Tensor:
    """A tensor in PyTorch's symmetric memory."""
    import torch.distributed._symmetric_memory as symm

    x = symm.empty(*shape, dtype=torch.bfloat16, device=trials.device())
    symm.rendezvous(x, dist.group.WORLD)
    return x
