# SPDX-License-Identifier: MIT
"""Kernels find their best configuration once, in simulated time where there are no GPUs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tilescale
from tests.tuning import programs
from tilescale.cli import main
from tilescale.errors import UsageError
from tilescale.tuning import autotune
from tilescale.tuning.autotune import Autotuned, ScheduleRoles
from tilescale.tuning.checks import ResultCheck
from tilescale.tuning.inputs import InputFill, tensors_for
from tilescale.tuning.places import TimeSource, simulated_us
from tilescale.tuning.race import Runner
from tilescale.tuning.search import ConfigSearch

PROGRAMS = Path(programs.__file__)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the programs that were searched for."""
    names, run = [], ConfigSearch.run

    def counted(self: ConfigSearch, *given: Any) -> Any:
        names.append(self.name)
        return run(self, *given)

    monkeypatch.setattr(ConfigSearch, "run", counted)
    return names


def again(tuned: Autotuned) -> Autotuned:
    """The same in another process, with the database as the only state."""
    return Autotuned(tuned.jit, tuned.options)


def test_the_best_configuration_is_found_once(asked: list[str]):
    matmul = again(programs.matmul)
    kernel = matmul(128, 128, 64)
    assert isinstance(kernel, tilescale.Kernel) and asked == ["matmul"]
    found = matmul.result
    times = {trial.us for trial in found.trials if trial.us is not None}
    assert found.simulated and found.us == min(times) and len(times) > 1
    failed = [trial for trial in found.trials if trial.failed]
    errors = {trial.config["block"]: trial.failed.partition(":")[0] for trial in failed}
    assert errors == {4096: "AllocationTooLargeError", 16: "ShapeError"}  # 16 x 16 is too small for the threads
    assert matmul(128, 128, 64) is kernel and again(matmul).tune(128, N=128, K=64) == found
    assert asked == ["matmul"]
    assert again(matmul).tune(128, 128, 64, refresh=True).config == found.config and len(asked) == 2


def test_other_shapes_and_machines_are_other_searches(asked: list[str]):
    programs.total.tune(1 << 10)
    programs.total.tune(1 << 12)
    with tilescale.use_machine("mi300x-8"):
        programs.total.tune(1 << 10)
    assert len(asked) == 3


def test_algorithms_are_configurations_too():
    found = programs.total.tune(1 << 14)
    assert found.config["impl"] in ("one_shot", "two_shot")
    (failed,) = [trial for trial in found.trials if trial.failed]
    assert failed.config["impl"] == "star" and "T.allreduce at level 'device' has" in failed.failed


def test_roles_are_configurations_too():
    """Each is simulated with its schedule, and the call gets the kernel with the best one."""
    with tilescale.use_machine("h200-sxm-8"):
        kernel = programs.scattered(2048, 1024, 512)
        found, roles = programs.scattered.result, "__roles__"
        times = {(t.config["rows"], t.config[roles].get("carrier")): t.us for t in found.trials}
        assert len(times) == 6 and found.us == min(times.values())
        rows = 128  # the sums of 256 do not fit into registers
        assert len({times[rows, carrier] for carrier in ("queue", "tiles")}) == 2
        for carrier in ("queue", "tiles"):
            jit = programs.scattered.jit
            by_hand = tilescale.compile(
                jit.get_tir(2048, 1024, 512, rows=rows), schedule=ScheduleRoles.of({"carrier": carrier})
            )
            (move,) = by_hand.moves.moves
            assert move.overlapped and move.carrier == carrier
            assert simulated_us(by_hand.ir, by_hand.machine) == times[rows, carrier]
        assert kernel is programs.scattered(2048, 1024, 512)
        assert kernel is not programs.scattered.jit(2048, 1024, 512, found.config["rows"]), (
            "a kernel is one of its roles"
        )
        assert simulated_us(kernel.ir, kernel.machine) == found.us


def test_roles_that_nobody_has_are_errors():
    with pytest.raises(UsageError, match="__roles__ has sender"):
        tilescale.autotune(configs=[{"__roles__": {"sender": "queue"}}])(programs.matmul.jit).tune(64, 64, 32)
    with pytest.raises(UsageError, match="no collective of the program has such a choice"):
        tilescale.autotune(configs=[{"__roles__": {"carrier": "queue"}}])(programs.matmul.jit).tune(64, 64, 32)


def test_who_chooses_is_not_tuned(asked: list[str]):
    assert programs.matmul(64, 64, 32, block=16).prim_func is not None
    programs.matmul(64, 64, 32, 16, 1)
    assert asked == []


def test_eager_style_runs_with_the_best(asked: list[str]):
    x = torch.randn(512)
    assert torch.equal(programs.scaled(x), 2 * x) and torch.equal(programs.scaled(x, factor=4), 4 * x)
    assert asked == ["scaled", "scaled"], "configs follow the arguments"
    assert torch.equal(programs.scaled(x), 2 * x) and len(asked) == 2


def test_wrong_uses_are_errors():
    with pytest.raises(UsageError, match="above @tilescale.jit, not above a function"):
        tilescale.autotune(configs=[{}])(programs.matrix_product)
    with pytest.raises(UsageError, match=r"@tilescale.autotune\(configs="):
        tilescale.autotune(programs.matmul.jit, configs=[])
    with pytest.raises(UsageError, match="configs name depth, which matmul does not take"):
        tilescale.autotune(configs=[{"depth": 3}])(programs.matmul.jit).tune(64, 64, 32)
    with pytest.raises(UsageError, match="configs is empty"):
        tilescale.autotune(configs=[])(programs.matmul.jit)(64, 64, 32)
    with pytest.raises(UsageError, match="supply_type='Nothing'"):
        tilescale.autotune(configs=[{}], supply_type="Nothing")


def test_parameters_are_those_of_tilelang():
    import inspect

    import tilelang

    theirs, ours = (inspect.signature(f).parameters for f in (tilelang.autotune, tilescale.autotune))
    assert [*ours][: len(theirs)] == [*theirs]
    for name in theirs.keys() - {"configs", "supply_type"}:
        assert ours[name].default == theirs[name].default, name


@pytest.mark.parametrize(("off", "most", "right"), [(0.001, 0.0, True), (1.0, 0.0, False), (1.0, 0.2, True)])
def test_results_are_compared(off: float, most: float, right: bool):
    check = ResultCheck(lambda x: 2 * x, None, 1e-2, 1e-2, most)

    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        y[0] += off
        return y

    if right:
        check.run(kernel, [torch.ones(8)])
    else:
        with pytest.raises(ValueError, match="wrong: 1 of 8 elements of output 0, by up to 1"):
            check.run(kernel, [torch.ones(8)])


def test_what_changes_its_arguments_is_compared_by_them():
    def add(x: torch.Tensor, y: torch.Tensor) -> None:
        y += x

    ResultCheck(lambda x, y: y.add_(x), None, 1e-2, 1e-2, 0.0).run(add, [torch.ones(4), torch.ones(4)])
    with pytest.raises(ValueError, match="wrong: 4 of 4 elements of output 1"):
        ResultCheck(lambda x, y: y.sub_(x), None, 1e-2, 1e-2, 0.0).run(add, [torch.ones(4), torch.ones(4)])


# -- measured ----------------------------------------------------------------------------------------------------------


class Clock:
    """A timer of calls on this computer."""

    def barrier(self) -> None:
        pass

    def prepare(self, call: Callable[[], Any]) -> Callable[[int], float]:
        def group(calls: int) -> float:
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e6

        return group


@dataclass(frozen=True)
class Called(TimeSource):
    """A place where kernels are called, as on GPUs: here the emulator runs them."""

    name = "calls"

    def timer(self, mode: str) -> Clock:
        return Clock()

    def runner(
        self, program: tilescale.Kernel, fill: InputFill | None = None, check: ResultCheck | None = None
    ) -> Runner:
        given = tensors_for(program, fill)
        return Runner(lambda: program(*given), lambda seed: check.run(program, given))


@pytest.mark.parametrize("factor", [2, 3])
def test_kernels_are_compared_and_timed(factor: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(autotune, "here", lambda machine: Called(machine, tilescale.init(), False, 1))
    how = {"ref_prog": lambda x: factor * x, "rep": 1, "warmup": 0}
    scaled = tilescale.autotune(configs=[{"block": 64}, {"block": 256}], **how)(programs.scaled.jit)
    x = torch.randn(512)
    if factor == 2:
        assert torch.equal(scaled(x), 2 * x)
        assert not scaled.result.simulated and all(t.us and t.estimated_us for t in scaled.result.trials)
    else:
        with pytest.raises(UsageError, match="(?s)block=64: ValueError: wrong: 5.. of 512 elements.*block=256"):
            scaled(x)


# -- the command line --------------------------------------------------------------------------------------------------


def cli(*words: str) -> Any:
    return CliRunner().invoke(main, ["tune", *words])


def test_the_command_shows_and_keeps(asked: list[str]):
    done = cli(f"{PROGRAMS}:matmul", "64", "64", "K=32")
    assert done.exit_code == 0, done.output
    assert "fastest: block=64" in done.output and "simulated" in done.output
    assert "block=4096, stages=1 does not work: AllocationTooLargeError" in done.output
    found = json.loads(cli(f"{PROGRAMS}:matmul", "64", "64", "32", "--json").output)
    assert found["config"]["block"] == 64 and asked == ["matmul"]
    assert json.loads(cli("--machine", "mi300x-8", f"{PROGRAMS}:matmul", "64", "64", "32", "--json").output)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "there is no file nowhere.py"),
        (["no.such.module:f"], "neither a file nor a module"),
        ([str(PROGRAMS)], "has several autotuned functions: say one of"),
        ([__file__], "has no autotuned function: write @tilescale.autotune"),
        ([f"{PROGRAMS}:product"], "has no autotuned function 'product': say one of"),
        ([f"{PROGRAMS}:matmul", "--machine", "h900"], "h900"),
        ([f"{PROGRAMS}:matmul", "64", "64"], "argument: 'K'\n    hint: it takes matmul(M: int"),
        ([f"{PROGRAMS}:matmul", "64", "64", "32", "Q=3"], "matmul: got an unexpected keyword argument 'Q'"),
        ([f"{PROGRAMS}:matmul", *["64"] * 6], "matmul: too many positional arguments"),
        ([f"{PROGRAMS}:scaled", "factor=2"], "configs: missing a required argument: 'x'"),
        ([f"{PROGRAMS}:matmul", "64", "64", "abc"], "no configuration of matmul works for M=64, N=64, K='abc':"),
        ([f"{PROGRAMS}:matmul", "64", "64", "32", "block=48"], "no configuration of matmul has block=48"),
    ],
)
def test_the_command_says_what_is_wrong(words: list[str], message: str):
    done = cli(*words)
    assert done.exit_code == 2 and message in done.output


def test_what_is_given_is_not_searched(asked: list[str]):
    for words in (["64", "64", "32", "block=64"], ["64", "64", "32", "64"]):
        found = json.loads(cli("--json", f"{PROGRAMS}:matmul", *words).output)
        assert {trial["config"]["block"] for trial in found["trials"]} == {64} and len(found["trials"]) == 2
    assert asked == ["matmul"]  # once for both


def test_a_result_of_the_database_says_so():
    words = [f"{PROGRAMS}:matmul", "32", "32", "32"]
    first, second = cli(*words).output, cli(*words).output
    assert "refresh" not in first and ", simulated, as found on 20" in second and "--refresh tunes again" in second
    assert json.loads(cli(*words, "--json").output)["kept"] is True


BROKEN = """
import tilescale, tilescale.language as T

@tilescale.autotune(configs={"block": [32, 64, 128]})
@tilescale.jit
def f(M, block=64):
    @T.prim_func
    def g(X: T.Tensor((M,), "float32")):
        with T.Kernel(1):
            X[0] = nobody_knows
    return g
"""


@pytest.mark.parametrize(("text", "line"), [(BROKEN, 10), ("def f(:\n", 1), ("\nnobody_knows\n", 2)])
def test_the_line_of_a_mistake_is_told_once(text: str, line: int, tmp_path: Path):
    (tmp_path / "broken.py").write_text(text)
    done = cli(str(tmp_path / "broken.py"), *(["128"] if text == BROKEN else []))
    assert done.exit_code == 2 and done.output.count(f"at {tmp_path / 'broken.py'}:{line}\n") == 1, done.output
    assert "so do block=64; block=128" in done.output or text != BROKEN


def test_the_help_teaches():
    text = cli("--help").output
    assert "@tilescale.autotune(configs=" in text and "tilescale tune gemm.py 4096 4096 4096" in text
