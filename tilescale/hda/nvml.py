# SPDX-License-Identifier: MIT
"""GPUs of this host as the NVIDIA driver reports them, through NVML; no CUDA context is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

SWITCH = -1
"""Peer number that stands for a switch."""


@dataclass(frozen=True)
class Accelerator:
    """One GPU.

    Attributes:
        product: its name, e.g. "NVIDIA H200".
        memory: bytes that the driver offers.
        architecture: compute capability, e.g. "9.0".
        cores: arithmetic cores of the whole GPU; 0 where the driver does not report them.
        links: for each NVLink that is up, the number of the GPU at its other end, or `SWITCH`.
        bus: its PCI address as Linux writes it, e.g. "0000:18:00.0".
    """

    product: str
    memory: int
    architecture: str
    cores: int
    links: tuple[int, ...]
    bus: str = ""


def accelerators() -> tuple[Accelerator, ...]:
    """The GPUs of this host in the driver's order; () where there are none, no driver or no NVML."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        with _session(pynvml):
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            numbers = {_bus(pynvml.nvmlDeviceGetPciInfo(handle)): i for i, handle in enumerate(handles)}
            return tuple(_accelerator(pynvml, handle, numbers) for handle in handles)
    except pynvml.NVMLError:
        return ()


def driver() -> tuple[str, str] | None:
    """The version of the NVIDIA driver, and of CUDA that it goes up to, e.g. ("580.65.06", "13.0"); None without it."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        with _session(pynvml):
            cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            return _text(pynvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}"
    except pynvml.NVMLError:
        return None


@contextmanager
def _session(pynvml: Any) -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _accelerator(pynvml: Any, handle: Any, numbers: dict[str, int]) -> Accelerator:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    try:
        cores = pynvml.nvmlDeviceGetNumGpuCores(handle)
    except pynvml.NVMLError:
        cores = 0
    return Accelerator(
        product=_text(pynvml.nvmlDeviceGetName(handle)),
        memory=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        architecture=f"{major}.{minor}",
        cores=cores,
        links=tuple(_links(pynvml, handle, numbers)),
        bus=_bus(pynvml.nvmlDeviceGetPciInfo(handle))[-len("0000:18:00.0") :],
    )


def _links(pynvml: Any, handle: Any, numbers: dict[str, int]) -> Iterator[int]:
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link) != pynvml.NVML_FEATURE_ENABLED:
                continue
            kind = pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                yield SWITCH
            elif kind == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU:
                peer = numbers.get(_bus(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
                if peer is not None:
                    yield peer
        except pynvml.NVMLError:
            continue  # the GPU has fewer links than the library allows for


def _bus(pci: Any) -> str:
    return _text(pci.busId).lower()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
