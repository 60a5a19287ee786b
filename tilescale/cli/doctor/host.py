# SPDX-License-Identifier: MIT
"""Checks of this machine: GPUs and how they reach each other, symmetric memory, libraries, compiler."""

from __future__ import annotations

import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tilescale import __version__
from tilescale.cli.doctor.finding import Finding, ask
from tilescale.errors import DependencyError

_DESCRIPTORS = 1024
_INFINIBAND = Path("/sys/class/infiniband")
_MPI_WITHIN_S = 30.0


def findings() -> Iterator[Finding]:
    """All checks, one after the other."""
    checks: dict[str, Callable[[], Finding]] = {
        "versions": _versions,
        "driver": _driver,
        "GPUs": _gpus,
        "NVLink": _nvlink,
        "peer access": _peer_access,
        **{f"heap {name}": partial(_heap, name, 1) for name in ("cuda_vmm", "nvshmem", "host")},
        "fabric handles": partial(_heap, "cuda_vmm", 2),
        "NCCL": _nccl,
        "NVSHMEM": _nvshmem_transports,
        "adapters": _adapters,
        "binding": _binding,
        "MPI": _mpi,
        "compiler": _compiler,
        "kernel cache": _cache,
        "descriptors": _descriptors,
    }
    for name, check in checks.items():
        yield ask(name, check)


def _versions() -> Finding:
    names = {"tilescale": __version__} | {package: version(package) for package in ("tilelang", "torch")}
    text = ", ".join(f"{package} {number}" for package, number in names.items())
    return Finding("versions", True, f"{text}, Python {platform.python_version()}")


def _driver() -> Finding:
    import torch

    from tilescale.hda.nvml import driver

    found = driver()
    if found is None:
        return Finding("driver", None, "no NVIDIA driver", "nvidia-smi shows whether one runs")
    number, newest = found
    built = torch.version.cuda
    text = f"{number}, for CUDA up to {newest}; PyTorch is built for {built or 'no CUDA'}"
    works = built is not None and int(built.split(".")[0]) <= int(newest.split(".")[0])
    return Finding("driver", works, text, "install a PyTorch for this CUDA, or a newer driver")


def _gpus() -> Finding:
    import torch

    from tilescale.hda.nvml import accelerators

    seen = accelerators()
    if not seen:
        return Finding("GPUs", None, "none: programs run on the emulator", "nvidia-smi shows whether a driver runs")
    usable = torch.cuda.device_count()
    text = f"{len(seen)} x {seen[0].product}, PyTorch uses {usable}"
    return Finding(
        "GPUs", usable > 0, text, "CUDA_VISIBLE_DEVICES hides them, or PyTorch's CUDA is newer than the driver"
    )


def _nvlink() -> Finding:
    from tilescale.hda.nvml import accelerators

    links = [len(gpu.links) for gpu in accelerators()]
    if len(links) < 2:
        return Finding("NVLink", None, "fewer than two GPUs")
    text = f"{min(links)} to {max(links)} links up on each GPU"
    return Finding("NVLink", min(links) > 0 or None, text, "without NVLink GPUs reach each other over PCIe, slowly")


def _peer_access() -> Finding:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return Finding("peer access", None, "fewer than two GPUs")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    text = f"{len(pairs) - len(without)} of {len(pairs)} pairs" + (f", not {without[0]}" if without else "")
    return Finding("peer access", not without, text, "nvidia-smi topo -p2p r says why; in virtual machines, ACS is one")


def _heap(provider: str, hosts: int) -> Finding:
    import torch

    from tilescale.comm.heap.provider import PROVIDERS

    entry = PROVIDERS[provider]
    name = f"heap {provider}" if hosts == 1 else "fabric handles"
    if entry.device_type != "cpu" and not torch.cuda.is_available():
        return Finding(name, None, "no GPU")
    objection = entry.load().objection(torch.device(entry.device_type, 0), hosts)
    if objection is None:
        return Finding(name, True, f"symmetric memory on {'one host' if hosts == 1 else 'several hosts'}")
    return Finding(name, None if hosts > 1 else False, objection.message, objection.hint or "")


def _nccl() -> Finding:
    import torch

    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return Finding("NCCL", None, "not in use without GPUs")
    return Finding("NCCL", True, ".".join(map(str, torch.cuda.nccl.version())))


def _nvshmem_transports() -> Finding:
    from tilescale.backends import device_services

    try:
        libraries = (device_services().library() / "lib").glob("nvshmem_transport_*")
    except DependencyError as error:
        return Finding("NVSHMEM", None, error.message, error.hint or "")
    found = sorted(path.name.split(".")[0].split("_")[-1] for path in libraries)
    text = f"installed: {', '.join(found) or 'none'}; NVSHMEM_DEBUG=INFO says which one a job takes"
    return Finding("NVSHMEM", bool(found), text, "without one NVSHMEM leads to no other host")


def _adapters() -> Finding:
    ports = sorted(_INFINIBAND.glob("*/ports/*/state"))
    if not ports:
        remedy = "between hosts NCCL goes by sockets then, NVSHMEM does not go; ibv_devinfo shows whether drivers run"
        return Finding("adapters", None, "no InfiniBand or RoCE", remedy)
    down = [path.parts[-4] for path in ports if "ACTIVE" not in path.read_text(encoding="ascii")]
    text = f"{len(ports) - len(down)} of {len(ports)} ports are active" + (f", not that of {down[0]}" if down else "")
    return Finding("adapters", not down, text, "ibstat says why: a cable, or no subnet manager")


def _binding() -> Finding:
    """Cores and adapters that ranks would be bound to if they had all GPUs of this machine."""
    from tilescale.comm.binding import binding_of
    from tilescale.hda.nvml import accelerators

    gpus = len(accelerators())
    ports = binding_of({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(gpus)}).adapters.ports if gpus else ()
    if not ports:
        text = "no adapter is nearer to a GPU than others are: NCCL and NVSHMEM choose" if gpus else "no GPU"
        return Finding("binding", None, text, "nvidia-smi topo -m shows what is where; NCCL_IB_HCA names adapters")
    text = ", ".join(f"GPU {gpu} - {' and '.join(own)}" for gpu, own in enumerate(ports))
    return Finding("binding", True, f"adapters of tilescale bind: {text}")


def _mpi() -> Finding:
    # In a separate process: loading MPI starts it, which can end a process that no mpirun has started.
    code = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=_MPI_WITHIN_S, check=False
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        return Finding("MPI", None, said, "pip install mpi4py mpich, for jobs under mpirun")
    mpirun = shutil.which("mpirun")
    text = f"{done.stdout.strip()}, {mpirun or 'no mpirun'}"
    return Finding("MPI", mpirun is not None, text, "put mpirun on the PATH")


def _compiler() -> Finding:
    from tilescale.backends import device_services

    program = device_services().compiler()
    if program is None:
        return Finding("compiler", None, "no nvcc", "pip install nvidia-cuda-nvcc, or set CUDA_HOME, to run on GPUs")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return Finding("compiler", True, f"{program}, {said.strip().splitlines()[-2]}")


def _cache() -> Finding:
    from tilescale.backends import device_services

    device_services().check_cache()
    return Finding("kernel cache", True, "no other user can write to it")


def _descriptors() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding("descriptors", soft >= _DESCRIPTORS, f"{soft} files a process", f"ulimit -n {_DESCRIPTORS} or more")
