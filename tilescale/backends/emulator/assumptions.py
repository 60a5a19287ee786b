# SPDX-License-Identifier: MIT
"""Values that a run without data assumes: `tilescale.emulate(data=False, assume={"counts": values})`.

Control flow, indices and extents may depend on them. Writes of the program to these tensors are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np

from tilescale.backends.emulator.execute.memory import assumed
from tilescale.backends.emulator.numerics import to_numpy
from tilescale.errors import ArgumentError, UsageError, did_you_mean
from tilescale.program.model import Program


class Assumptions:
    """The values of some tensors and tiles, by name.

    Args:
        given: name -> values for all units, or a list with those of each unit. A number holds for all elements.
        units: number of units that own tensors.

    Raises:
        UsageError: a name that the program does not have, or no values.
        ArgumentError: a list for another number of units.
    """

    def __init__(self, given: Mapping[str, Any], program: Program, units: int):
        parameters = [p.buffer for p in program.parameters if p.buffer is not None]
        buffers = [*parameters, *(buffer for launch in program.launches for buffer in launch.buffers)]
        known = sorted({buffer.name for buffer in buffers if not buffer.scope().startswith("local")})
        self._values: dict[str, list[np.ndarray]] = {}
        for name, values in given.items():
            if name not in known:
                raise UsageError(
                    f"assume={{{name!r}: ...}}: {program.name} has no such tensor",
                    hint=f"{did_you_mean(name, known)}the values of {', '.join(known)} may be assumed",
                )
            self._values[name] = [_array(name, value) for value in _of_units(name, values, units)]

    def __bool__(self) -> bool:
        return bool(self._values)

    def of(self, name: str, unit: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
        """The values of a unit's instance of a buffer; None if it has no assumed values. Raises ArgumentError: values
        of another shape."""
        if name not in self._values:
            return None
        values = self._values[name][unit]
        if values.ndim and values.shape != shape:
            raise ArgumentError(
                f"assume={{{name!r}: ...}} has values of shape {values.shape}, {name!r} is {shape}",
                hint="pass a value for each element, or a number for all of them",
            )
        return assumed(values, shape, dtype)


def _of_units(name: str, values: Any, units: int) -> list[Any]:
    if not isinstance(values, list | tuple):
        return [values] * units
    if len(values) != units:
        raise ArgumentError(
            f"assume={{{name!r}: ...}} has a list of {len(values)}, the launch has {units} units",
            hint="a list has the values of each unit; pass a tensor for values that all units have",
        )
    return list(values)


def _array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray | Number):
        return np.asarray(value)
    if hasattr(value, "detach"):
        return to_numpy(value.detach().cpu())
    raise UsageError(
        f"assume={{{name!r}: ...}} has {type(value).__name__}", hint="values are a tensor, an array or a number"
    )
