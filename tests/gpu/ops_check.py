# SPDX-License-Identifier: MIT
"""Operators on GPUs: `torchrun --nproc-per-node 2 tests/gpu/ops_check.py [name or name:number ... or 1/4]`.

Every operator runs on fresh random inputs, one rank late, its workspace full of NaN, eager, repeated and in a CUDA
graph, and is compared with float32. Prints a line for each check, and ends with exit code 1 if one fails.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.ops_support import LATE_CYCLES, compare, main, poison, random, runs, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, as_first, everyones, total  # noqa: E402
from tilescale import ops  # noqa: E402
from tilescale.ops import ag_gemm  # noqa: E402
from tilescale.ops.few_rows import few_rows_gemms  # noqa: E402

SHAPES = [
    (1, 64, 64, True),
    (24, 200, 136, False),
    (300, 512, 1024, True),
    (1100, 3584, 1024, True),
    (1536, 3584, 1024, False),
    (2048, 2048, 4096, True),  # persistent grid, fewer blocks than SMs
]
"""Rows of a rank, N, K, and whether the right operand is a transposed one."""


def operand(n: int, k: int, transposed: bool) -> torch.Tensor:
    """A right operand (k, n)."""
    return random(n, k).t() if transposed else random(k, n)


def check_all_gather_matmul(only: slice) -> None:
    for rows, n, k, transposed in [*SHAPES, (512, 3584, 8192, True)][only]:  # the last one in slices of columns
        a, right, bias = random(rows, k), operand(n, k, transposed), random(n)
        want = everyones(a).view(-1, k).float() @ right.float() + bias.float()
        title = f"all_gather_matmul {SIZE * rows}x{n}x{k} {'NT' if transposed else 'NN'}"
        runs(
            title,
            lambda a=a, right=right, bias=bias: ops.all_gather_matmul(a, right, bias=bias),
            lambda c, want=want, title=title: compare(title, c, want),
        )


def check_several_weights(_: slice) -> None:
    """Side by side in memory, where they have one grid, or not."""
    for rows, k, widths, side_by_side in (
        (700, 1024, (1024, 256, 256), False),
        (700, 1024, (1024, 256, 256), True),
        (300, 4096, (256, 128), True),  # in slices of columns
        (2200, 2048, (2048, 512, 512), True),  # persistent, the last tile not whole
    ):
        a, whole = random(rows, k), random(sum(widths), k)
        weights = [w if side_by_side else w.clone() for w in whole.split(widths)]
        want = (everyones(a).view(-1, k).float() @ whole.float().t()).split(widths, 1)
        title = f"weights of {widths}, {SIZE * rows} rows{', side by side' * side_by_side}"

        def check(results: list[torch.Tensor], want: Any = want, title: str = title) -> None:
            for result, part in zip(results, want, strict=True):
                compare(title, result, part)

        runs(title, lambda a=a, weights=weights: ops.all_gather_matmul(a, [w.t() for w in weights]), check)


def check_activations(_: slice) -> None:
    a, weight = random(700, 512), random(1024, 512)
    product = everyones(a).view(-1, 512).float() @ weight.float().t()
    for name, function in ag_gemm.ACTIVATIONS.items():
        want = function(product)
        runs(
            f"all_gather_matmul, {name}",
            lambda name=name: ops.all_gather_matmul(a, weight.t(), activation=name),
            lambda c, want=want: compare("activation", c, want),
        )


def check_matmul_reduce_scatter(only: slice) -> None:
    for rows, n, k, transposed in SHAPES[only]:
        a, right, bias = random(SIZE * rows, k), operand(n, k, transposed), random(n)
        bias = as_first(bias)
        want = (total(a.float() @ right.float()) + bias.float()).chunk(SIZE)[RANK]
        title = f"matmul_reduce_scatter {SIZE * rows}x{n}x{k} {'NT' if transposed else 'NN'}"
        runs(
            title,
            lambda a=a, right=right, bias=bias: ops.matmul_reduce_scatter(a, right, bias=bias),
            lambda c, want=want, title=title: compare(title, c, want),
        )


def check_tensors_elsewhere(only: slice) -> None:
    """Arguments and results have new addresses in each call, and all are kept until the end."""
    for rows, n, k, transposed in SHAPES[only]:
        right, wide = operand(n, k, transposed), operand(k, n, transposed)
        made = []
        for turn in range(12):
            a = random(rows, k)
            poison()
            if turn % SIZE == RANK:
                torch.cuda._sleep(LATE_CYCLES)
            gathered = ops.all_gather_matmul(a, right)
            made.append((a, gathered, ops.matmul_reduce_scatter(gathered, wide), ops.matmul_all_reduce(a, right)))
        for a, gathered, scattered, summed in made:
            compare("gathered", gathered, everyones(a).view(-1, k).float() @ right.float())
            compare("scattered", scattered, total(gathered.float() @ wide.float()).chunk(SIZE)[RANK])
            compare("summed", summed, total(a.float() @ right.float()))
        say(f"PASS tensors elsewhere in each call, {rows} rows")


def check_gathers(only: slice) -> None:
    for shape in [(3,), (100, 33), (4096, 2048)][only]:
        x = random(*shape)
        want = everyones(x).flatten(0, 1)
        runs(f"all_gather {shape}", lambda x=x: ops.all_gather(x), lambda c, want=want: compare("gather", c, want))
    for kind in (torch.bool, torch.complex64, torch.complex128):
        x = torch.complex(random(100, 33, dtype=torch.float64), random(100, 33, dtype=torch.float64))
        x = x.real > 0 if kind == torch.bool else x.to(kind)
        want = everyones(x).flatten(0, 1)

        def check(c: torch.Tensor, want: torch.Tensor = want) -> None:
            torch.testing.assert_close(c, want, rtol=0, atol=0)

        runs(f"all_gather {kind}", lambda x=x: ops.all_gather(x), check)


def check_scatters(only: slice) -> None:
    for shape in [(3,), (100, 33), (4096, 2048)][only]:
        x = random(SIZE * shape[0], *shape[1:])
        want = total(x).chunk(SIZE)[RANK]
        runs(
            f"reduce_scatter {shape}", lambda x=x: ops.reduce_scatter(x), lambda c, want=want: compare("sum", c, want)
        )


def check_all_to_all(only: slice) -> None:
    for shape, cut, joined in [
        ((SIZE * 3,), 0, 0),
        ((2, 64, 4 * SIZE, 24), 2, 1),
        ((2, 64 * SIZE, 4, 24), 1, 2),
        ((1, 4096, 8 * SIZE, 128), 2, 1),
        ((1, 4096 * SIZE, 8, 128), 1, 2),
    ][only]:
        x = random(*shape)
        want = torch.cat([part.chunk(SIZE, cut)[RANK] for part in everyones(x)], joined)
        runs(
            f"all_to_all {shape}",
            lambda x=x, cut=cut, joined=joined: ops.all_to_all(x, cut, joined),
            lambda c, want=want: compare("exchange", c, want),
        )


def check_matmul_all_reduce(only: slice) -> None:
    for m, n, k, transposed in [(1, 1024, 512, True), (100, 1032, 520, False), (2047, 3584, 1024, True)][only]:
        a, right, bias = random(m, k), operand(n, k, transposed), random(n)
        bias = as_first(bias)
        want = total(a.float() @ right.float()) + bias.float()
        title = f"matmul_all_reduce {m}x{n}x{k} {'NT' if transposed else 'NN'}"
        runs(
            title,
            lambda a=a, right=right, bias=bias: ops.matmul_all_reduce(a, right, bias=bias),
            lambda c, want=want, title=title: compare(title, c, want),
        )


def check_few_rows(_: slice) -> None:
    """In one launch: sums over the ranks, and products of a rank with several weights."""
    shapes = (1, 4096, 2048, True), (9, 200, 136, False), (17, 5376, 1096, True), (32, 8192, 64, True)
    for rows, n, k, transposed in shapes:
        a, right, bias = random(rows, k), operand(n, k, transposed), as_first(random(n))
        want = total(a.float() @ right.float()) + bias.float()
        title = f"{rows} rows of {n}x{k}"
        runs(
            title,
            lambda a=a, right=right, bias=bias: ops.matmul_all_reduce(a, right, bias=bias),
            lambda c, want=want, title=title: compare(title, c, want),
        )
    for rows, k, widths in ((1, 512, (512, 128, 128)), (16, 4096, (7168, 7168)), (32, 200, (3584, 3584))):
        a, whole = random(rows, k), random(sum(widths), k)
        weights, wanted = list(whole.split(widths)), (a.float() @ whole.float().t()).split(widths, 1)
        title = f"{rows} rows of several weights {widths}"

        def check(results: list[torch.Tensor], wanted: Any = wanted, title: str = title) -> None:
            for result, want in zip(results, wanted, strict=True):
                compare(title, result, want)

        runs(title, lambda a=a, weights=weights: few_rows_gemms(a, weights), check)


def check_columns(only: slice) -> None:
    """Rows, N and K of a rank, and whether the right operand is a transposed one; before and after GEMMs."""
    for m, n, k, transposed in [(1, 64, 64, True), (100, 1032, 512, False), (2047, 3584, 1024, True)][only]:
        a, right, bias = random(m, k), operand(n, SIZE * k, transposed), random(n)
        want = everyones(a).transpose(0, 1).flatten(1).float() @ right.float() + bias.float()
        title = f"all_gather_columns_matmul {m}x{n}x{SIZE * k}"
        runs(
            title,
            lambda a=a, right=right, bias=bias: ops.all_gather_columns_matmul(a, right, bias=bias),
            lambda c, want=want, title=title: compare(title, c, want),
        )
        a, right = as_first(a), operand(n, k, transposed)
        want = everyones(a.float() @ right.float() + bias.float()).transpose(0, 1).flatten(1)
        title = f"matmul_all_gather {m}x{SIZE * n}x{k}"
        runs(
            title,
            lambda a=a, right=right, bias=bias: ops.matmul_all_gather(a, right, bias=bias),
            lambda c, want=want, title=title: compare(title, c, want),
        )


def check_places_of_results(only: slice) -> None:
    """GEMMs that write to `out=`, contiguous or not."""
    for rows, n, k, transposed in SHAPES[only]:
        a, whole, right = random(rows, k), random(SIZE * rows, k), operand(n, k, transposed)
        for name, given in ("all_gather_matmul", a), ("matmul_reduce_scatter", whole), ("matmul_all_reduce", a):
            call = getattr(ops, name)
            want = call(given, right)
            for place in (torch.full_like(want, torch.nan), random(len(want), n + 8)[:, :n]):

                def check(c: torch.Tensor, want: torch.Tensor = want, place: torch.Tensor = place) -> None:
                    assert c is place or c.data_ptr() == place.data_ptr()
                    torch.testing.assert_close(c, want, rtol=0, atol=0)

                runs(f"{name} {rows}x{n}x{k}, out=", lambda c=call, x=given, b=right, y=place: c(x, b, out=y), check)


def check_float32_and_its_switch(_: slice) -> None:
    """GEMMs of float32 are as exact as PyTorch's, in TF32 where PyTorch allows it, also from call to call."""
    a, right = random(512, 1024, dtype=torch.float32), random(1024, 1024, dtype=torch.float32)
    exact = everyones(a).flatten(0, 1).double() @ right.double()
    try:
        for turn in range(20):
            torch.backends.cuda.matmul.allow_tf32 = bool(turn % 2)
            error = float((ops.all_gather_matmul(a, right) - exact).norm() / exact.norm())
            assert (1e-5 < error < 1e-2) if turn % 2 else error < 1e-5, f"TF32 {turn % 2}: {error}"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    say("PASS float32 and its switch")


def check_all_reduce(only: slice) -> None:
    for shape in [(3,), (100, 33), (1024, 512), (5000, 2048)][only]:
        x = random(*shape)
        want = total(x)
        runs(f"all_reduce {shape}", lambda x=x: ops.all_reduce(x), lambda c, want=want: compare("sum", c, want))


def check_all_reduce_types(only: slice) -> None:
    """Combinations that are exact, of integers and of floats that are integers; a NaN of one rank stays."""
    floats = (torch.float64, torch.float32, torch.bfloat16)
    for dtype in (*floats, torch.int64, torch.int32, torch.int8, torch.uint8)[only]:
        for shape in [(100, 33), (1024, 2048)]:
            x = torch.randint(-30, 30, shape, device=DEVICE).to(dtype)
            if dtype in floats and RANK == 0:
                x.view(-1)[1] = torch.nan
            every = everyones(x)
            for op, want in ("sum", every.sum(0, dtype=dtype)), ("max", every.amax(0)), ("min", every.amin(0)):
                runs(
                    f"all_reduce {op} {dtype} {shape}",
                    lambda x=x, op=op: ops.all_reduce(x, op=op),
                    lambda c, want=want: torch.testing.assert_close(c, want, rtol=0, atol=0, equal_nan=True),
                )


def check_all_reduce_rms_norm(only: slice) -> None:
    for m, n in [(1, 1024), (70, 1032), (300, 4096), (2050, 7168), (1024, 16384)][only]:
        x, weight, residual = random(m, n), random(n), random(m, n)
        weight = as_first(weight)
        residual = as_first(residual)
        y = total(x).bfloat16().float() + residual.float()
        want = y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + 1e-6) * weight.float()
        title = f"all_reduce_rms_norm {m}x{n}"

        def check(results: tuple[torch.Tensor, torch.Tensor], want=want, y=y, title=title) -> None:
            compare(title, results[0], want)
            compare(f"{title}, residual", results[1], y)

        runs(title, lambda x=x, w=weight, r=residual: ops.all_reduce_rms_norm(x, w, r), check)


def check_all_to_all_v(only: slice) -> None:
    for shape in [(3,), (1000, 33), (4096, 2048)][only]:
        torch.manual_seed(0)  # all ranks have the same numbers
        counts = torch.randint(0, shape[0] + 1, (SIZE, SIZE))
        sent, received = counts[RANK].tolist(), counts[:, RANK].tolist()
        whole = random(SIZE * shape[0], *shape[1:])
        parts = [x[: n.sum()].split(n.tolist())[RANK] for x, n in zip(everyones(whole), counts, strict=True)]
        want, x, on_device = torch.cat(parts), whole[: sum(sent)], counts[RANK].to(DEVICE)
        runs(
            f"all_to_all_v {shape}",
            lambda x=x, sent=sent, received=received, most=shape[0]: ops.all_to_all_v(x, sent, received, most=most),
            lambda c, want=want: compare("exchange", c, want),
        )
        runs(
            f"all_to_all_v {shape}, sizes on the device",
            lambda x=x, sent=on_device, most=shape[0]: ops.all_to_all_v(x, sent, most=most)[0],
            lambda c, want=want: compare("exchange", c[: len(want)], want),
        )
        for sizes in [on_device, sent] * 8:  # more calls than are tried to be recorded
            poison()
            got, came = ops.all_to_all_v(x, sizes)
            compare("exchange", got, want)
            assert came.tolist() == received
        say(f"PASS all_to_all_v {shape}, sizes exchanged")


def check_broadcast(only: slice) -> None:
    for shape in [(3,), (1000, 33), (4096, 2048)][only]:
        for root in range(SIZE):
            x = random(*shape)
            want = everyones(x)[root]
            runs(
                f"broadcast {shape} from {root}",
                lambda x=x, root=root: ops.broadcast(x, root),
                lambda c, want=want: torch.testing.assert_close(c, want, rtol=0, atol=0),
            )


def check_all_gather_v(only: slice) -> None:
    for shape in [(3,), (1000, 33), (4096, 2048)][only]:
        for most in range(shape[0], shape[0] - 3, -1):
            poison()
            counts = [most * rank // SIZE for rank in range(SIZE)]
            x = random(*shape)
            want = torch.cat([part[:n] for part, n in zip(everyones(x), counts, strict=True)])
            got, came = ops.all_gather_v(x[: counts[RANK]])
            compare("gather", got, want)
            assert came.tolist() == counts
        say(f"PASS all_gather_v {shape}")


def check_experts(only: slice) -> None:
    """Tokens, width, hidden, experts, choices; several times, for the same bits each time."""
    for tokens, k, n, experts, choices in [(5, 64, 64, SIZE, 1), (1000, 1024, 520, 8 * SIZE, 4)][only]:
        x, w = random(tokens, k), random(experts // SIZE, n, k)
        share, chosen = torch.rand(tokens, experts, device=DEVICE).topk(choices)

        def call(x=x, w=w, chosen=chosen, share=share, experts=experts) -> torch.Tensor:
            routing = ops.moe_route(chosen, experts, share)
            y = ops.grouped_matmul(ops.moe_dispatch(x, routing), w.mT, routing)
            return ops.moe_combine(y, routing, routing.weights)

        every = everyones(w).flatten(0, 1).float()
        made = torch.stack([x.float() @ expert.t() for expert in every], 1).bfloat16().float()
        want = (made.gather(1, chosen[:, :, None].expand(-1, -1, n)) * share[:, :, None]).sum(1)
        title = f"experts {tokens}x{k}x{n}, {choices} of {experts}"
        runs(title, call, lambda c, want=want, title=title: compare(title, c, want))
        first = call()
        if not all(torch.equal(first, call()) for _ in range(3)):
            raise ValueError(f"{title}: other bits each time")


def check_experts_of_float8(_: slice) -> None:
    tokens, k, n = 700, 512, 256
    x, w = (random(*shape).to(torch.float8_e4m3fn) for shape in ((tokens, k), (2, n, k)))
    scales = torch.rand(tokens, k // 128, device=DEVICE) + 0.5, torch.rand(2, k // 128, n // 128, device=DEVICE) + 0.5
    chosen = torch.randint(0, 2 * SIZE, (tokens, 1), device=DEVICE)

    def call() -> torch.Tensor:
        routing = ops.moe_route(chosen, 2 * SIZE)
        rows, given = ops.moe_dispatch(x, routing, scales[0])
        y = ops.grouped_matmul(rows, w.mT, routing, (given, scales[1]))
        return ops.moe_combine(y, routing)

    wide = w.mT.float() * scales[1].repeat_interleave(128, 1).repeat_interleave(128, 2)
    made = torch.einsum("tk,ekn->ten", x.float() * scales[0].repeat_interleave(128, 1), everyones(wide).flatten(0, 1))
    want = made.gather(1, chosen[:, :, None].expand(-1, -1, n))[:, 0]
    runs("experts of float8", call, lambda c: compare("experts of float8", c, want))


def check_gradients_and_compile(_: slice) -> None:
    x, up, down = random(512, 1024), random(1024, 1024), random(1024, 1024)

    def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return ops.matmul_reduce_scatter(torch.relu(ops.all_gather_matmul(x, up.t())), down.t())

    h = everyones(x).view(-1, 1024).float() @ up.float().t()
    made = ops.all_gather_matmul(x, up.t())
    compare("hidden", made, h)
    # Where the result is nearly zero, the order of its sum decides the side of relu's bend.
    h = torch.where(made > 0, h.abs(), -h.abs())
    want = total(torch.relu(h).bfloat16().float() @ down.float().t()).chunk(SIZE)[RANK]
    for name, call in (("eager", mlp), ("compiled", torch.compile(mlp, fullgraph=True, backend="aot_eager"))):
        leaves = [t.clone().requires_grad_() for t in (x, up, down)]
        out = call(*leaves)
        compare(name, out.detach(), want)
        out.sum().backward()
        ones = torch.ones(SIZE * 512, 1024, device=DEVICE)
        compare(f"{name}, down", leaves[2].grad, ones.t() @ torch.relu(h).bfloat16().float())
        dh = ((ones @ down.float()).bfloat16() * (h > 0)).float()
        compare(f"{name}, up", leaves[1].grad, dh.t() @ everyones(x).view(-1, 1024).float())
        compare(f"{name}, x", leaves[0].grad, total(dh @ up.float()).chunk(SIZE)[RANK])
        say(f"PASS gradients, {name}")


def check_gated(_: slice) -> None:
    for rows in (16, 700):
        a, gate, up = random(rows, 512), random(1024, 512), random(1024, 512)
        whole = everyones(a).view(-1, 512).float()
        want = torch.nn.functional.silu(whole @ gate.float().t()) * (whole @ up.float().t())
        runs(
            f"all_gather_matmul {rows}, gated",
            lambda a=a, w=(gate, up): ops.all_gather_matmul(a, [w[0].t(), w[1].t()], activation="silu", gated=True),
            lambda c, want=want: compare("gated", c, want),
        )


if __name__ == "__main__":
    main({name: function for name, function in globals().items() if name.startswith("check_")})
