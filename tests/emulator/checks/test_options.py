# SPDX-License-Identifier: MIT
"""Checks and interleavings as arguments, and from the environment for calls of kernels."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.checks.support import line_of
from tilescale.errors import RaceError, UsageError
from tilescale.settings import settings


@pytest.fixture
def environment(monkeypatch):
    """Sets variables for this test, and has the settings read again before and after it."""

    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        settings.cache_clear()

    monkeypatch.setenv("TILESCALE_EMULATE", "1")
    settings.cache_clear()
    yield put
    monkeypatch.undo()
    settings.cache_clear()


@T.prim_func
def racing(Y: T.Tensor((1,), "int32")):
    with T.Kernel(8, threads=32) as b:
        T.fill(Y, b)  # every block


def test_names_of_checks():
    y = torch.zeros(1, dtype=torch.int32)
    for check in ("none", "uninitialized", ["replicas"], {"uninitialized", "replicas"}, ()):
        tilescale.emulate(racing, [y], check=check)
    for check in ("all", "races", ["races"], {"uninitialized", "races"}, None):
        with pytest.raises(RaceError):
            tilescale.emulate(racing, [y], check=check)
    for check in ("race", ["races", "none"], {"all", "races"}):
        with pytest.raises(UsageError, match="the checks are 'races', 'uninitialized', 'replicas'"):
            tilescale.emulate(racing, [y], check=check)


def test_a_kernel_is_checked(environment):
    with pytest.raises(RaceError) as caught:
        tilescale.compile(racing)(torch.zeros(1, dtype=torch.int32))
    assert [w.line for w in caught.value.where] == [line_of("every block")] * 2


def test_the_environment_chooses_for_a_kernel(environment):
    environment(TILESCALE_CHECK="uninitialized,replicas")
    y = torch.zeros(1, dtype=torch.int32)
    tilescale.compile(racing)(y)
    assert y.item() == 7
    environment(TILESCALE_SCHEDULE_SEED="0")
    tilescale.compile(racing)(y)
    assert y.item() == 0  # the last block came first


def test_the_argument_comes_before_the_environment(environment):
    environment(TILESCALE_CHECK="none", TILESCALE_SCHEDULE_SEED="0")
    y = torch.zeros(1, dtype=torch.int32)
    tilescale.emulate(racing, [y])
    with pytest.raises(RaceError):
        tilescale.emulate(racing, [y], check="all")
    seeds = {}
    for seed in range(1, 6):
        tilescale.emulate(racing, [y], schedule_seed=seed)
        seeds[seed] = y.item()
    assert len(set(seeds.values())) > 1
    environment(TILESCALE_CHECK="sometimes")
    with pytest.raises(UsageError, match="check='sometimes'"):
        tilescale.emulate(racing, [y])
