# SPDX-License-Identifier: MIT
"""`tilescale.autotune`: TileLang's decorator, over all ranks of a job, with a cost model and a database.

Roles are a part of a configuration: the carriers of a program's collectives, and their reducers. A program in phases
does not name them. They are fields of `Move`; a configuration sets some of them for all moves that have such a choice,
and leaves the rest, such as the rows of a chunk, to the cost model.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilescale.errors import UsageError
from tilescale.passes.overlap.schedule import Move, Schedule
from tilescale.runtime.kernel import Kernel
from tilescale.tuning.checks import ResultCheck
from tilescale.tuning.database import Database, DatabaseKey, Tuned
from tilescale.tuning.digest import source_digest
from tilescale.tuning.inputs import SUPPLIES, InputFill
from tilescale.tuning.places import TimeSource, here
from tilescale.tuning.progress import steps
from tilescale.tuning.race import Runner
from tilescale.tuning.search import Config, ConfigSearch, words
from tilescale.tuning.versions import versions

PASSES = "__pass_configs__"
"""TileLang's name for options of its passes within a configuration."""

ROUNDS = 10
"""Groups of calls of a configuration, interleaved with those of the others."""


def autotune(
    func: Any = None,
    *,
    configs: Sequence[Config] | Mapping[str, Sequence[Any]] | Callable[..., Sequence[Config]],
    warmup: int = 25,
    rep: int = 100,
    timeout: int = 100,
    supply_type: Any = "Auto",
    ref_prog: Callable[..., Any] | None = None,
    supply_prog: Callable[..., Any] | None = None,
    rtol: float = 1e-2,
    atol: float = 1e-2,
    max_mismatched_ratio: float = 0.01,
    skip_check: bool = False,
    manual_check_prog: Callable[..., Any] | None = None,
    cache_input_tensors: bool = False,
    do_not_specialize: Sequence[str] | None = None,
    early_stop: bool = False,
    early_stop_factor: float = 2.0,
    top: int | None = 8,
    refresh: bool = False,
) -> Any:
    """`tilelang.autotune` for whole machines: a kernel factory that finds its best configuration by itself.

    Goes above `@tilescale.jit`. At the first call for a shape all configurations are traced, the cost model keeps the
    best few, and these are measured on all ranks together, interleaved; the winner stays in a database on disk, so the
    next process measures nothing. Without GPUs the time is the emulator's. A call that names one of the tunable
    parameters itself is not tuned.

    Args:
        configs: the configurations, dictionaries of parameters of the function; or a dictionary of lists, for all
            combinations; or a function of the call's arguments that returns either. `"__pass_configs__"` in one are
            options of TileLang's passes, `"__roles__"` selects the carriers and reducers of collectives, in the terms
            of `tilescale.Move`.
        warmup, rep: milliseconds of calls of each configuration that are not timed, and that are.
        timeout: seconds that a configuration may take to be traced, and to be compiled.
        supply_type: how inputs are filled: one of TileLang's `TensorSupplyType`, or its name.
        supply_prog: takes a list of objects with `name`, `shape` and `dtype`, returns the inputs.
        ref_prog: takes the inputs, returns the expected outputs, or changes its inputs where the kernel returns
            nothing; on GPUs a configuration that is off by more than `rtol`, `atol` in more than `max_mismatched_ratio`
            of the elements is out.
        skip_check: whether nothing is compared.
        manual_check_prog: takes the lists of outputs and of references, and raises if they differ too much.
        cache_input_tensors: whether configurations are given the same inputs, which takes less memory.
        do_not_specialize: parameters of the function whose values the result does not depend on.
        early_stop: leave out configurations whose estimate is more than `early_stop_factor` times the least.
        top: how many configurations are measured at most; None for all.
        refresh: tune even if the database has a result, and replace it.

    Returns:
        A decorator for what `tilescale.jit` returns.

    Raises:
        UsageError: there is nothing to decorate or it is not a `tilescale.jit`, no configuration, or a parameter that
            the function does not have; when called: no configuration works, with the reason of each.
        LaunchError: the job has another number of ranks than the program's devices.
    """
    if func is not None:
        raise UsageError("autotune has no configurations", hint="write @tilescale.autotune(configs=[...]) above @jit")
    supply = getattr(supply_type, "name", supply_type)
    if supply not in SUPPLIES:
        raise UsageError(f"supply_type={supply_type!r}", hint=f"there is {', '.join(SUPPLIES)}")
    if early_stop and early_stop_factor < 1:
        raise UsageError(f"early_stop_factor={early_stop_factor}", hint="give at least 1")
    check = None if skip_check else ResultCheck(ref_prog, manual_check_prog, rtol, atol, max_mismatched_ratio)
    options = Options(
        configs, warmup, rep, timeout, supply, supply_prog, check, cache_input_tensors,
        frozenset(do_not_specialize or ()), early_stop_factor if early_stop else None, top, refresh,
    )  # fmt: skip
    return lambda jit: Autotuned(jit, options)


@dataclass(frozen=True)
class Options:
    """Options of the decorator, as `autotune` documents them."""

    configs: Any
    warmup: int
    rep: int
    timeout: int
    supply: str
    supply_prog: Callable[..., Any] | None
    check: ResultCheck | None
    shared_inputs: bool
    open: frozenset[str]
    within: float | None
    top: int | None
    refresh: bool

    def configurations(self, *args: Any, **kwargs: Any) -> list[Config]:
        """All configurations for a call's arguments. Raises UsageError for none, or arguments that they do not take."""
        found = self.configs
        if callable(found):
            _bound("configs", inspect.signature(found).bind, args, kwargs)
            found = found(*args, **kwargs)
        if isinstance(found, Mapping):
            found = [dict(zip(found, values, strict=True)) for values in itertools.product(*found.values())]
        if not found:
            raise UsageError("configs is empty", hint="name at least one configuration")
        return list(found)


@dataclass
class Autotuned:
    """A `tilescale.jit` object that calls itself with the best configuration.

    Attributes:
        jit: the tuned `tilescale.jit` object.
        result: of the last call, a `Tuned`; None before the first one.
    """

    jit: Any
    options: Options
    result: Tuned | None = None
    _known: dict[DatabaseKey, Tuned] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not all(hasattr(self.jit, name) for name in ("get_tir", "compile", "initialize_jit_mode", "tracing")):
            raise UsageError(
                f"autotune goes above @tilescale.jit, not above a {type(self.jit).__name__}",
                hint="write @tilescale.autotune(configs=[...]) in the line above @tilescale.jit",
            )
        functools.update_wrapper(self, self._function)

    @property
    def _function(self) -> Any:
        return getattr(self.jit.func, "orig_func", self.jit.func)

    @property
    def signature(self) -> inspect.Signature:
        """The parameters of the function."""
        return inspect.signature(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the `tilescale.jit` object, with the best configuration for these arguments. Raises as `autotune` says."""
        with self._compiled_as(config := self._config(args, kwargs)):
            return self.jit(*args, **{**kwargs, **_parameters(config)})

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """The kernel of the best configuration. Raises as `autotune` says."""
        return self._kernel(self._config(args, kwargs), args, kwargs)

    def _kernel(self, config: Config, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._compiled_as(config):
            return self.jit.compile(*args, **{**kwargs, **_parameters(config)})

    @contextlib.contextmanager
    def _compiled_as(self, config: Config) -> Iterator[None]:
        """Kernels are compiled with the configuration's own options for TileLang's passes, as it takes them, and in its
        roles."""
        before = self.jit.pass_configs, self.jit.extra_options
        if PASSES in config:
            self.jit.pass_configs = {**(self.jit.pass_configs or {}), **config[PASSES]}
        if ROLES in config:
            self.jit.extra_options = {**self.jit.extra_options, "schedule": ScheduleRoles.of(config[ROLES])}
        try:
            yield
        finally:
            self.jit.pass_configs, self.jit.extra_options = before

    def tune(self, *args: Any, refresh: bool = False, top: int | None = None, **kwargs: Any) -> Tuned:
        """The result for these arguments: kept, or found now. Collective.

        A tunable parameter that is given is not searched: configurations with other values of it are left out. Raises
        UsageError: as `autotune` says; arguments that the function does not take, or too few.
        """
        configs = self._configs(args, kwargs)
        configs, args, kwargs = self._left_open(configs, args, kwargs)
        with self.jit.tracing() as machine:
            place = here(machine)
        key, database = self._key(configs, place, args, kwargs), Database.of_user()
        again = refresh or self.options.refresh
        found = None if again else self._known.get(key) or place.team.broadcast(database.read(key))
        if found is None:
            with steps(place.team.rank) as shown:
                found = self._search(configs, args, kwargs, place, top).run(place, shown)
            if place.team.rank == 0:
                database.write(key, found)
        self._known[key] = self.result = found
        return found

    def _config(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Config:
        """The best configuration; {} if the caller has chosen."""
        configs = self._configs(args, kwargs)
        given = {*kwargs, *list(self.signature.parameters)[: len(args)]}
        return {} if given & set(configs[0]) else self.tune(*args, **kwargs).config

    def _configs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Config]:
        """All configurations for a call's arguments, once these and their names are known to fit."""
        name, known = self._function.__name__, self.signature.parameters
        _bound(name, self.signature.bind_partial, args, kwargs)
        configs = self.options.configurations(*args, **kwargs)
        for config in configs:
            if wrong := sorted(set(_parameters(config)) - set(known)):
                raise UsageError(
                    f"configs name {', '.join(wrong)}, which {name} does not take",
                    hint=f"its parameters are {', '.join(known)}",
                )
        return configs

    def _left_open(
        self, configs: Sequence[Config], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Config], tuple[Any, ...], dict[str, Any]]:
        """The configurations that match the parameters that the caller names, and the other arguments."""
        bound = self.signature.bind_partial(*args, **kwargs)
        named = {name: bound.arguments.pop(name) for name in {*configs[0]} & bound.arguments.keys()}
        left = [c for c in configs if all(c.get(name) == value for name, value in named.items())]
        if not left:
            known = (f"{name}: {', '.join(dict.fromkeys(str(c.get(name)) for c in configs))}" for name in sorted(named))
            raise UsageError(
                f"no configuration of {self._function.__name__} has {words(named)}",
                hint=f"call it with that, which tunes nothing; configurations have {'; '.join(known)}",
            )
        tunable = {name: value for name, value in _parameters(left[0]).items() if name not in bound.kwargs}
        _bound(self._function.__name__, self.signature.bind, bound.args, {**bound.kwargs, **tunable})
        return left, bound.args, bound.kwargs

    def _key(
        self, configs: Sequence[Config], place: TimeSource, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> DatabaseKey:
        given = self._given(args, kwargs)
        special = {name: value for name, value in given.items() if name not in self.options.open}
        machine, space = place.machine, json.dumps([dict(c) for c in configs], sort_keys=True, default=str)
        return DatabaseKey(
            program=self._function.__name__,
            source=source_digest(self._function),
            arguments=json.dumps(special, sort_keys=True, default=str),
            space=hashlib.sha256(space.encode()).hexdigest()[:16],
            machine=f"{machine.name} {machine.digest}",
            place=f"{place.units} x {place.name}",
            versions=tuple(sorted(versions().items())),
        )

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by their names, tensors in short."""
        return {name: _plain(x) for name, x in self.signature.bind_partial(*args, **kwargs).arguments.items()}

    def _search(
        self,
        configs: Sequence[Config],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: TimeSource,
        top: int | None,
    ) -> ConfigSearch:
        options = self.options
        given = self._tensors(args, kwargs, configs[0])
        fill = InputFill(options.supply, options.supply_prog, given, {} if options.shared_inputs else None)

        def build(config: Config) -> Runner:
            return place.runner(self._kernel(config, args, kwargs), fill, options.check)

        return ConfigSearch(
            name=self._function.__name__,
            configs=configs,
            trace=lambda config: self._kernel(config, args, kwargs).ir,  # as its schedule has it
            build=build,
            shapes=given,
            top=top or options.top,
            within=options.within,
            rounds=ROUNDS,
            warmup=options.warmup,
            rep=options.rep,
            timeout=options.timeout,
            called=", ".join(f"{name}={value!r}" for name, value in self._given(args, kwargs).items()),
        )

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any], config: Config) -> list[Any] | None:
        """Arguments of the kernel of a call in eager style; None in the other style."""
        # it may run the function, whose errors are reported for each configuration
        with contextlib.suppress(Exception):
            if self.jit.initialize_jit_mode(*args, **kwargs) == "eager":
                _, tensors = self.jit.func.parse_args(*args, **{**kwargs, **_parameters(config)})
                return list(tensors.values())
        return None


def _bound(name: str, bind: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        bind(*args, **kwargs)
    except TypeError as error:
        signature = bind.__self__  # type: ignore[attr-defined]
        raise UsageError(f"{name}: {error}", hint=f"it takes {name}{signature}") from None


def _parameters(config: Config) -> dict[str, Any]:
    """Parameters of a configuration that are passed to the function."""
    return {name: value for name, value in config.items() if name not in (PASSES, ROLES)}


def _plain(value: Any) -> Any:
    """An argument as a key has it: tensors by shape, steps and type."""
    if hasattr(value, "stride") and hasattr(value, "dtype"):
        return [list(value.shape), list(value.stride()), str(value.dtype)]
    return value


ROLES = "__roles__"
"""The key of roles within a configuration, next to TileLang's for options of its passes."""

GIVEN = ("overlapped", "carrier", "adds", "ordered", "chunk")
"""Fields of a `Move` that a configuration may set."""


@dataclass(frozen=True)
class ScheduleRoles:
    """The schedule of some roles, for `tilescale.compile`: a `Chooser`. Those that say the same are equal."""

    given: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, roles: Mapping[str, Any]) -> ScheduleRoles:
        """The roles of a configuration. Raises UsageError for a key that is not one of `GIVEN`."""
        if unknown := sorted({*roles} - {*GIVEN}):
            hint = f"it may say {', '.join(GIVEN)}, as tilescale.Move"
            raise UsageError(f"{ROLES} has {', '.join(unknown)}", hint=hint)
        return cls(tuple(sorted(roles.items())))

    def __call__(self, bind: Callable[[str | Schedule], Kernel]) -> Kernel:
        """The kernel. Raises UsageError: no collective of the program has such a choice, or not this one."""
        kernel, roles = bind("overlap"), dict(self.given)
        if not roles:
            return kernel
        moves = kernel.moves.moves if kernel.moves is not None else []
        if not any(_takes(move, roles) for move in moves):
            raise UsageError(
                f"{ROLES}={roles}: no collective of the program has such a choice",
                hint="leave it out, or print what there is to choose: kernel.moves",
            )
        return bind(Schedule([_with(move, roles) if _takes(move, roles) else move for move in moves]))


def _takes(move: Move, roles: Mapping[str, Any]) -> bool:
    """Whether a move can run concurrently with grids, and has carriers to choose from where one is named."""
    carriers = {carrier for carrier, _ in move.estimates} - {None}
    return bool(move.estimates) and (bool(carriers) or not {"carrier", "adds"} & {*roles})


def _with(move: Move, roles: Mapping[str, Any]) -> Move:
    blank = Move(move.collective, move.tensors, wire=move.wire, where=move.where, axis=move.axis)
    return replace(blank, **roles)
