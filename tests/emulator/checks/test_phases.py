# SPDX-License-Identifier: MIT
"""Phases of mbarriers that may end before all have waited for the phase before, and twins that are right."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale.errors import DeadlockError, RaceError

TURNS = 6


def stream(slots: int, credits: int):
    """Signal each iteration from a warpgroup to two others by `slots` barriers; `credits` of them return credits."""

    @T.prim_func
    def program(Y: T.Tensor((384,), "int32")):
        with T.Kernel(1, threads=384):
            tx = T.get_thread_binding()
            ready = T.alloc_barrier([128] * slots)
            taken = T.alloc_barrier([128 * max(credits, 1)] * slots)
            with T.ws(0):
                for k in T.serial(TURNS):
                    if credits:
                        T.barrier_wait(taken[k % slots], (k // slots + 1) % 2)
                    T.barrier_arrive(ready[k % slots])
            with T.ws(1):
                for k in T.serial(TURNS):
                    T.barrier_wait(ready[k % slots], k // slots % 2)
                    if credits:
                        T.barrier_arrive(taken[k % slots])
            with T.ws(2):
                for k in T.serial(TURNS):
                    T.barrier_wait(ready[k % slots], k // slots % 2)
                    if credits > 1:
                        T.barrier_arrive(taken[k % slots])
            Y[tx] = 1

    return program


def run(program, **options) -> None:
    y = torch.zeros(384, dtype=torch.int32)
    tilescale.emulate(program, [y], **options)
    assert (y == 1).all()


@pytest.mark.parametrize("slots", [1, 2])
def test_nobody_waits_for_those_who_look(slots):
    """The default order of units already shows it."""
    with pytest.raises(DeadlockError, match=r"waits for barrier ready\[0\], phase parity"):
        run(stream(slots, credits=0), check="none")


@pytest.mark.parametrize("slots", [1, 2])
def test_another_order_of_turns_ends_in_a_deadlock(slots):
    run(stream(slots, credits=1), check="none")
    with pytest.raises(DeadlockError, match=r"threads 256..383 waits for barrier ready\[0\]"):
        run(stream(slots, credits=1), check="none", schedule_seed=0)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_phase_that_ends_before_all_have_seen_the_last_one(slots, seed):
    with pytest.raises(RaceError) as error:
        run(stream(slots, credits=1), schedule_seed=seed)
    assert error.value.message == (
        "ready[0]: device 0, block 0, threads 256..383 waits for phase 0, and phase 1 may end before it looks: then it "
        "waits for phase 2"
    )
    assert "T.barrier_wait(taken, ...) before the next arrival at ready[0]" in error.value.hint
    assert [w.what for w in error.value.where] == ["waits here", "phase 1 ends here"]


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_credits_of_all_keep_phases_apart(slots, seed):
    run(stream(slots, credits=2), schedule_seed=seed)


@pytest.mark.parametrize("credits", [0, 1])
def test_as_many_barriers_as_turns_need_no_credits(credits):
    run(stream(TURNS, credits))


def test_those_who_wait_arrive_themselves():
    """No unit can end a phase before all have seen the previous one."""

    @T.prim_func
    def program(Y: T.Tensor((384,), "int32")):
        with T.Kernel(1, threads=384):
            tx = T.get_thread_binding()
            met = T.alloc_barrier(384)
            if tx < 128:
                for k in T.serial(5):
                    T.barrier_arrive(met)
                    T.barrier_wait(met, k % 2)
            else:
                for k in T.serial(5):
                    T.barrier_arrive(met)
                    T.barrier_wait(met, k % 2)
            Y[tx] = 1

    run(program)
