# SPDX-License-Identifier: MIT
"""TileLang's profiler for kernels that are emulated: inputs on the CPU, times as the machine would take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilelang_core import jit_kernel as stock
from tilescale.errors import UsageError


class SimulatedProfiler(stock.Profiler):
    """A profiler whose clock is the simulation's. `simulated_s`: seconds that a call on arguments like these takes on
    the machine; None at positions of outputs."""

    simulated_s: Callable[[list[Any]], float]
    supply: Callable[[Any], Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        supply = self.supply
        self.supply = lambda param: supply(param).cpu()

    def do_bench(
        self,
        func: Callable | None = None,
        warmup: int = 25,
        rep: int = 100,
        n_warmup: int = 0,
        n_repeat: int = 0,
        input_tensors: Sequence[Any] | None = None,
        backend: str = "event",
        quantiles: list[float] | None = None,
        return_mode: str = "mean",
        dynamic_symbolic_constraints: dict[str, int] | None = None,
        device: Any = None,
        early_stop_baseline: float | None = None,
    ) -> Any:
        """Milliseconds that the kernel takes on the machine, always the same; a list of them for `quantiles`.

        Args:
            func: something else to time, by the clock of this computer.
            input_tensors, dynamic_symbolic_constraints: arguments of the calls, as TileLang's profiler takes them.
            warmup, rep, n_warmup, n_repeat, backend, return_mode, device, early_stop_baseline: as TileLang's
                profiler; they say how to measure, and a simulated time needs no measurement.
        """
        if func is not None:
            return super().do_bench(
                func, warmup, rep, n_warmup, n_repeat, input_tensors, "wall", quantiles, return_mode,
                dynamic_symbolic_constraints, "cpu", early_stop_baseline,
            )  # fmt: skip
        inputs = input_tensors
        if inputs is None:
            inputs = self._get_inputs(dynamic_symbolic_constraints=dynamic_symbolic_constraints)
        milliseconds = self.simulated_s(self._placed(inputs)) * 1e3
        return [milliseconds] * len(quantiles) if quantiles else milliseconds

    def _placed(self, inputs: Sequence[Any]) -> list[Any]:
        given = iter(inputs)
        return [None if i in self.result_idx else next(given) for i in range(len(self.params))]

    def assert_allclose(
        self,
        reference_program: Callable,
        input_tensors: Sequence[Any] | None = None,
        atol: float = 1e-2,
        rtol: float = 1e-2,
        max_mismatched_ratio: float = 0.01,
    ) -> None:
        """Compare the kernel's results with a reference, as TileLang's profiler. Raises AssertionError."""

        def check(found: list[Any], expected: list[Any]) -> None:
            for mine, right in zip(found, expected, strict=True):
                if mine is not None and right is not None:
                    stock.assert_close(
                        mine, right, rtol=rtol, atol=atol, max_mismatched_ratio=max_mismatched_ratio,
                        base_name="tilescale", ref_name="reference",
                    )  # fmt: skip

        self.manual_assert_close(reference_program, input_tensors, check)

    def manual_assert_close(
        self,
        reference_program: Callable,
        input_tensors: Sequence[Any] | None = None,
        manual_check_prog: Callable[[list[Any], list[Any]], None] | None = None,
    ) -> None:
        """Pass the results of the kernel and of a reference to a check. Raises UsageError: there is no check, or they
        return different numbers of tensors."""
        if manual_check_prog is None:
            raise UsageError("manual_check_prog is None", hint="pass a function of both lists of results")
        inputs = self._get_inputs() if input_tensors is None else input_tensors
        expected, found = _listed(reference_program(*inputs)), _listed(self.func(*inputs))
        if len(found) != len(expected):
            raise UsageError(
                f"the kernel returns {len(found)} tensors, the reference {len(expected)}",
                hint="say which parameters are outputs: out_idx=",
            )
        manual_check_prog(found, expected)


def _listed(results: Any) -> list[Any]:
    """A function's results as a list: one tensor, several, or none."""
    if results is None:
        return []
    return list(results) if isinstance(results, list | tuple) else [results]
