# SPDX-License-Identifier: MIT
"""`tilescale.autotune`: TileLang's entry, for kernels of whole machines.

TileLang's wrapper does what surrounds the search: keys, styles, configurations given by the caller. The search is ours:
each configuration in turn, by the kernel's own profiler, which on a computer without GPUs means simulated time. Ranks
that call a kernel together choose together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from tilelang_core import tuning as stock
from tilescale.comm import current_world
from tilescale.errors import UsageError
from tilescale.runtime.kernel import Kernel

_LOG = logging.getLogger(__name__)

_PASSES = "pass_configs"
_HANDED_ON = "__pass_configs__"


def autotune(*, configs: Any, **options: Any) -> Callable[[Any], Any]:
    """`tilelang.autotune` for factories that `tilescale.jit` has made: the fastest of several configurations.

    Args:
        configs: dictionaries of arguments of the factory, or a function of the other arguments that returns them.
            `pass_configs` in one adds settings of TileLang's passes.
        options: those of `tilelang.autotune`: `warmup` and `rep` (calls that are not and that are timed), `ref_prog`,
            `supply_prog`, `supply_type`, `rtol`, `atol`, `max_mismatched_ratio`, `skip_check`, `manual_check_prog`,
            `cache_input_tensors`, `do_not_specialize`, `early_stop`, `early_stop_factor`; a configuration that takes
            longer than `timeout` seconds is out.

    Returns:
        A decorator of factories. What it returns is called as the factory, and returns the best kernel (lazy style) or
        runs it (eager style).

    Raises:
        UsageError: when decorating, something else than a factory; when tuning, no configuration that works, or one
            that names no argument of the factory.
    """

    def decorate(factory: Any) -> Any:
        if not isinstance(factory, stock.JITImpl):
            raise UsageError(
                f"tilescale.autotune of {type(factory).__name__}", hint="write it above @tilescale.jit"
            )
        return Tuned(factory, configs=configs, **options)

    return decorate


class Tuned(stock.AutoTuneImpl):
    """A factory whose configuration is searched for."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The best kernel, or what it returns; raises as `autotune` says."""
        # The style is found by tracing, which takes values where the factory's defaults are none.
        names = list(self.jit_impl.signature.parameters)[len(args) :]
        first = next(iter(self.configurations(args, kwargs)), None)
        if first is None:
            raise UsageError("there is no configuration", hint="configs= takes a list of dictionaries, or a function")
        chosen = {name: value for name, value in first.items() if name in names}
        self.jit_impl.initialize_jit_mode(*args, **{**chosen, **kwargs})
        return super().__call__(*args, **kwargs)

    def configurations(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What is tried for a call. Raises UsageError for a name that the factory does not have."""
        names = list(self.jit_impl.signature.parameters)
        for config in self.configs(*args, **kwargs) if callable(self.configs) else self.configs:
            unknown = config.keys() - {*names, _PASSES}
            if unknown:
                raise UsageError(
                    f"a configuration names {', '.join(sorted(unknown))}, which the factory does not take",
                    hint=f"it takes {', '.join(names)}",
                )
            yield dict(config)

    def get_tunner(self) -> Search:
        """The search, under TileLang's name."""
        return Search(self)


@dataclass
class Best:
    """What a search has found."""

    kernel: Kernel
    config: dict[str, Any] | None = None


class Search:
    """One search; its attributes are what TileLang's wrapper sets.

    Attributes:
        jit_compile: makes the kernel of a configuration.
        jit_elaborate: traces one.
    """

    jit_compile: Callable[..., Kernel]
    jit_elaborate: Callable[..., Any]

    def __init__(self, tuned: Tuned):
        self._tuned = tuned
        self._inputs: list[Any] | None = stock.captured_inputs()
        self._reference_ms: float | None = None
        self._parameters: list[str] = []
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def set_kernel_parameters(self, given: Any, parameters: Mapping[str, Any]) -> None:
        """The arguments of the call, and the parameters of the factory."""
        args, kwargs = given
        self._parameters, self._given = list(parameters), (args, dict(kwargs))

    def run(self) -> Best:
        """Try all of them. Raises UsageError if none works."""
        args, kwargs = self._given
        configs = list(self._tuned.configurations(args, kwargs))
        taken = {*self._parameters[: len(args)], *kwargs}
        if any(name in taken for config in configs for name in config):
            return Best(self.jit_compile())
        best, least, reasons = None, math.inf, []
        for config in configs:
            kernel = self.jit_compile(**_handed_on(config))
            latency, reason = self._latency_ms(kernel, least)
            latency = _slowest(kernel, latency)
            _LOG.info("configuration %s: %s", config, reason or f"{latency:.4f} ms")
            reasons.append(f"{config}: {reason or 'fails on another rank'}")
            if latency < least:
                least, best = latency, Best(kernel, config)
        if best is None:
            raise UsageError(f"no configuration works: {'; '.join(reasons)}", hint="correct them, or the reference")
        best.kernel.update_tuner_result(least, best.config, self._reference_ms)
        return best

    def _latency_ms(self, kernel: Kernel, least: float) -> tuple[float, str]:
        """Milliseconds of a call; or infinity, and what is wrong with the kernel or its results."""
        begin = perf_counter()
        try:
            latency = self._measured_ms(kernel, least)
        except Exception as error:  # noqa: BLE001 - whatever a configuration does that does not work
            return math.inf, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        took, allowed = perf_counter() - begin, self._tuned.timeout
        return (latency, "") if took <= allowed else (math.inf, f"took {took:.0f} s, timeout={allowed}")

    def _measured_ms(self, kernel: Kernel, least: float) -> float:
        tuned = self._tuned
        profiler = kernel.get_profiler(tuned.supply_type)
        inputs = self._supplied(profiler)
        if tuned.ref_prog is not None and not tuned.skip_check:
            self._check(profiler, inputs)
        latency = profiler.do_bench(
            n_warmup=tuned.warmup,
            n_repeat=tuned.rep,
            input_tensors=inputs,
            early_stop_baseline=least * tuned.early_stop_factor if tuned.early_stop and least < math.inf else None,
        )
        if tuned.ref_prog is not None and self._reference_ms is None:
            self._reference_ms = profiler.do_bench(
                tuned.ref_prog, n_warmup=tuned.warmup, n_repeat=tuned.rep, input_tensors=inputs
            )
        return latency

    def _supplied(self, profiler: Any) -> list[Any]:
        """What the kernel is called with."""
        if self._inputs is not None:
            return self._inputs
        tuned = self._tuned
        inputs = tuned.supply_prog(profiler._get_params()) if tuned.supply_prog else profiler._get_inputs()
        if tuned.cache_input_tensors:
            self._inputs = inputs
        return inputs

    def _check(self, profiler: Any, inputs: list[Any]) -> None:
        tuned = self._tuned
        if tuned.manual_check_prog is not None:
            profiler.manual_assert_close(tuned.ref_prog, inputs, tuned.manual_check_prog)
        else:
            profiler.assert_allclose(tuned.ref_prog, inputs, tuned.atol, tuned.rtol, tuned.max_mismatched_ratio)


def _handed_on(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as TileLang's wrapper takes it."""
    rest = {name: value for name, value in config.items() if name != _PASSES}
    return {**rest, _HANDED_ON: config.get(_PASSES)}


def _slowest(kernel: Kernel, milliseconds: float) -> float:
    """The same on all ranks that call a kernel together: the longest of their times."""
    team = kernel.options.get("team") or current_world()
    if team is None or not kernel.program.extents:
        return milliseconds
    return max(team.all_gather(milliseconds))
