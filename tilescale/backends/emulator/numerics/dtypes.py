# SPDX-License-Identifier: MIT
"""Data types of the emulator: TileLang names, torch tensors as numpy arrays, and conversions with CUDA's results.

Types that numpy lacks (bfloat16, float8, float6, float4, int4) come from ml_dtypes, one element per byte or two.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

from tilescale.errors import ArgumentError, UnsupportedError

_BF16 = np.dtype(ml_dtypes.bfloat16)
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_F16, _F32, _F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
_BOOL, _I32, _U32, _I64, _U64 = (np.dtype(t) for t in (np.bool_, np.int32, np.uint32, np.int64, np.uint64))

# On CUDA, TileLang's float8_e4m3 is e4m3fn: no infinity, largest value 448.
_ALIASES = {
    "bool": "bool",
    "boolean": "bool",
    "short": "int16",
    "int": "int32",
    "uint": "uint32",
    "long": "int64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "tfloat32": "float32",
    "custom[tfloat32]": "float32",
    "float8_e4m3": "float8_e4m3fn",
    "float4_e2m1_unpacked": "float4_e2m1fn",
    "custom[float4_e2m1_unpacked]8": "float4_e2m1fn",
}
_NUMPY_NAMES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
_SMALL_INTS = {np.dtype(ml_dtypes.int4): 4, np.dtype(ml_dtypes.uint4): 4}
_SMALL_FLOAT_NAMES = (
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
)
_SMALL_FLOATS = {np.dtype(getattr(ml_dtypes, name)): name for name in _SMALL_FLOAT_NAMES}
_DTYPES = {name: np.dtype(name) for name in _NUMPY_NAMES}
_DTYPES |= {name: dtype for dtype, name in _SMALL_FLOATS.items()}
_DTYPES |= {"int4": np.dtype(ml_dtypes.int4), "uint4": np.dtype(ml_dtypes.uint4)}

# torch types that numpy cannot hold natively: (integer type to view as, numpy type to view that as).
# Packed float4 stays bytes: two elements share one.
_TORCH_VIEWS: dict[torch.dtype, tuple[torch.dtype, np.dtype]] = {torch.bfloat16: (torch.int16, _BF16)}
for _name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"):
    if hasattr(torch, _name):
        _TORCH_VIEWS[getattr(torch, _name)] = (torch.uint8, _DTYPES[_name])
_TORCH_OF = {numpy: (bits, name) for name, (bits, numpy) in _TORCH_VIEWS.items()}
if hasattr(torch, "float4_e2m1fn_x2"):
    _TORCH_VIEWS[torch.float4_e2m1fn_x2] = (torch.uint8, np.dtype(np.uint8))

# Above this size torch's vectorised conversion repays its call overhead.
_TORCH_MIN_SIZE = 1024


_VECTOR = re.compile(r"(.+?)x(\d+)")


@functools.cache
def numpy_dtype(tilelang_name: str) -> np.dtype:
    """The numpy type of one element of a TileLang scalar type, e.g. "bfloat16", "float8_e4m3", "int4".

    Vector types ("float16x2"), "handle" and complex types raise UnsupportedError.
    """
    name = _ALIASES.get(tilelang_name, tilelang_name)
    if name not in _DTYPES:
        raise UnsupportedError(
            f"the emulator has no data type {tilelang_name!r}", hint="it knows " + ", ".join(sorted(_DTYPES))
        )
    return _DTYPES[name]


@functools.cache
def lanes_of(tilelang_name: str) -> int:
    """Number of lanes of a TileLang type: 4 for "float16x4", 1 for scalar types."""
    found = _VECTOR.fullmatch(tilelang_name)
    return int(found[2]) if found is not None else 1


def lane_axis(tilelang_name: str) -> tuple[int, ...]:
    """The trailing extent of an array of a TileLang type, after its shape: (4,) for "float16x4", else ()."""
    lanes = lanes_of(tilelang_name)
    return (lanes,) if lanes > 1 else ()


@functools.cache
def element_type(tilelang_name: str) -> str:
    """The type of one lane, e.g. "float16" of "float16x4"."""
    found = _VECTOR.fullmatch(tilelang_name)
    return found[1] if found is not None else tilelang_name


@functools.cache
def is_float(dtype: np.dtype) -> bool:
    """True for every floating-point type, ml_dtypes' included."""
    return dtype.kind == "f" or dtype in _SMALL_FLOATS


@functools.cache
def is_half_byte(dtype: np.dtype) -> bool:
    """True for types with two elements in a byte of memory."""
    return dtype in _SMALL_INTS or dtype == _DTYPES["float4_e2m1fn"]


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """`tensor` as an array on the same memory with the same strides. float4_e2m1fn_x2 gives its packed bytes.

    The tensor's storage can still be resized afterwards, as FSDP does: `Tensor.numpy` would forbid that forever.

    Raises:
        ArgumentError: the tensor is not in host memory.
        UnsupportedError: its type has no numpy counterpart.
    """
    if tensor.device.type != "cpu":
        raise ArgumentError(f"a tensor on {tensor.device} given to the emulator", hint="pass tensor.cpu()")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    views = _TORCH_VIEWS.get(tensor.dtype)
    if views is not None:
        return np.from_dlpack(tensor.view(views[0])).view(views[1])
    try:
        return np.from_dlpack(tensor)
    except (TypeError, BufferError, RuntimeError) as error:
        raise UnsupportedError(f"the emulator has no data type {tensor.dtype}") from error


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """`array` as a tensor on the same memory. Types that torch lacks (float6, int4, ...) raise UnsupportedError."""
    views = _TORCH_OF.get(array.dtype)
    if views is not None:
        return torch.from_numpy(array.view(np.int16 if views[0] is torch.int16 else np.uint8)).view(views[1])
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise UnsupportedError(f"torch has no data type {array.dtype}") from error


def convert(value: Any, dtype: np.dtype) -> Any:
    """`value` (array, numpy scalar or Python number) in `dtype`, as a CUDA cast in a TileLang kernel gives it.

    Floats round to nearest even; float16 and bfloat16 overflow to infinity; float8 saturates (`satfinite`), e8m0
    rounds its magnitude up to a power of two; float6 and float4 saturate and turn NaN into their maximum. Float to
    integer truncates toward zero, saturates at 32 or 64 bits (NaN: 0, or the lowest bit pattern if 64 bits are on
    either side), then wraps to narrower types, which is what nvcc makes of a C cast. Integers wrap. Returns `value`
    itself if it has that type already; scalars give numpy scalars.
    """
    if isinstance(value, np.ndarray):
        if value.dtype == dtype:
            return value
        return _converter(value.dtype, dtype)(value)
    if type(value) is int and dtype.kind in "iu":
        return dtype.type(wrap(value, dtype))
    if type(value) is float and dtype.kind == "f":
        return dtype.type(value)
    array = np.asarray(value)
    return array[()] if array.dtype == dtype else _converter(array.dtype, dtype)(array)[()]


def wrap(value: int, dtype: np.dtype) -> int:
    """`value` modulo 2^bits of the integer type `dtype`, in its range; 0 or 1 for bool."""
    if dtype.kind == "b":
        return int(value != 0)
    bits = 8 * dtype.itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value


@functools.cache
def _converter(source: np.dtype, target: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    if target in _SMALL_INTS and (is_float(source) or source == _BOOL):
        wrap, whole = _converter(_I32, target), _converter(source, _I32)
        return lambda x: wrap(whole(x))
    if target == _BOOL or not is_float(source) and not is_float(target):
        return lambda x: x.astype(target)
    if not is_float(target):
        return functools.partial(_float_to_int, dtype=target)
    if target == _E8M0:
        return lambda x: _to_e8m0(_widen(x))
    if target in _SMALL_FLOATS and target != _BF16:
        return _saturating(target)
    if source.itemsize == 1 and source in _SMALL_FLOATS:
        return _table_lookup(source, target)
    if {source, target} == {_F16, _F32}:
        torch_dtype = torch.float16 if target == _F16 else torch.float32
        return functools.partial(_half_and_single, dtype=target, torch_dtype=torch_dtype)
    if source in _SMALL_INTS:
        return lambda x: x.astype(np.int8).astype(target)
    return lambda x: x.astype(target)


def _half_and_single(x: np.ndarray, dtype: np.dtype, torch_dtype: torch.dtype) -> np.ndarray:
    # numpy converts float16 element by element; torch uses the vector unit and gives the same bits.
    if x.size < _TORCH_MIN_SIZE or not x.flags.writeable or min(x.strides) < 0:
        return x.astype(dtype)
    return torch.from_numpy(x).to(torch_dtype).numpy()


def _table_lookup(source: np.dtype, target: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    table = np.arange(256, dtype=np.uint8).view(source).astype(_F32).astype(target)
    return lambda x: table.take(x.view(np.uint8))


def _widen(x: np.ndarray) -> np.ndarray:
    return x if x.dtype in (_F32, _F64) else x.astype(_F32) if is_float(x.dtype) else x.astype(_F64)


def _saturating(target: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    limit = float(ml_dtypes.finfo(target).max)
    has_nan = "float8" in target.name
    torch_name = _TORCH_OF.get(target, (None, None))[1]

    def saturate(x: np.ndarray) -> np.ndarray:
        x = _widen(x)
        if not has_nan:
            x = np.where(np.isnan(x), limit, x)
        x = np.clip(x, -limit, limit)
        if torch_name is not None and x.dtype == _F32 and x.size >= _TORCH_MIN_SIZE:
            return torch.from_numpy(x).to(torch_name).view(torch.uint8).numpy().view(target)
        return x.astype(target)

    return saturate


def _to_e8m0(x: np.ndarray) -> np.ndarray:
    """The power of two at or above |x|: `cvt.rp.satfinite.ue8m0x2`; NaN is 0xFF, overflow 2^127, zero 2^-127."""
    bits = x.astype(_F32).view(_U32) & np.uint32(0x7FFFFFFF)
    exponent = (bits >> 23) + (((bits & 0x7FFFFF) != 0) & (bits > 0x00400000))
    return np.where(bits > 0x7F800000, 255, np.minimum(exponent, 254)).astype(np.uint8).view(_E8M0)


def _float_to_int(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    carrier: np.dtype[Any] = dtype if dtype.itemsize >= 4 else _I32 if dtype.kind == "i" else _U32
    wide = x.astype(_F64)
    info = np.iinfo(carrier)
    low, above = float(info.min), float(info.max) + (1.0 if carrier.itemsize == 4 else 0.0)
    if wide.size and wide.min() > low - 1 and wide.max() < above:  # false if any NaN
        # numpy's float64 to uint32 cast is undefined outside int64, so go through it.
        whole = wide.astype(carrier if carrier == _U64 else _I64)
        return whole.astype(carrier).astype(dtype)
    nan_as_zero = carrier.itemsize == 4 and x.dtype != _F64
    nan_value = 0 if nan_as_zero else info.min if carrier.kind == "i" else 1 << (8 * carrier.itemsize - 1)
    inside = (wide > low - 1) & (wide < above)
    whole = np.where(inside, wide, 0).astype(_U64 if carrier == _U64 else _I64).astype(carrier)
    whole = np.where(wide >= above, carrier.type(info.max), np.where(wide <= low, carrier.type(info.min), whole))
    return np.where(np.isnan(wide), carrier.type(nan_value), whole).astype(dtype)


def as_compute(array: np.ndarray) -> np.ndarray:
    """`array` in the type to compute in, every value exact: float32 for narrower floats, int64 for integers and bool.

    float32, float64, int64 and uint64 arrays come back as they are.
    """
    dtype = array.dtype
    if dtype in (_F32, _F64, _I64, _U64):
        return array
    return convert(array, _F32 if is_float(dtype) else _I64)


def tf32(array: np.ndarray) -> np.ndarray:
    """A new float32 array with the 10-bit mantissa that tensor cores see of it.

    TileLang hands raw float32 registers to `mma...tf32`, whose hardware ignores the low 13 bits.
    """
    return (array.view(_U32) & np.uint32(0xFFFFE000)).view(_F32)
