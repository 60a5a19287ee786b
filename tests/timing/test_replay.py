# SPDX-License-Identifier: MIT
"""The engine on hand-written steps: sharing, overlap, waits, residency, what the end waited for."""

import pytest

from tilescale.collectives.links import SharedLink
from tilescale.hda.route import Endpoint
from tilescale.timing.record import pipelined
from tilescale.timing.replay import Simulation
from tilescale.timing.sharing import EventQueue, SharedResource
from tilescale.timing.steps import (
    AcquireStep,
    ForkStep,
    LaunchStep,
    PublishStep,
    RecordedTask,
    RendezvousStep,
    UnitResource,
    WorkPart,
    WorkStep,
)

WIRE = SharedLink("wire", Endpoint("device", 0), Endpoint("device", 1))
MEMORY = UnitResource(0, "memory")


def work(seconds: float, resource="tensor", kind="compute", **more) -> WorkStep:
    return WorkStep([WorkPart(str(resource), kind, None, {resource: seconds})], **more)


def simulate(*tasks: RecordedTask, places: int = 1, **values):
    return Simulation("device", "block", places, {"tensor": "compute", "memory": "memory"}, values).run(tasks)


def device(*steps) -> RecordedTask:
    return RecordedTask("device 0", 0, list(steps))


def grid(*programs: list, places: int = 2, each: int = 1, group: int = 1, seconds: float = 0.0) -> LaunchStep:
    tasks = [RecordedTask(f"block {i}", 0, list(steps)) for i, steps in enumerate(programs)]
    return LaunchStep(places, each, group, seconds, "grid", None, tasks=tasks)


# -- sharing -----------------------------------------------------------------------------------------------------------


def test_a_server_shares_itself_evenly():
    """Three users of 1, 2 and 3 seconds: all share until the first has its second, then two, then one."""
    events, ends = EventQueue(), {}
    server = SharedResource(events)
    for seconds in (1.0, 2.0, 3.0):
        server.serve(seconds, lambda s=seconds: ends.setdefault(s, events.now))
    events.run()
    assert ends == {1.0: 3.0, 2.0: 5.0, 3.0: 6.0}
    assert server.busy_s == 6.0


def test_shares_follow_weights():
    """A user with three times the weight of another one gets three quarters, then the other one gets all."""
    events, ends = EventQueue(), {}
    server = SharedResource(events)
    server.serve(3.0, lambda: ends.setdefault("heavy", events.now), weight=3)
    server.serve(3.0, lambda: ends.setdefault("light", events.now))
    events.run()
    assert ends == {"heavy": 4.0, "light": 6.0}


def test_a_late_user_slows_down_those_who_are_there():
    events, ends = EventQueue(), {}
    server = SharedResource(events)
    server.serve(2.0, lambda: ends.setdefault("first", events.now))
    events.at(1.0, lambda: server.serve(2.0, lambda: ends.setdefault("second", events.now)))
    events.run()
    assert ends == {"first": 3.0, "second": 4.0}


def test_work_after_idle_time_starts_from_then():
    events, ends = EventQueue(), []
    server = SharedResource(events)
    for begin in (0.0, 5.0):
        events.at(begin, lambda: server.serve(1.0, lambda: ends.append(events.now)))
    events.run()
    assert ends == [1.0, 6.0]


def test_an_engine_of_a_device_weighs_as_much_as_all_its_programs():
    """Two programs and a copy queue share memory: the queue gets half of it while they need it."""
    replay = Simulation("device", "block", 2, {"memory": "memory"}, {})
    copied = RecordedTask("queue", 0, [work(2.0, MEMORY, "transfer")], engine="copy queue")
    found = replay.run([device(grid([work(2.0, MEMORY)], [work(2.0, MEMORY)]))], [copied])
    ends = {span.engine: span.end_s for span in found.spans if span.name == str(MEMORY)}
    assert ends == {"copy queue": 4.0, "block 0": 6.0, "block 1": 6.0}


# -- steps -------------------------------------------------------------------------------------------------------------


def test_steps_follow_one_another_and_demands_of_one_step_do_not():
    both = WorkStep(
        [WorkPart("copy", "transfer", None, {MEMORY: 3.0}), WorkPart("gemm", "compute", None, {"tensor": 2.0})]
    )
    apart = simulate(device(work(3.0, MEMORY), grid([work(2.0)])))
    together = simulate(device(grid([both])))
    assert (apart.end_s, together.end_s) == (5.0, 3.0)
    compute, transfer = (next(s for s in together.spans if s.kind == kind) for kind in ("compute", "transfer"))
    assert (compute.begin_s, compute.end_s, transfer.end_s) == (0.0, 3.0, 3.0)


def test_a_floor_is_the_least_that_a_step_takes():
    assert simulate(device(work(1.0, MEMORY, floor_s=4.0))).end_s == 4.0
    assert simulate(device(work(5.0, MEMORY, floor_s=4.0))).end_s == 5.0


@pytest.mark.parametrize("ahead, end", [(0, 16.0), (1, 12.0), (3, 12.0)])
def test_works_run_ahead_as_far_as_they_may(ahead, end):
    """Four loads of 3 s, each followed by a GEMM of 1 s: interleaved, or the loads one after another all the time."""
    loads = [work(3.0, "loads", "transfer", ahead=ahead) for _ in range(4)]
    found = simulate(device(grid([step for load in loads for step in (load, work(1.0))])))
    assert found.end_s == end


def test_programs_share_the_unit_that_they_are_on():
    """Four programs of 1 s over two units: two in a row, or two side by side at half speed each."""
    turns, shared = (simulate(device(grid(*[[work(1.0)]] * 4, each=each)), places=2) for each in (1, 2))
    assert turns.end_s == shared.end_s == 2.0
    assert sorted(s.begin_s for s in turns.spans) == [0.0, 0.0, 1.0, 1.0]
    assert [s.begin_s for s in shared.spans] == [0.0] * 4
    assert {s.engine for s in shared.spans} == {"block 0.0", "block 0.1", "block 1.0", "block 1.1"}


def test_a_launch_takes_its_time_and_ends_with_its_last_program():
    found = simulate(device(grid([work(1.0)], [work(3.0)], seconds=0.5), work(1.0, MEMORY)))
    assert found.end_s == 4.5
    assert [(s.kind, s.begin_s, s.end_s) for s in found.critical_path] == [
        ("launch", 0.0, 0.5), ("compute", 0.5, 3.5), ("compute", 3.5, 4.5),
    ]  # fmt: skip


def test_groups_start_when_all_their_places_are_free():
    found = simulate(device(grid(*[[work(float(n))] for n in (1, 2, 1, 1)], places=2, group=2)), places=2)
    assert [s.begin_s for s in found.spans] == [0.0, 0.0, 2.0, 2.0]


def test_thousands_of_programs_that_do_nothing():
    assert simulate(device(grid(*[[]] * 5000, places=3))).end_s == 0.0


# -- waits -------------------------------------------------------------------------------------------------------------


def signal(place="flag", delay=0.0) -> PublishStep:
    return PublishStep(place, lambda value: value + 1, delay)


def wait(target: int, count=10**9, place="flag") -> AcquireStep:
    return AcquireStep(place, count, f"flag >= {target}", None, lambda value: value >= target)


def test_a_wait_ends_when_the_value_has_come_in_simulated_time():
    """The one that signals last in the recorded run signals first here: a wait for one signal is over then."""
    late, early = device(work(5.0, MEMORY), signal()), device(work(1.0, UnitResource(1, "memory")), signal())
    waiter = device(wait(1), work(1.0, UnitResource(2, "third")))
    found = simulate(late, early, waiter, flag=0)
    assert max(s.end_s for s in found.spans if "third" in s.name) == 2.0
    (line,) = found.waits
    assert (line.name, line.seconds, line.count) == ("flag >= 1", 1.0, 1)


def test_a_value_that_passes_by_counts_as_in_the_recorded_run():
    """A flag that is set to 1 and reset before the waiter looks: the recorded wait had ended after one publication."""
    setter = device(PublishStep("flag", lambda _: 1), PublishStep("flag", lambda _: 0))
    waiter = device(work(1.0, MEMORY), AcquireStep("flag", 1, "flag == 1", None, lambda value: value == 1))
    assert simulate(setter, waiter, flag=0).end_s == 1.0


def test_signals_take_time_and_come_after_the_data():
    sender = device(work(1.0, WIRE, "transfer", tail_s=0.5), signal(delay=0.5), work(1.0, MEMORY))
    found = simulate(sender, device(wait(1)), flag=0)
    ends = {s.kind: s.end_s for s in found.spans}
    assert (ends["transfer"], ends["compute"], ends["sync"], ends["wait"]) == (1.0, 2.0, 2.0, 2.0)
    later = simulate(sender, device(wait(1), work(3.0, UnitResource(1, "memory"))), flag=0)
    assert [s.kind for s in later.critical_path] == [
        "transfer", "sync", "compute",
    ]  # fmt: skip


def test_what_runs_ahead_lands_before_it_is_published():
    """A copy of 3 s runs ahead, then an arrival: others see it after 3 s, the task itself goes on at once."""
    sender = device(work(3.0, MEMORY, "transfer", ahead=9), signal(), work(1.0, UnitResource(1, "memory")))
    found = simulate(sender, device(wait(1)), flag=0)
    assert {s.kind: s.end_s for s in found.spans} == {"transfer": 3.0, "compute": 1.0, "wait": 3.0}


def test_waiting_for_what_never_comes_is_an_error():
    with pytest.raises(RuntimeError, match="stopped with 1 tasks that wait"):
        simulate(device(wait(1)), flag=0)


def test_a_rendezvous_begins_with_the_last_and_ends_for_all():
    def rendezvous(rank: int, row: int) -> RendezvousStep:
        def made(rows):
            assert rows == (0, 1)
            return WorkStep([WorkPart("allreduce", "collective", None, {WIRE: 2.0}, nbytes=64)], floor_s=1.0)

        return RendezvousStep("rendezvous", 2, rank, "wait for allreduce", None, made)

    tasks = [
        RecordedTask(f"device {row}", row, [work(1.0 + row, UnitResource(row, "memory")), rendezvous(row, row)])
        for row in (1, 0)
    ]
    found = simulate(*tasks)
    assert found.end_s == 4.0
    collectives = [(s.row, s.begin_s, s.end_s) for s in found.spans if s.kind == "collective"]
    assert collectives == [(0, 2.0, 4.0), (1, 2.0, 4.0)]
    assert [(s.row, s.seconds) for s in found.spans if s.kind == "wait"] == [(0, 1.0)]
    assert [s.kind for s in found.critical_path] == ["compute", "collective"]
    assert found.critical_path[0].row == 1


@pytest.mark.parametrize(("latency", "product", "slowest"), [(8.0, 1.0, "memory"), (1.0, 8.0, "tensor")])
def test_the_critical_path_has_what_a_pipelined_loop_waits_for(latency: float, product: float, slowest: str):
    load = work(0.1, UnitResource(0, "memory"), kind="transfer", floor_s=latency)
    found = simulate(device(grid(pipelined([load, work(product)], 11, 2))))
    assert slowest in found.critical_path[-1].name
    assert found.critical_path[-1].end_s == found.end_s


def test_forks_join_and_share_their_place():
    sides = ForkStep([RecordedTask("left", 0, [work(1.0)]), RecordedTask("right", 0, [work(2.0)])])
    found = simulate(device(grid([sides, work(1.0)])))
    assert found.end_s == 4.0
    assert {s.engine for s in found.spans} == {"block 0/0", "block 0/1", "block 0"}


# -- totals ------------------------------------------------------------------------------------------------------------


def test_uses_bound_and_utilization():
    found = simulate(device(grid(*[[work(1.0)]] * 3, places=4), work(2.0, MEMORY), work(0.5, WIRE)), places=4)
    uses = {use.resource: use for use in found.uses}
    assert (uses["tensor"].busy_s, uses["memory"].busy_s, uses["wire"].busy_s) == (0.75, 2.0, 0.5)
    assert (uses["tensor"].kind, uses["memory"].kind, uses["wire"].kind) == ("compute", "memory", "network")
    assert (found.bound.seconds, found.bound.use.resource) == (2.0, "memory")
    assert found.utilization["memory"] == pytest.approx(2.0 / 3.5)


def test_the_critical_path_goes_without_gaps_to_the_end():
    """A put is charged for its visibility: before a rendezvous, before a launch, and at the end."""
    put = work(1.0, WIRE, "transfer", tail_s=0.5)
    rendezvous = RendezvousStep(
        "rendezvous", 1, 0, "wait for barrier", None, lambda _: work(0.25, UnitResource(0, "links"))
    )
    for steps in [put, rendezvous], [put, grid([work(1.0)])], [grid([put])], [grid([put]), grid([put], seconds=0.5)]:
        found = simulate(device(*steps))
        path = found.critical_path
        assert "writes land" in [span.name for span in path]
        assert [span.begin_s for span in path] == [0.0, *(span.end_s for span in path[:-1])]
        assert path[-1].end_s == found.end_s
