# SPDX-License-Identifier: MIT
"""A kernel under the names of TileLang's `JITKernel`, so that code written for one takes the other.

A program without our constructs on a GPU is TileLang's kernel, which answers itself. Other programs answer from their
generated text; an emulated kernel is timed in simulated time.
"""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilelang_core import jit_kernel as stock
from tilescale import backends
from tilescale.errors import UnsupportedError
from tilescale.hda import Machine
from tilescale.program.model import Program
from tilescale.runtime.outputs import KernelOutputs
from tilescale.runtime.profiler import SimulatedProfiler


class DropIn(stock.JITKernel):
    """The interface shared with TileLang's kernel; `Kernel` documents the class."""

    machine: Machine
    options: dict[str, Any]
    program: Program
    source: str
    _executable: backends.Executable
    _outputs: KernelOutputs

    @classmethod
    def from_tilelang_function(cls, tilelang_func: ir.PrimFunc, **options: Any) -> Any:
        """`tilescale.compile`, under TileLang's name."""
        from tilescale.runtime.compile import compile as bound

        return bound(tilelang_func, **options)

    @classmethod
    def from_database(cls, *args: Any, **options: Any) -> Any:
        """Not supported: TileLang's cache is used without a call. Raises UnsupportedError."""
        raise UnsupportedError(
            "a kernel is not made from a stored library", hint="compile it: TileLang's cache has what was compiled"
        )

    # -- inputs of the compilation -----------------------------------------------------------------------------------

    @property
    def params(self) -> list[stock.KernelParam]:
        """Type and shape of each parameter, as a unit passes it; of a number no shape."""
        return [
            stock.parameter(p.var.dtype if p.buffer is None else p.buffer.dtype, p.shape)
            for p in self.program.parameters
        ]

    @property
    def out_idx(self) -> list[int]:
        """Positions of the parameters that a call allocates and returns."""
        return list(self._outputs.positions)

    @property
    def target(self) -> Any:
        """The target of the generated text. Raises UnsupportedError for a machine without text."""
        return stock.target(self.options.get("target") or backends.generator(self.machine).target(self.machine))

    @property
    def target_host(self) -> Any:
        """`target_host=`, as given."""
        return self.options.get("target_host")

    @property
    def pass_configs(self) -> dict[str, Any]:
        """`pass_configs=`, as given."""
        return dict(self.options.get("pass_configs") or {})

    @property
    def compile_flags(self) -> list[str] | None:
        """`compile_flags=`, as a list."""
        flags = self.options.get("compile_flags")
        return [flags] if isinstance(flags, str) else flags

    @property
    def verbose(self) -> bool:
        """Whether `tilescale.compile` was given `verbose=True`."""
        return bool(self.options.get("verbose"))

    # -- text ----------------------------------------------------------------------------------------------------------

    def get_kernel_source(self, kernel_only: bool = True) -> str:
        """The CUDA text; of a kernel that TileLang has compiled with the host's part, if not `kernel_only`.

        Raises:
            UnsupportedError: as `source`.
        """
        return self.source if kernel_only else self._compiled("host text").get_kernel_source(kernel_only=False)

    @property
    def kernel_source(self) -> str:
        """The CUDA text. Raises as `source`."""
        return self.source

    def get_host_source(self) -> str:
        """The text of the host's part. Raises UnsupportedError for a kernel that TileLang has not compiled."""
        return self._compiled("host text").get_host_source()

    @property
    def host_source(self) -> str:
        """The text of the host's part, as `get_host_source`. Raises UnsupportedError as it does."""
        return self.get_host_source()

    # -- results of TileLang's compilation
    # ------------------------------------------------------------------------------

    def _compiled(self, what: str) -> Any:
        """TileLang's own kernel. Raises UnsupportedError if there is none."""
        kernel = self._executable.stock
        if kernel is None:
            raise UnsupportedError(
                f"{self.program.name!r} has no {what}: TileLang has not compiled it as one kernel",
                hint="source and schedule say what it is; call it to run it",
            )
        return kernel

    @property
    def artifact(self) -> Any:
        """TileLang's artifact.

        Raises:
            UnsupportedError: TileLang has not compiled the program as one kernel.
        """
        return self._compiled("artifact").artifact

    @property
    def adapter(self) -> Any:
        """The callable: TileLang's adapter, or the kernel itself."""
        return self._executable.stock.adapter if self._executable.stock is not None else self

    @property
    def torch_function(self) -> Any:
        """The callable on tensors."""
        return self._executable.stock.torch_function if self._executable.stock is not None else self.__call__

    @property
    def execution_backend(self) -> str:
        """The execution backend's name: TileLang's, or "tilescale"."""
        return self._executable.stock.execution_backend if self._executable.stock is not None else "tilescale"

    @property
    def execution_backend_spec(self) -> Any:
        """TileLang's record of its execution backend. Raises UnsupportedError for a kernel that TileLang has not
        compiled."""
        return self._compiled("execution backend of TileLang's").execution_backend_spec

    @property
    def backend_context(self) -> Any:
        """The context of TileLang's back end. Raises UnsupportedError for a kernel that TileLang has not compiled."""
        return self._compiled("backend of TileLang's").backend_context

    @property
    def backend(self) -> Any:
        """TileLang's back end. Raises UnsupportedError for a kernel that TileLang has not compiled."""
        return self._compiled("backend of TileLang's").backend

    def get_exportable_executable(self) -> Any:
        """The executable of TVM's execution backend. Raises UnsupportedError for a kernel that TileLang has not
        compiled."""
        return self._compiled("executable").adapter.get_exportable_executable()

    @property
    def kernels(self) -> Any:
        """The kernels that the execution backend "nvrtc" has loaded. Raises UnsupportedError as the others."""
        return self._compiled("kernels").adapter.kernels

    @property
    def resource_usage(self) -> dict[str, Any]:
        """Registers as the compiler reports them, where TileLang keeps the report."""
        return self._executable.stock.resource_usage if self._executable.stock is not None else {}

    def export_library(self, kernel_file: str) -> None:
        """Write the compiled kernel. Raises UnsupportedError for a kernel that TileLang has not compiled."""
        self._compiled("library").export_library(kernel_file)

    # -- time ---------------------------------------------------------------------------------------------------------

    def get_profiler(
        self, tensor_supply_type: stock.TensorSupplyType = stock.TensorSupplyType.Auto
    ) -> stock.Profiler | SimulatedProfiler:
        """A profiler that compares the kernel with a reference and times it; an emulated kernel in the machine's
        simulated time."""
        simulated_s = self._executable.simulated_s
        if simulated_s is None:
            return stock.Profiler(self.params, self.out_idx, tensor_supply_type).with_default_adapter(self)
        profiler = SimulatedProfiler(self.params, self.out_idx, tensor_supply_type).with_default_adapter(self)
        profiler.simulated_s = lambda values: simulated_s(self._outputs.allocate(values))
        return profiler
