# SPDX-License-Identifier: MIT
"""The stock compiler: CUDA text of a traced function, a compiled kernel, and `jit` with a last step of our own."""

from __future__ import annotations

import contextlib
import importlib
import shutil
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import tilelang
import tvm
import tvm_ffi
from tilelang.backend.target import determine_target
from tilelang.cache.cuda_binary_cache import CUDABinaryCache
from tilelang.jit import JITImpl, _CallFormCache
from tilelang.transform.pass_config import normalize_pass_configs
from tvm import tirx
from tvm.arith import Analyzer

from tilelang_core import logs, zero_trip_loops
from tilelang_core.complements import with_complements_in_layouts
from tilelang_core.counted_barriers import counted_barriers
from tilelang_core.host_libraries import compiling_as_c
from tilelang_core.kernel_keys import keys_made_once, stands_for
from tilelang_core.loop_invariants import with_hoisted_invariants
from tilelang_core.loop_tiles import with_tiles_in_loops
from tilelang_core.lru import LruCache
from tilelang_core.mends import mended, mending
from tilelang_core.merged_remainders import with_kept_remainders
from tilelang_core.modules import COMPILE, with_flags
from tilelang_core.opaque_values import opaque_values
from tilelang_core.partial_layouts import with_whole_layouts
from tilelang_core.prover import proving
from tilelang_core.rewrite import COMPOSED
from tilelang_core.role_registers import keeping_registers
from tilelang_core.source_rewrites import Rewrite, keyed, through
from tilelang_core.stock_passes import ended_after, rewriting

T = TypeVar("T")


@dataclass(frozen=True)
class GeneratedText:
    """Output of stock TileLang for a function: CUDA text, and bytes of dynamic shared memory at launch.

    Where the arguments say how many these are, it is the least.
    """

    text: str
    dynamic_shared: int


_generated: LruCache[Hashable, Any] = LruCache(128)
"""The last functions that were lowered, as a whole or up to their tile operations: the text of each and its attributes,
the target, and options of passes."""

_TEXT_HOOK = "tilelang_callback_cuda_postproc"
"""TileLang's extension point, which gets the text of every CUDA kernel."""


@contextlib.contextmanager
def _text_through(rewrites: Sequence[Rewrite]) -> Iterator[None]:
    """Pass CUDA text that is generated meanwhile through `rewrites`, after earlier hooks."""
    before = tvm_ffi.get_global_func(_TEXT_HOOK, allow_missing=True)
    own = lambda text, target: through(rewrites, str(before(text, target) if before else text))  # noqa: E731
    tvm_ffi.register_global_func(_TEXT_HOOK, f=own, override=True)
    try:
        yield
    finally:
        tvm_ffi.remove_global_func(_TEXT_HOOK)
        if before is not None:
            tvm_ffi.register_global_func(_TEXT_HOOK, f=before, override=True)


def generate(
    func: tirx.PrimFunc,
    target: Any,
    pass_configs: dict[str, Any] | None = None,
    rewrites: Sequence[Rewrite] = (),
) -> GeneratedText:
    """Lower a function without compiling it; needs no GPU and no nvcc. `rewrites` are applied last.

    The same function is lowered once, although its text is checked, measured for residency, and shown.
    """
    target, config, key = _lowering_of(func, target, pass_configs)
    made = _kept(key, lambda: _lower(func, target, config))
    return replace(made, text=through(rewrites, made.text))


def check_tiles(func: tirx.PrimFunc, target: Any, pass_configs: dict[str, Any] | None = None) -> None:
    """Lower a function as far as its tile operations, for the errors of their distribution over threads.

    What follows is more than half of a lowering.
    """
    target, config, key = _lowering_of(func, target, pass_configs)

    def lower() -> None:
        with ended_after("LowerTileOp") as instrument:
            _lower(func, target, config, [instrument])

    _kept(("tiles", key), lower)


def _lowering_of(
    func: tirx.PrimFunc, target: Any, pass_configs: dict[str, Any] | None
) -> tuple[Any, dict[str, Any], Hashable]:
    """The target, the options of passes, and the key of the cached text."""
    target = determine_target(target, return_object=True)
    own = func.attrs["tilelang_pass_configs"] if func.attrs and "tilelang_pass_configs" in func.attrs else {}
    config = {**dict(own), **(pass_configs or {})}
    return target, config, (func.script(show_meta=True), str(target), repr(config))


def _kept(key: Hashable, make: Callable[[], T]) -> T:
    """The cached result of a key. With a text callback of the user, always made anew."""
    if tvm_ffi.get_global_func(_TEXT_HOOK, allow_missing=True) is not None:
        return make()
    return _generated.made(key, make)


@contextlib.contextmanager
def _lowering(func: tirx.PrimFunc) -> Iterator[None]:
    """Within the block stock TileLang lowers a function for us. Only mends of faults change text of plain programs.

    The function itself is the key of TileLang's cache: what is found there is not mended again.
    """
    remainders = rewriting("FlattenBuffer", with_kept_remainders)
    layouts = rewriting("LayoutInference", with_whole_layouts, after=True)
    divided = rewriting("LowerTileOp", with_complements_in_layouts)
    tiles = rewriting("MergeSharedMemoryAllocations", with_tiles_in_loops)
    composed = _composed() if func.attrs and COMPOSED in func.attrs else contextlib.nullcontext()
    with logs.following(), keeping_registers(), layouts, divided, remainders, composed, tiles, proving(), mending():
        with compiling_as_c(), keys_made_once():
            yield


@contextlib.contextmanager
def _composed() -> Iterator[None]:
    """Within the block stock TileLang lowers a function that our lowering composes."""
    with rewriting("HoistBroadcastValues", with_hoisted_invariants, after=True), opaque_values(), counted_barriers():
        yield


def _lower(func: tirx.PrimFunc, target: Any, config: dict[str, Any], instruments: Sequence[Any] = ()) -> GeneratedText:
    context = tvm.transform.PassContext(opt_level=3, config=config, instruments=list(instruments))
    with _lowering(func), context, target:
        lowered = tilelang.lower(func, target=target)
    return GeneratedText(zero_trip_loops.mended(lowered.kernel_source), _dynamic_shared(lowered.device_mod))


def _dynamic_shared(device_mod: tvm.IRModule) -> int:
    """Bytes of dynamic shared memory; of a size that only a launch knows, the least."""
    sizes = [kernel.attrs.get("dyn_shared_memory_buf", 0) for kernel in device_mod.functions.values() if kernel.attrs]
    return max(
        (max(Analyzer().const_int_bound(tirx.const(0, "int64") + size).min_value, 0) for size in sizes), default=0
    )


def cuda_source(func: tirx.PrimFunc, target: Any, pass_configs: dict[str, Any] | None = None) -> str:
    """The CUDA text that stock TileLang generates for `func`; needs no GPU and no nvcc."""
    return generate(func, target, pass_configs).text


def device_code(
    text: str, target: Any, pass_configs: Mapping[str, Any] | None = None, flags: Sequence[str] = ()
) -> bytes:
    """CUDA text compiled for a target, as the driver loads it; text that was compiled before comes from a cache.

    `flags` are more options of nvcc, as a kernel's `compile_flags`.
    """
    compile_text = tvm_ffi.get_global_func(COMPILE)
    return bytes(compile_text(text, determine_target(target, return_object=True), with_flags(pass_configs, flags)))


@dataclass(frozen=True)
class TextCompilation:
    """CUDA text to compile for a target, as `device_code` does."""

    text: str
    target: Any

    length = 0
    """nvcc alone takes less than any lowering followed by it."""

    def run(self) -> bytes:
        """The binary, compiled or loaded from the cache."""
        return device_code(self.text, self.target)

    def pinned(self) -> TextCompilation:
        """The same compilation with a known target."""
        return replace(self, target=determine_target(self.target, return_object=True))

    @property
    def is_done(self) -> bool:
        """Whether the cache on disk has the binary.

        Nothing is compiled: the lookup finds an empty binary. An error of a callback would take a second.
        """
        found: list[bool] = []
        load = CUDABinaryCache.load

        def look(*key: str) -> bytes:
            found.append(load(*key) is not None)
            return b""

        CUDABinaryCache.load = look
        try:
            self.run()
        finally:
            CUDABinaryCache.load = load
        return all(found)


@cache
def default_target() -> Any:
    """The compilation target of kernels that name none. The first call may query the hardware."""
    return determine_target(tilelang.env.get_default_target(), return_object=True)


@dataclass(frozen=True)
class KernelCompilation:
    """A kernel to compile, for the GPU at hand.

    Attributes:
        func: the traced function.
        rewrites: are applied to its text last.
        check: gets the text, and the bytes of dynamic shared memory, before nvcc does, and raises if they must not run.
            Its `repr` names its other inputs. Kernels of the cache have passed it.
        options: those of `tilelang.compile`.
        digest: of the function's script, where it is known.
    """

    func: tirx.PrimFunc
    rewrites: tuple[Rewrite, ...] = ()
    check: Callable[[str, int], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    digest: str = field(default="", compare=False)

    @cached_property
    def length(self) -> int:
        """Number of characters of the function's script."""
        return len(self.func.script())

    def run(self) -> Any:
        """The kernel, compiled or loaded from the cache. A check is made once, in the process that compiles it;
        `compiled` returns its result."""
        if self.check is None:
            with _lowering(self.func), _text_through(self._last):
                return tilelang.compile(self._keyed, **self.options)
        with _lowering(self.func), _seen_by(self.check) as noted:
            with _text_through((*self._last, noted)):
                return tilelang.compile(self._keyed, **self.options)

    def pinned(self) -> KernelCompilation:
        """The same compilation with a known target: "auto" asks CUDA, which a forked process must not."""
        given = self.options.get("target")
        target = determine_target(given, return_object=True) if given else default_target()
        return replace(self, options={**self.options, "target": target})

    @property
    def is_done(self) -> bool:
        """Whether the cache on disk has the kernel."""
        stock: Any = importlib.import_module("tilelang.jit")
        load, stock.cached = stock.cached, _is_cached
        try:
            with keys_made_once():
                return tilelang.compile(self._keyed, **self.options)
        finally:
            stock.cached = load

    @property
    def _last(self) -> tuple[Rewrite, ...]:
        return (
            (zero_trip_loops.mended, *self.rewrites) if zero_trip_loops.may_have_no_step(self.func) else self.rewrites
        )

    @cached_property
    def _keyed(self) -> tirx.PrimFunc:
        makers = (mended, *self._last)
        made = keyed(self.func, makers if self.check is None else (*makers, _seen_by), self.check)
        return stands_for(self.digest, made) if self.digest else made


def _is_cached(
    func: tirx.PrimFunc, out_idx: Any, target: Any, target_host: Any, verbose: Any, pass_configs: Any, **options: Any
) -> bool:
    """Whether TileLang's own function of these parameters would find a kernel on disk."""
    backend, flags = options["execution_backend"], options["compile_flags"]
    cache, context, _ = tilelang.cache._resolve_cache_dispatch(target, target_host, backend, verbose)
    known = context.target, context.target_host, normalize_pass_configs(pass_configs), flags
    key = cache._generate_key(func, out_idx, context.execution_backend.name, (), *known)
    return Path(cache._get_cache_path(key)).exists()


_DYNAMIC_SHARED = "\n// bytes of dynamic shared memory: "
"""The last line of the text of a kernel that was checked, before the number: the cache keeps no other place for it."""


def checked_text(made: GeneratedText) -> str:
    """The text that nvcc gets after a passed check."""
    return f"{made.text}{_DYNAMIC_SHARED}{made.dynamic_shared}\n"


def compiled(kernel: Any) -> GeneratedText:
    """The text that nvcc compiled for a kernel of a `KernelCompilation` with a check, in any process."""
    text = kernel.get_kernel_source()
    return GeneratedText(text, int(text.rpartition(_DYNAMIC_SHARED)[2]))


@contextlib.contextmanager
def _seen_by(check: Callable[[str, int], None]) -> Iterator[Rewrite]:
    """Pass text generated meanwhile through `check` before nvcc gets it. TileLang's hook has the text alone.

    Gives the rewrite that notes in a text what its kernel has of dynamic shared memory.
    """
    engine: Any = importlib.import_module("tilelang.engine.lower")
    stock_codegen, prepare, shared = engine.device_codegen, engine._prepare_device_codegen_mod, 0

    def checked(device_mod: tvm.IRModule, context: Any) -> tvm.IRModule:
        nonlocal shared
        shared = _dynamic_shared(device_mod)
        check(engine.device_codegen_without_compile(device_mod, context).inspect_source(), shared)
        return stock_codegen(device_mod, context)

    engine.device_codegen, engine._prepare_device_codegen_mod = checked, cache(prepare)  # one module for both texts
    try:
        yield lambda text: checked_text(GeneratedText(text, shared))
    finally:
        engine.device_codegen, engine._prepare_device_codegen_mod = stock_codegen, prepare


def cache_folder() -> Path:
    """Folder in which stock TileLang keeps compiled kernels, and finds them in later processes; it need not exist
    yet."""
    return Path(tilelang.env.TILELANG_CACHE_DIR)


def keeps_kernels() -> bool:
    """Whether other processes find this process's kernels there."""
    return bool(tilelang.env.is_cache_enabled())


def nvcc() -> str | None:
    """The compiler that stock TileLang runs; None if it finds none."""
    return shutil.which(str(Path(tilelang.env.CUDA_HOME) / "bin" / "nvcc")) if tilelang.env.CUDA_HOME else None


def entry(kernel: Any) -> Callable[..., Any]:
    """The innermost function of a compiled kernel without outputs, without lookups and counters.

    Anything else that can be called is its own entry, kernels of other execution backends than TVM's among it.
    """
    find = getattr(getattr(kernel, "adapter", None), "_get_executable", None)
    if find is None:
        return kernel
    executable = find()
    module = executable.jit() if isinstance(executable, tvm.runtime.Executable) else executable
    return module[module.entry_name]


class JIT(JITImpl):
    """TileLang's just-in-time factory with three hooks.

    `tracing()` is entered around everything that may trace and yields the key of the trace: templates and kernels are
    kept for each key, and for options. `finish(func, options)` makes the kernel of a traced function.
    `no_outputs(out_idx)` makes the error for positions of outputs of a function in eager style. `extra_options` are
    unknown to TileLang.
    """

    tracing: Callable[[], contextlib.AbstractContextManager[Hashable]]
    finish: Callable[[tirx.PrimFunc, dict[str, Any]], Any]
    no_outputs: Callable[[Any], Exception]
    extra_options: Mapping[str, Any] = MappingProxyType({})

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        with self.tracing() as purpose:
            purpose = purpose, repr(self.pass_configs), tuple(self.extra_options.items())
            caches = self.__dict__.setdefault("_caches", {}).setdefault(purpose, ({}, _CallFormCache(), {}))
            self._kernel_cache, self._call_form_cache, self.func.p1_cache = caches
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._tracing():
            return super().__call__(*args, **kwargs)

    def initialize_jit_mode(self, *args: Any, **kwargs: Any) -> str:
        with self._tracing():
            try:
                return super().initialize_jit_mode(*args, **kwargs)
            except ValueError:
                if self.mode == "eager" and self.out_idx is not None:
                    raise self.no_outputs(self.out_idx) from None
                raise

    def get_tir(self, *args: Any, **kwargs: Any) -> tirx.PrimFunc:
        with self._tracing():
            return super().get_tir(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        options = {
            "out_idx": self.out_idx,
            "execution_backend": self.execution_backend,
            "target": self.target,
            "target_host": self.target_host,
            "verbose": self.verbose,
            "pass_configs": self.pass_configs,
            "compile_flags": self.compile_flags,
            **self.extra_options,
        }
        func = self.get_tir(*args, **kwargs)
        kernel = self.finish(func, options)
        if self.debug_root_path:
            folder, name = Path(self.debug_root_path), self.func.__name__
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"tilelang_jit_kernel_{name}.c").write_text(f"{kernel.get_kernel_source()}\n", encoding="utf-8")
            (folder / f"tilelang_jit_program_{name}.py").write_text(f"{func.script()}\n", encoding="utf-8")
        return kernel

    def par_compile(
        self,
        configs: Iterable[dict[str, Any] | tuple[Any, ...]],
        num_workers: int | None = None,
        ignore_error: bool = False,
    ) -> list[Any]:
        """The kernels of several configurations, one after another, as nothing is generated before they are used."""
        return [self._one_of_several(config, ignore_error) for config in configs]

    def _one_of_several(self, config: dict[str, Any] | tuple[Any, ...], ignore_error: bool) -> Any:
        """The kernel of a configuration; None if it cannot be traced and that is to be ignored."""
        try:
            return self.compile(**config) if isinstance(config, dict) else self.compile(*config)
        except Exception:
            if not ignore_error:
                raise
            return None


def jit(function: Callable, *, tracing: Callable, finish: Callable, no_outputs: Callable, **options: Any) -> JIT:
    """`tilelang.jit(function, **options)` with the hooks of `JIT`."""
    stock = tilelang.jit(**options)(function)
    result = JIT(**{name: getattr(stock, name) for name in stock.__dataclass_fields__})
    result.tracing, result.finish, result.no_outputs = tracing, finish, no_outputs
    return result
