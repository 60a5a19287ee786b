# SPDX-License-Identifier: MIT
"""Teams and sessions, with one thread per rank: order of calls, errors on all ranks, bounds on every wait."""

from __future__ import annotations

import concurrent.futures
import time

import pytest
import torch

from tilescale.comm import Team, World, session
from tilescale.comm.call import CollectiveCall
from tilescale.comm.refusal import notifies, refuse
from tilescale.comm.session import Session
from tilescale.comm.store_client import StoreClient
from tilescale.comm.transport import Transport
from tilescale.comm.trust.key import JobKey
from tilescale.errors import RankFailedError, RankMismatchError, UsageError, WaitTimeoutError
from tilescale.settings import Settings


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("stays at home")


def test_collectives_give_every_rank_its_part(run_ranks) -> None:
    def work(team: Team):
        rank = team.rank
        return (
            team.gather(rank, root=1),
            team.scatter([10, 11, 12] if rank == 2 else None, root=2),
            team.broadcast(rank, root=1),
            team.all_gather(rank),
            team.run_at_root(rank, lambda parts: [sum(parts)] * 3, root=1),
        )

    assert run_ranks(3, work) == [([0, 1, 2] if r == 1 else None, 10 + r, 1, [0, 1, 2], 3) for r in range(3)]


def test_nothing_stays_in_the_store(run_ranks) -> None:
    def work(team: Team):
        for _ in range(5):
            team.all_gather(b"x" * (9 << 20))
            team.run_at_root(b"x" * (9 << 20), list)
        team.barrier()
        team.barrier()
        return team._session.transport.client.store.num_keys()

    assert max(run_ranks(2, work)) <= 5  # the last calls, and where each rank is


@pytest.mark.parametrize("error", [KeyError("k"), Unpicklable("text survives")])
def test_error_of_fn_on_every_rank(run_ranks, error: Exception) -> None:
    def fail(_parts):
        raise error

    outcomes = run_ranks(2, lambda team: team.run_at_root(0, fail, root=1))
    assert outcomes[1] is error
    assert str(error) in str(outcomes[0]) and "rank 1" in outcomes[0].__notes__[0]
    assert type(outcomes[0]) is (KeyError if isinstance(error, KeyError) else RankFailedError)


@pytest.mark.parametrize(
    "other",
    [
        lambda team: team.gather(0, root=0),
        lambda team: team.broadcast(0, root=1),
        lambda team: Team(ranks=(1, 0), rank=0, _session=team._session).broadcast(0, root=0),
    ],
    ids=["operation", "root", "team"],
)
def test_mismatch_names_both_places(run_ranks, other) -> None:
    outcomes = run_ranks(2, lambda team: (other if team.rank else lambda team: team.broadcast(0, root=0))(team))
    for error in outcomes:
        assert isinstance(error, RankMismatchError)
        assert len({place.line for place in error.where}) == 2
        assert all(place.file == __file__ for place in error.where)


@pytest.mark.parametrize("stays", [False, True])
def test_a_rank_that_has_done_its_part_may_go_on(run_ranks, monkeypatch, stays: bool) -> None:
    """Rank 1 is seen in its next call; it is elsewhere only if its contribution here is still missing."""
    monkeypatch.setattr(session, "_SLOW_S", -1.0)
    monkeypatch.setattr(session, "_BRIEF_S", 0.0)
    looks = iter([[1, 2]])
    answers = iter([None] * 6 + ["all"])

    def work(team: Team):
        one = team._session
        monkeypatch.setattr(
            one, "_last_call", lambda rank: ((0, 1, 2), 7, CollectiveCall.here("barrier")) if rank == 1 else None
        )
        missing = (lambda: [1, 2]) if stays else (lambda: next(looks, [2]))
        return one.wait(lambda: next(answers), missing, CollectiveCall.here("gather", 0), (0, 1, 2))

    (outcome,) = run_ranks(1, work)
    assert isinstance(outcome, RankMismatchError) if stays else outcome == "all"


def elsewhere(call):
    """Result or error of a call, in a separate thread."""
    with concurrent.futures.ThreadPoolExecutor(thread_name_prefix="other") as pool:
        made = pool.submit(call)
        return made.exception() or made.result()


def test_calls_come_from_any_thread_one_at_a_time(run_ranks) -> None:
    """Of two threads that call at the same time each rank would see another order."""

    def work(team: Team):
        team.barrier()
        first, second = elsewhere(lambda: team.all_gather(team.rank)), team.all_gather(team.rank)
        with team.one_call:
            team.barrier()
            error = elsewhere(team.barrier)
        return first, second, error, elsewhere(lambda: team.all_gather(team.rank))

    for first, second, error, third in run_ranks(2, work):
        assert first == second == third == [0, 1]
        assert isinstance(error, UsageError) and "in thread 'other" in error.message and "at a time" in error.hint


def test_a_backward_pass_may_call(run_ranks) -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, team):
            ctx.team = team
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return sum(ctx.team.all_gather(gradient)), None

    def work(team: Team):
        team.barrier()
        x = torch.ones(3, requires_grad=True)
        y = Sum.apply(x, team).sum() * (team.rank + 1)
        with concurrent.futures.ThreadPoolExecutor() as pool:  # stands for the engine's thread of a GPU
            pool.submit(y.backward).result()
        return x.grad.tolist()

    assert run_ranks(2, work) == [[3.0] * 3] * 2


def test_timeout_says_who_and_where(run_ranks) -> None:
    def work(team: Team):
        team.all_gather(0)
        if team.rank == 0:
            team.barrier()

    error = run_ranks(2, work, timeout_s=1.0)[0]
    assert isinstance(error, RankFailedError)
    assert "no sign of rank 1 in barrier() for 1 s" in str(error)
    assert "rank 1 was last seen in all_gather()" in str(error)


def test_failure_reaches_waiting_ranks_quickly(run_ranks) -> None:
    def work(team: Team):
        if team.rank == 1:
            time.sleep(0.1)
            team._session.failure_log.failed(1, "rank 1 failed: boom")
            return None
        start = time.monotonic()
        with pytest.raises(RankFailedError, match="rank 1 failed: boom"):
            team.barrier()
        return time.monotonic() - start

    assert max(filter(None, run_ranks(3, work))) < 2


def test_a_rank_that_left_is_blamed_by_all(run_ranks) -> None:
    def work(team: Team):
        if team.rank == 1:
            team._session.failure_log.left(1)
        elif team.rank == 0:
            team.barrier()
        else:
            time.sleep(0.2)
            team.barrier()

    outcomes = run_ranks(3, work)
    assert all("rank 1 ended before it came to barrier()" in str(outcomes[r]) for r in (0, 2))


def test_a_result_that_arrived_counts_though_its_sender_left(run_ranks) -> None:
    def work(team: Team):
        value = team.broadcast("early" if team.rank == 0 else None)
        team._session.failure_log.left(team.rank)
        return value

    assert run_ranks(2, work) == ["early", "early"]


def refuses(team: Team, refused, rank: int = 1):
    """Result of a call in which one rank fails, the time of the rank, and the result of the next call."""
    start, error = time.monotonic(), None
    try:
        refused(team) if team.rank == rank else team.all_gather(0)
    except (Exception, KeyboardInterrupt) as found:
        error = found
    return error, time.monotonic() - start, team.all_gather(team.rank)


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        (lambda team: team.all_gather(lambda: 0), "Error"),  # which cannot be pickled
        (lambda team: team.scatter([1], root=1), "UsageError: scatter from 1 objects to 3 ranks"),
        (lambda team: team.broadcast(0, root=7), "UsageError: root 7 of a team of 3 ranks"),
    ],
    ids=["object", "number", "root"],
)
def test_a_rank_that_fails_in_a_call_tells_the_others(run_ranks, refused, kind: str) -> None:
    """Their call raises its error, with both lines; the next call is one call for all."""
    outcomes = run_ranks(3, lambda team: refuses(team, refused), timeout_s=60.0)
    assert not isinstance(outcomes[1][0], RankMismatchError)
    assert all(taken < 2 and after == [0, 1, 2] for _, taken, after in outcomes)
    for error in (outcomes[0][0], outcomes[2][0]):
        assert isinstance(error, RankMismatchError)
        assert "rank 1 does not take part in all_gather()" in error.message and kind in error.message
        assert [place.file for place in error.where] == [__file__] * 2


def test_what_leaves_a_call_on_all_ranks_is_no_failure(run_ranks) -> None:
    """PyTorch's activation checkpointing ends the recomputation of a layer by an exception."""
    from torch.utils.checkpoint import checkpoint

    def work(team: Team):
        told = []
        team._session.refuse = lambda *given: told.append(given)

        @notifies(lambda x: team)
        def layer(x):
            return (x * 2).sin()

        x = torch.ones(3, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        return told

    assert run_ranks(2, work) == [[], []]


def test_errors_that_all_ranks_raise_by_themselves_are_not_told(run_ranks) -> None:
    """A wait on a device that failed, or a failure that ranks have already reported: once each."""

    def work(team: Team):
        told = []
        team._session.refuse = lambda ranks, call: told.append(call.refusal)

        @notifies(lambda error: team)
        def fails(error):
            raise error

        mine = ValueError("mine")
        for error in (WaitTimeoutError("a flag"), RankFailedError("rank 1"), mine, mine):
            with pytest.raises(type(error)):
                fails(error)
        return told

    assert run_ranks(2, work) == [["ValueError: mine"]] * 2


def test_telling_takes_two_seconds_at_most(run_ranks) -> None:
    """Context in which calls may take longer; otherwise the bound holds, also afterwards."""

    def work(team: Team):
        client, seen = team._session.transport.client, []
        team._session.refuse = lambda ranks, call: seen.append(client.limit_s)
        for limit_s in (600.0, 0.5):
            client.limit_s = limit_s
            refuse(team, "a call", ValueError("mine"))
            seen.append(client.limit_s)
        return seen

    assert run_ranks(2, work) == [[2.0, 600.0, 0.5, 0.5]] * 2


def test_a_rank_that_has_left_calls_nothing(run_ranks) -> None:
    """As a function of atexit does that was registered before the job was joined."""

    def work(team: Team):
        team.barrier()
        team._session.has_left = True
        team.barrier()

    for error in run_ranks(2, work):
        assert isinstance(error, UsageError) and "calls barrier() after it has left the job" in error.message


def test_calls_that_all_ranks_refuse_are_one_call(run_ranks) -> None:
    """Also where each rank refuses another number of them between two that they make."""

    def work(team: Team):
        for _ in range(3):
            with pytest.raises((TypeError, AttributeError, RankMismatchError)):
                team.all_gather(lambda: 0)
        return team.all_gather(team.rank), team._session.transport.client.store.num_keys()

    for gathered, keys in run_ranks(3, work):
        assert gathered == [0, 1, 2] and keys <= 20


def test_nobody_waits_for_a_rank_that_was_interrupted(run_ranks, monkeypatch) -> None:
    """It has come to the call, and then leaves it: Ctrl-C, which the script catches."""

    def interrupted(team: Team):
        with monkeypatch.context() as patch:
            patch.setattr(team._session, "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            team.run_at_root(0, list, root=1)

    def work(team: Team):
        if team.rank != 1:
            with pytest.raises(RankMismatchError, match="rank 1 does not take part in run_at_root.*KeyboardInterrupt"):
                team.run_at_root(0, list, root=1)
        else:
            with pytest.raises(KeyboardInterrupt):
                interrupted(team)
        return team.all_gather(team.rank)

    assert run_ranks(3, work, timeout_s=60.0) == [[0, 1, 2]] * 3


def test_small_objects_travel_with_the_call(run_ranks) -> None:
    def work(team: Team):
        sent, transport = [], team._session.transport
        put, transport.put = transport.put, lambda name, parts: [sent.append(name), put(name, parts)]
        gathered = [team.all_gather(team.rank), [len(x) for x in team.all_gather(bytes(4096 * team.rank))]]
        return gathered, len(sent)

    gathered = [[0, 1, 2], [0, 4096, 8192]]
    assert run_ranks(3, work) == [(gathered, 0), (gathered, 1), (gathered, 1)]


def test_a_rank_that_left_a_call_undone_is_a_call_ahead(run_ranks) -> None:
    """Its time was up earlier, and the script went on: both make the same call, one of them the next one."""

    def work(team: Team):
        if team.rank == 0:
            team._session.rendezvous(team.ranks, CollectiveCall.here("broadcast", 0))
        team.broadcast(0, root=0)

    (_, behind) = run_ranks(2, work, timeout_s=3.0)
    assert isinstance(behind, RankMismatchError)
    assert "rank 0 is a call ahead of rank 1: it left broadcast(root=0) undone" in behind.message


def test_world_of_one_exchanges_nothing() -> None:
    world = World(ranks=(0,), rank=0, launcher="alone", node_of=(0,))
    world.barrier()
    thing = object()  # not picklable in any useful way: it must not travel
    assert world.gather(thing) == world.all_gather(thing) == [thing]
    assert world.scatter([thing]) is world.broadcast(thing) is world.run_at_root(thing, list) is thing
    assert (world.local_rank, world.local_size, world.nodes) == (0, 1, 1)


def test_world_facts_and_teams() -> None:
    world = World(ranks=(0, 1, 2, 3), rank=2, launcher="test", node_of=(0, 1, 0, 1))
    assert (world.size, world.node, world.nodes, world.local_rank, world.local_size) == (4, 0, 2, 1, 2)
    assert world.team("node").ranks == (0, 2) and world.team("node").rank == 1
    assert world.team().ranks == world.ranks
    team = world.team([3, 2])
    assert (team.ranks, team.rank, team.size) == ((3, 2), 1, 2)


def test_the_device_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(ranks=(0, 1, 2, 3, 4, 5), rank=5, launcher="test", node_of=(0, 0, 0, 1, 1, 1))
    assert world.device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpus in (8, 3):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert world.device == torch.device("cuda", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="number 2 on its node, which shows 2 GPUs") as caught:
        _ = world.device
    assert "TILESCALE_SHARE_GPUS=1" in caught.value.hint
    monkeypatch.setattr("tilescale.comm.world.settings", lambda: Settings(share_gpus=True))
    assert world.device == torch.device("cuda", 0)
    assert [world.on_my_gpu(rank) for rank in world.ranks] == [False, False, False, True, False, True]
    monkeypatch.setattr("tilescale.comm.world.settings", lambda: Settings(emulate=True))
    assert world.device == torch.device("cpu")
    assert [world.on_my_gpu(rank) for rank in world.ranks] == [False] * 5 + [True]


@pytest.mark.parametrize("which", ["nod", [2, 2], [2, 4], [-1, 2], [0, 1]])
def test_bad_teams(which) -> None:
    world = World(ranks=(0, 1, 2, 3), rank=2, launcher="test", node_of=(0, 0, 0, 0))
    with pytest.raises(UsageError):
        world.team(which)


@pytest.mark.parametrize(
    "call",
    [
        lambda world: world.gather(0, root=1),
        lambda world: world.scatter([1, 2]),
        lambda world: world.scatter(None),
        lambda world: world.broadcast(0, -1),
    ],
)
def test_bad_arguments(call) -> None:
    with pytest.raises(UsageError):
        call(World(ranks=(0,), rank=0, launcher="alone", node_of=(0,)))


def test_store_that_died_is_rank_0s_failure() -> None:
    from torch.distributed import DistError

    class Dead:
        def __getattr__(self, _name):
            def call(*_args):
                raise DistError("connection reset")

            return call

    session = Session(Transport(StoreClient(Dead(), 5.0), JobKey(b""), 1), 1, 2, 5.0)
    with pytest.raises(RankFailedError, match="rank 0 disappeared"):
        Team(ranks=(0, 1), rank=1, _session=session).barrier()
