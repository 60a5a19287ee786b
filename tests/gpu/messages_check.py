# SPDX-License-Identifier: MIT
"""Messages between GPUs: `torchrun --nproc-per-node 2 tests/gpu/messages_check.py [name or name:number ... or 1/4]`.

As ops_check.py, of operators that send from rank to rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.ops_support import main, poison, random, runs, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, everyones  # noqa: E402
from tests.ops.float8_bounds import bound_of_gather, bound_of_sum  # noqa: E402
from tilescale import ops  # noqa: E402
from tilescale.program.wire import line_floats  # noqa: E402


def check_scatter_and_gather(only: slice) -> None:
    for shape, dim in [((3 * SIZE,), 0), ((1000, 33 * SIZE), 1), ((4096, 2048), 0)][only]:
        for root in range(SIZE):
            x = random(*shape)
            every = everyones(x)
            part, joined = every[root].chunk(SIZE, dim)[RANK], torch.cat(list(every), dim)
            whole = joined if RANK == root else joined.narrow(dim, 0, 0)
            for name, want in ("scatter", part), ("gather", whole):
                runs(
                    f"{name} {shape} along {dim}, root {root}",
                    lambda x=x, root=root, dim=dim, name=name: getattr(ops, name)(x, root, dim),
                    lambda c, want=want: torch.testing.assert_close(c, want, rtol=0, atol=0),
                )


def check_batches(only: slice) -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for shape in [(3,), (1000, 33), (4096, 2048)][only]:
        x, small = random(*shape), random(7).float()
        wanted = [everyones(small)[after], everyones(x)[before], x, everyones(x)[before]]
        kinds = [small, x, x, x]
        sources = [after, before, RANK, before]

        def call(x=x, small=small, kinds=kinds, sources=sources) -> list[torch.Tensor]:
            # In the receiver's order where both neighbours are one rank.
            sends = [ops.Send(small, before), ops.Send(x, after), ops.Send(x, RANK), ops.Send(x, after)]
            return ops.batch_send_recv([*map(ops.Recv, kinds, sources), *sends])

        def check(came: list[torch.Tensor], wanted=wanted) -> None:
            for got, want in zip(came, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)

        runs(f"batch_send_recv {shape}", call, check)
        every = everyones(x)
        for turn in range(20):  # two ranks alone, a team of their own
            poison()
            if RANK == turn % SIZE:
                ops.send(x, after)
            elif before == turn % SIZE:
                torch.testing.assert_close(ops.recv(x, before), every[before], rtol=0, atol=0)
        say(f"PASS send and recv {shape}")


def check_halo_exchange(only: slice) -> None:
    for shape, dim, width in [((3, 5), 0, 1), ((1000, 33), 1, 2), ((4096, 2048), 0, 128)][only]:
        x = random(*shape)
        line = torch.cat(list(everyones(x)), dim)
        ends = line.narrow(dim, line.shape[dim] - width, width), line.narrow(dim, 0, width)
        for periodic in (False, True):
            before, after = ends if periodic else map(torch.zeros_like, ends)
            want = torch.cat([before, line, after], dim).narrow(dim, RANK * shape[dim], shape[dim] + 2 * width)
            inside = torch.zeros_like(want)

            def call(x=x, width=width, dim=dim, periodic=periodic) -> torch.Tensor:
                return ops.halo_exchange(x, width, dim, periodic=periodic)

            def filled(x=x, width=width, dim=dim, periodic=periodic, inside=inside) -> torch.Tensor:
                inside.zero_().narrow(dim, width, x.shape[dim]).copy_(x)
                return ops.halo_exchange(inside, width, dim, periodic=periodic, in_place=True)

            for name, made in ("", call), (", in place", filled):
                title = f"halo_exchange {shape} along {dim}, {'' if periodic else 'not '}periodic{name}"
                runs(title, made, lambda c, want=want: torch.testing.assert_close(c, want, rtol=0, atol=0))


def check_gathers_of_sizes_on_the_device(only: slice) -> None:
    """A graph gathers other numbers of rows each time it is replayed."""
    for shape in [(3,), (1000, 33), (4096, 2048)][only]:
        x, rows = random(*shape), torch.zeros(1, dtype=torch.int32, device=DEVICE)
        every, most = everyones(x), shape[0]
        ops.all_gather_v(x, rows, most=most)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got, came = ops.all_gather_v(x, rows, most=most)
        for turn in range(4):
            counts = [(most * turn // 3 + rank) % (most + 1) for rank in range(SIZE)]
            rows.fill_(counts[RANK])
            want = torch.cat([part[:n] for part, n in zip(every, counts, strict=True)])
            for made, numbers in (ops.all_gather_v(x, rows, most=most), (got, came)):
                poison()
                if made is got:
                    graph.replay()
                torch.testing.assert_close(made[: len(want)], want, rtol=0, atol=0)
                if numbers.tolist() != counts or bool(made[len(want) :].any()):
                    raise ValueError(f"{numbers.tolist()} rows came, {counts} were sent; rows behind are to be zeros")
        say(f"PASS all_gather_v {shape}, sizes on the device")


def check_float8_wire(only: slice) -> None:
    """Numbers of all magnitudes, sizes with and without tails; groups with no number, the same bits on all ranks."""
    for elements, dtype in [(5, torch.bfloat16), (120 * 77 + 3, torch.float16), (1 << 22, torch.bfloat16),
                            (120 * 100003, torch.float32), (3 << 24, torch.bfloat16)][only]:  # fmt: skip
        x = random(SIZE * elements, dtype=torch.float32)
        x = (x * 2.0 ** torch.randint(-12, 8, x.shape, device=x.device)).to(dtype)
        every = everyones(x).double()

        def bounded(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> None:
            wrong = ~((got.double() - want).abs() <= bound)
            if bool(wrong.any()):
                raise ValueError(
                    f"{int(wrong.sum())} of {wrong.numel()} beyond the bound, {int(got.isnan().sum())} NaN"
                )

        mine, total = x[:elements], every.sum(0)
        gathered, part = every[:, :elements].flatten(), total.chunk(SIZE)[RANK]
        bound = bound_of_gather(lines(every[:, :elements])).flatten(-2)[:, :elements].flatten()
        runs(
            f"all_gather of {elements} {dtype} as float8",
            lambda mine=mine: ops.all_gather(mine, wire="float8_e4m3fn"),
            lambda c, want=gathered, bound=bound: bounded(c, want, bound),
        )
        parts = lines(every.unflatten(1, (SIZE, elements)))
        bound = bound_of_sum(parts, dtype, again=False).flatten(-2)[:, :elements]
        runs(
            f"reduce_scatter of {elements} {dtype} as float8",
            lambda x=x: ops.reduce_scatter(x, wire="float8_e4m3fn"),
            lambda c, want=part, bound=bound[RANK]: bounded(c, want, bound),
        )
        parts = every.split(summed_part(x), 1)
        bounds = [bound_of_sum(lines(part), dtype, again=True).flatten()[: part.shape[1]] for part in parts]
        bound = torch.cat(bounds)

        def summed(c: torch.Tensor, want: torch.Tensor = total, bound: torch.Tensor = bound) -> None:
            bounded(c, want, bound)
            bits = everyones(c)
            if not all(torch.equal(bits[0], other) for other in bits[1:]):
                raise ValueError("ranks have different bits")

        runs(f"all_reduce of {len(x)} {dtype} as float8", lambda x=x: ops.all_reduce(x, wire="float8_e4m3fn"), summed)
    x = torch.ones(1000, device=DEVICE, dtype=torch.bfloat16)
    x[[130, 700]] = torch.tensor([torch.inf, torch.nan], device=DEVICE, dtype=x.dtype)
    made = ops.all_reduce(x, wire="float8_e4m3fn")
    lost = torch.zeros(1000, dtype=torch.bool, device=DEVICE)
    for number, part in enumerate(lost.split(summed_part(x))):
        for place in (130 - number * summed_part(x), 700 - number * summed_part(x)):
            if 0 <= place < len(part):
                part[place // LINE * LINE :][:LINE] = True
    if not torch.equal(made.isnan(), lost) or not bool((made[~lost] == SIZE).all()):
        raise ValueError(f"{int(made.isnan().sum())} NaN, {int(lost.sum())} were to be")
    say("PASS lines without a number")


LINE = line_floats()


def lines(parts: torch.Tensor) -> torch.Tensor:
    """The numbers of parts by the line in which they are sent, with zeros behind."""
    return torch.nn.functional.pad(parts, (0, -parts.shape[-1] % LINE)).unflatten(-1, (-1, LINE))


def summed_part(x: torch.Tensor) -> int:
    """Elements that a rank sums."""
    units = -(-x.nbytes // 16)
    return -(-units // SIZE) * 16 // x.itemsize


if __name__ == "__main__":
    main({name: function for name, function in globals().items() if name.startswith("check_")})
