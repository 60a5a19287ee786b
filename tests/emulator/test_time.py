# SPDX-License-Identifier: MIT
"""The clock against arithmetic: times follow from the machine description, and from what may overlap."""

import pytest

import tilescale
import tilescale.language as T
from tests.emulator.timing import H200, LAUNCH, copied, derived, product, seconds
from tilescale.hda import Machine
from tilescale.hda.load import derive

# -- memory and arithmetic ---------------------------------------------------------------------------------------------


def test_a_copy_reaches_the_bandwidth_of_the_memory():
    rows = 1 << 13
    wanted = 2 * rows * 4096 * 4 / H200.layer("l2").sustained
    assert seconds(copied(rows)) - LAUNCH == pytest.approx(wanted, rel=0.03)


def test_what_fits_the_cache_is_read_from_it():
    """The second launch finds what the first has read, if that is small."""

    def twice(rows: int):
        @T.prim_func
        def program(X: T.Tensor((rows, 4096), "float32"), Y: T.Tensor((rows,), "float32")):
            with T.Kernel(device=1, block=rows, threads=128) as bx:
                tile = T.alloc((1, 4096), "float32", level="l0")
                total = T.alloc((1,), "float32", level="l0")
                for _ in T.serial(2):
                    with T.Scale("device"):
                        T.barrier()
                    with T.Scale("block"):
                        T.copy(X[bx, 0], tile)
                        T.reduce_sum(tile, total, dim=1)
                        T.copy(total, Y[bx])

        return program

    def read(rows: int) -> float:
        found = tilescale.emulate(twice(rows), machine=H200, data=False).timeline
        return sum(use.busy_s for use in found.uses if use.resource == "l2") * H200.layer("l2").sustained

    small, large = 1024, 4096
    assert read(small) == pytest.approx(small * 4096 * 4, rel=0.01)
    assert read(large) == pytest.approx(2 * large * 4096 * 4, rel=0.01)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float32"])
def test_a_product_reaches_the_rate_of_its_unit(dtype):
    """132 tiles, one for each SM; float32 is multiplied in tfloat32."""
    m, n, k = 11 * 128, 12 * 256, 1 << 16
    rate = H200.rate("device", "tensor", {"float32": "tfloat32"}.get(dtype, dtype), sustained=True)
    found = seconds(product(m, n, k, 4, dtype, depth=64 if dtype.startswith("float8") else 32))
    assert found == pytest.approx(2 * m * n * k / rate, rel=0.05)
    assert found > 2 * m * n * k / rate


def test_without_a_pipeline_loads_and_products_take_turns():
    m, n, k = 11 * 128, 12 * 256, 1 << 14
    plain, deep = (tilescale.emulate(product(m, n, k, s), machine=H200, data=False).timeline for s in (0, 4))
    steps = k // 32
    memory = H200.layer("l2")
    loads = 2 * memory.latency + (128 + 256) * 32 * 2 / memory.per_program
    multiply = 2 * 128 * 256 * 32 / H200.rate("block", "tensor", "float16", sustained=True)
    assert deep.end_s == pytest.approx(steps * multiply, rel=0.1)
    assert plain.end_s == pytest.approx(steps * (loads + multiply), rel=0.1)
    assert plain.bound.seconds == pytest.approx(deep.bound.seconds)


def sums(count: int, columns: int, loop, gathers: bool = False):
    """Each program adds `count` rows of a tensor, in order or as another tensor says."""

    @T.prim_func
    def program(
        X: T.Tensor((count, columns), "float32"), at: T.Tensor((count,), "int32"), Y: T.Tensor((columns,), "float32")
    ):
        with T.Kernel(1, threads=128):
            total = T.alloc((columns,), "float32", level="l0")
            T.clear(total)
            for row in loop(count):
                for j in T.Parallel(columns):
                    if gathers:
                        total[j] += X[at[row], j]
                    else:
                        total[j] += X[row, j]
            T.copy(total, Y)

    return program


def test_loads_of_an_unrolled_loop_are_in_flight_together():
    """As many as registers hold: 128 threads have 255 registers each, and 64 rows of 1024 numbers need 512."""
    latency, rate = H200.layer("l2").latency, H200.layer("l2").per_program
    few, many, turns = (
        seconds(sums(*size)) for size in ((32, 128, T.unroll), (64, 1024, T.unroll), (32, 128, T.serial))
    )
    once = seconds(sums(1, 128, T.unroll))
    assert few - once == pytest.approx(31 * 128 * 4 / rate, rel=0.2)
    assert turns - few == pytest.approx(31 * latency, rel=0.01)
    whole = 64 * 1024 * 4 / rate
    assert many - LAUNCH - whole == pytest.approx(3 * latency, rel=0.2)


def test_a_gather_in_an_unrolled_loop_waits_for_each_index():
    assert seconds(sums(32, 128, T.unroll, gathers=True)) == seconds(sums(32, 128, T.serial, gathers=True))


def test_programs_that_do_not_fit_at_once_run_in_turn():
    """Tiles of 120 KiB: one program an SM. 264 of them take twice the time of 132, 133 as long as 264."""

    def program(count: int):
        @T.prim_func
        def kernel(C: T.Tensor((count, 128), "float16")):
            with T.Kernel(count, threads=128) as bx:
                a = T.alloc_shared((128, 240), "float16")
                b = T.alloc_shared((240, 128), "float16")
                c = T.alloc_fragment((128, 128), "float32")
                for _ in T.serial(1000):
                    T.gemm(a, b, c)
                T.copy(c[0, 0:128], C[bx, 0:128])

        return kernel

    one, more, two = (seconds(program(n)) - LAUNCH for n in (132, 133, 264))
    assert two == pytest.approx(2 * one, rel=0.01) and more == pytest.approx(two, rel=0.01)


@pytest.mark.parametrize("layout, together", [(T.FullRow, 4), (T.Replica, 2)])
def test_a_replica_for_each_warpgroup_takes_registers_of_its_own(layout, together):
    """64 KiB of sums in registers of 256 KiB: shared out over two warpgroups, or one tile for each."""

    @T.prim_func
    def kernel(X: T.Tensor((128, 128), "float16")):
        with T.Kernel(132 * 8, threads=256):
            c = T.alloc_fragment((128, 128), "float32")
            with T.Scale("warpgroup"):
                T.clear(T.view(c, layout=layout))

    spans = tilescale.emulate(kernel, machine=H200, data=False).timeline.spans
    assert {span.engine.partition("/")[0] for span in spans if "block 7." in span.engine} == {
        f"block 7.{turn}" for turn in range(together)
    }


def test_a_launch_and_a_barrier_take_what_the_machine_says(tmp_path):
    @T.prim_func
    def empty(X: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=128):
            T.evaluate(0)

    slow = derived(tmp_path, "levels:\n  device:\n    launch: 5 us\n")
    assert seconds(empty) == LAUNCH
    assert seconds(empty, machine=slow) == 5e-6


# -- networks ----------------------------------------------------------------------------------------------------------


def allreduce(devices: int, nbytes: int, impl: str):
    @T.prim_func
    def program(X: T.Tensor((nbytes // 4,), "float32")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                T.allreduce(X, impl=impl)

    return program


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_ring_allreduce_approaches_what_each_link_must_carry(devices):
    nbytes = 1 << 30
    carrier = max(m.put for m in H200.network("device").mechanisms if m.started_by == "program")
    wanted = 2 * (devices - 1) / devices * nbytes / carrier
    assert seconds(allreduce(devices, nbytes, "ring")) == pytest.approx(wanted, rel=0.02)
    # Small ones take latencies.
    assert seconds(allreduce(devices, 1024, "ring")) > 2 * (devices - 1) * H200.network("device").latency


def shifted(devices: int, columns: int):
    """Every program of every device puts a tile to the next device."""

    @T.prim_func
    def program(X: T.Tensor((132 * 64, columns), "float32"), Y: T.Tensor((132 * 64, columns), "float32")):
        with T.Kernel(device=devices, block=132, threads=256) as bx:
            with T.Scale("block"):
                tile = T.alloc((64, columns), "float32", level="l1")
                T.copy(X[bx * 64, 0], tile)
                with T.Scale("device") as (rank, size):
                    for _ in T.serial(32):
                        T.copy(tile, Y[bx * 64, 0], dst=(rank + 1) % size)

    return program


HALF = """
networks:
  nvlink:
    bandwidth: 225 GB/s
    mechanisms:
      tma: {put: 180 GB/s, get: 165 GB/s, reduce: 160 GB/s}
      lsu: {put: 184 GB/s, get: 165 GB/s, reduce: 90 GB/s}
      copy_engine: {put: 197 GB/s, get: 197 GB/s}
      nvshmem: {put: 73 %, get: 73 %}
"""


def test_half_the_link_takes_twice_the_time(tmp_path):
    half = derived(tmp_path, HALF)
    nbytes = 32 * 132 * 64 * 512 * 4
    full, slow = seconds(shifted(4, 512)), seconds(shifted(4, 512), machine=half)
    assert full == pytest.approx(nbytes / 360e9, rel=0.03)
    assert slow == pytest.approx(2 * full, rel=0.03)


def slower_links(name: str, share: float) -> Machine:
    """A machine with a share of the network bandwidth, for any mechanism."""
    machine = Machine.load(name)
    rate = lambda value: f"{value * share / 1e9} GB/s"  # noqa: E731
    networks = {
        network.name: {
            **{key: rate(getattr(network, key)) for key in ("bandwidth", "link_bandwidth") if getattr(network, key)},
            "mechanisms": {
                m.name: {way: rate(m.rate(way)) for way in ("put", "get", "reduce") if m.rate(way)}
                for m in network.mechanisms
            },
        }
        for network in machine.networks
    }
    return derive(name, f"{name} at {share}", {"networks": networks})


@pytest.mark.parametrize("name, devices", [("gb200-nvl72", 72), ("h200-sxm-8x4", 32), ("mi300x-8", 8)])
def test_half_of_every_link_takes_twice_the_time_on_any_machine(name, devices):
    """Whole tensors to the device half way round: across servers where there are some."""

    def time_at(share: float) -> float:
        machine = slower_links(name, share)
        with tilescale.use_machine(machine):

            @T.prim_func
            def program(X: T.Tensor((1 << 26,), "float32"), Y: T.Tensor((1 << 26,), "float32")):
                with T.Kernel(device=devices):
                    with T.Scale("device") as (rank, size):
                        T.copy(X, Y, dst=(rank + size // 2) % size)

        found = tilescale.emulate(program, machine=machine, data=False).timeline
        assert found.bound.use.kind == "network" and 0.99 < found.bound.seconds / found.end_s <= 1
        return found.end_s

    assert time_at(0.5) == pytest.approx(2 * time_at(1.0), rel=0.01)


@pytest.mark.parametrize("senders", [3, 7])
def test_who_sends_to_one_device_shares_its_link(senders):
    def program(senders: int):
        @T.prim_func
        def gather(X: T.Tensor((1 << 24,), "float32"), Y: T.Tensor((8, 1 << 24), "float32")):
            with T.Kernel(device=8):
                with T.Scale("device") as (rank, _):
                    if (rank > 0) & (rank <= senders):
                        T.copy(X, Y[rank, 0 : 1 << 24], dst=0)

        return gather

    assert seconds(program(senders)) == pytest.approx(senders * seconds(program(1)), rel=0.02)


@pytest.mark.parametrize("distance", [2, 4])
def test_shifts_on_a_wafer_share_the_links_of_their_row(distance):
    """Eight cores a row: as many of the messages that go so far cross the links in its middle."""
    wafer = Machine.load("wafer-mesh")

    def shift(distance: int) -> float:
        with tilescale.use_machine(wafer):

            @T.prim_func
            def program(X: T.Tensor((2048,), "float32"), Y: T.Tensor((2048,), "float32")):
                with T.Kernel(core=(8, 8), threads=1) as (x, _):
                    with T.Scale("core") as (rank, _):
                        if x + distance < 8:
                            T.copy(X, Y, dst=rank + distance)

        return seconds(program, machine=wafer)

    assert shift(distance) == pytest.approx(distance * shift(1), rel=0.01)


def test_one_program_alone_does_not_fill_a_link():
    @T.prim_func
    def program(X: T.Tensor((64, 512), "float32"), Y: T.Tensor((64, 512), "float32")):
        with T.Kernel(device=2, block=1, threads=256):
            with T.Scale("block"):
                tile = T.alloc((64, 512), "float32", level="l1")
                with T.Scale("device") as (rank, size):
                    for _ in T.serial(64):
                        T.copy(tile, Y, dst=(rank + 1) % size)

    network = H200.network("device")
    assert seconds(program) > 64 * 64 * 512 * 4 / network.mechanism("tma").per_program
    assert seconds(program) > 5 * 64 * 64 * 512 * 4 / network.bandwidth


LINE = """
title: four cores in a line
levels:
  lane: {kind: thread_group, threads: 1}
  core: {kind: program, count: 4, virtual: false, clock: 1 GHz, compute: {vector: {rates: {float32: 2 op/clock}}}}
  chip: {kind: unit, count: 1}
memory:
  l0: {level: core, scopes: [fragment, shared, global], capacity: 16 MiB, shared: true, bandwidth: 64 B/clock}
networks:
  mesh:
    level: core
    within: chip
    topology: mesh
    dims: [1, 4]
    bandwidth: 4 B/clock
    link_bandwidth: 4 B/clock
    latency: 1 clock
    reaches: l0
    mechanisms: {wavelet: {put: 100 %, get: 100 %}}
"""


def test_routes_that_share_a_link_contend(tmp_path):
    """On a line 0 - 1 - 2 - 3: 0 to 2 and 1 to 3 both cross the link from 1 to 2, 0 to 1 and 2 to 3 share none."""
    path = tmp_path / "line.yaml"
    path.write_text(LINE)
    line = Machine.load(path)

    def exchange(distance: int, senders: tuple[int, int]):
        with tilescale.use_machine(line):

            @T.prim_func
            def program(X: T.Tensor((1024, 64), "float32"), Y: T.Tensor((1024, 64), "float32")):
                with T.Kernel(core=4, threads=1) as _:
                    with T.Scale("core") as (rank, _):
                        if (rank == senders[0]) | (rank == senders[1]):
                            T.copy(X, Y, dst=rank + distance)

        return program

    alone = 1024 * 64 * 4 / 4e9
    assert seconds(exchange(1, (0, 2)), machine=line) == pytest.approx(alone, rel=0.01)
    assert seconds(exchange(2, (0, 1)), machine=line) == pytest.approx(2 * alone, rel=0.01)


# -- large machines ----------------------------------------------------------------------------------------------------


def test_a_thousand_devices_without_data(tmp_path):
    many = derived(tmp_path, "levels:\n  node:\n    count: 128\n", base="h200-sxm-8x4")

    def program(impl: str):
        with tilescale.use_machine(many):

            @T.prim_func
            def total(X: T.Tensor((1 << 20,), "float32")):
                with T.Kernel(device=1024):
                    with T.Scale("device"):
                        T.allreduce(X, impl=impl)

        return total

    times = {impl: seconds(program(impl), machine=many) for impl in ("ring", "tree", "two_shot")}
    # 2046 steps, each a latency of the network between servers; a tree takes tens of them.
    assert times["ring"] > 2046 * many.network("node").latency > 10 * times["tree"]


def test_a_large_product_takes_what_its_tiles_say():
    """8192 x 3584 x 8192, one device's share of a layer: 896 tiles over 132 SMs, 7 rounds."""
    m, n, k = 8192, 3584, 8192
    tiles = (m // 128) * (n // 256)
    rounds = -(-tiles // 132)
    multiply = 2 * 128 * 256 * k / H200.rate("block", "tensor", "bfloat16", sustained=True)
    assert seconds(product(m, n, k, 3, "bfloat16")) == pytest.approx(rounds * multiply, rel=0.06)


@pytest.mark.parametrize("to_peer", [True, False])
def test_converted_elements_travel_in_the_type_of_the_peer(to_peer: bool):
    def sent(near: str) -> int:
        @T.prim_func
        def program(X: T.Tensor((128, 128), near), Y: T.Tensor((128, 128), "bfloat16")):
            with T.Kernel(device=2, block=1, threads=128):
                tile = T.alloc_fragment((128, 128), near)
                with T.Scale("block"):
                    T.copy(X, tile)
                    with T.Scale("device") as (rank, _):
                        if to_peer:
                            T.copy(tile, Y, dst=1 - rank)
                        else:
                            T.copy(Y, tile, src=1 - rank)
                    T.copy(tile, X)

        spans = tilescale.emulate(program, data=False).timeline.spans
        return sum(span.nbytes for span in spans if span.name in ("put", "get"))

    assert sent("float32") == sent("bfloat16") == 2 * 128 * 128 * 2
