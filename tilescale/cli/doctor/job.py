# SPDX-License-Identifier: MIT
"""Checks that all ranks of a job make together: reachable peers, resources of each rank, clock offsets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

from tilescale.cli.doctor.finding import Finding, ask
from tilescale.comm import SymmetricHeap, World
from tilescale.errors import TileScaleError

_ADAPTERS = ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NVSHMEM_HCA_PE_MAPPING", "UCX_NET_DEVICES")
_CONNECT_WITHIN_S = 5.0
_NCCL_WITHIN_S = 30.0
_MOST_SKEW_S = 1.0
_ROUNDS = 20


def findings(world: World) -> Iterator[Finding]:
    """All checks. Collective; every rank gets the same findings."""
    names = world.all_gather(socket.gethostname())
    yield Finding("ranks", True, f"{world.size}, started by {world.launcher}, on {', '.join(dict.fromkeys(names))}")
    checks: dict[str, Callable[[World], Finding]] = {
        "devices": _devices,
        "binding": _binding,
        "ports": _ports,
        "store": _store,
        "clocks": _clocks,
        "heap": _heap,
        "NCCL": _nccl,
    }
    for name, check in checks.items():
        yield ask(name, partial(check, world))


def _devices(world: World) -> Finding:
    try:
        own, error = str(world.device), None
    except TileScaleError as found:
        own, error = "", found
    heard = world.all_gather((own, error))
    wrong = [(rank, error) for rank, (_, error) in enumerate(heard) if error is not None]
    if wrong:
        rank, error = wrong[0]
        return Finding("devices", False, f"rank {rank}: {error.message}", error.hint or "")
    kinds = {device.partition(":")[0] for device, _ in heard}
    text = ", ".join(f"rank {rank} on {device}" for rank, (device, _) in enumerate(heard))
    return Finding("devices", len(kinds) == 1, text, "all ranks need GPUs, or none: TILESCALE_EMULATE=1 uses none")


def _binding(world: World) -> Finding:
    """Cores and adapters that each rank is bound to, by `tilescale bind` or otherwise."""
    heard = world.all_gather((len(os.sched_getaffinity(0)), {name: os.environ.get(name) for name in _ADAPTERS}))
    lists = {(world.node_of[rank], variables["NCCL_IB_HCA"]) for rank, (_, variables) in enumerate(heard)}
    said = [{name: text for name, text in variables.items() if text is not None} for _, variables in heard]
    text = "; ".join(
        " ".join([f"rank {rank}: {cores} cores", *(f"{name}={value}" for name, value in said[rank].items())])
        for rank, (cores, _) in enumerate(heard)
    )
    if len(lists) > world.nodes:
        remedy = "NCCL needs the same NCCL_IB_HCA in all ranks of a node: leave it to tilescale bind"
        return Finding("binding", False, text, remedy)
    return Finding("binding", True if any(said) else None, text, "tilescale bind, where there are GPUs and adapters")


def _ports(world: World) -> Finding:
    """Every rank connects to every other one, at the address of its host's name, on a port that it has just opened."""
    with socket.create_server(("", 0), backlog=world.size) as listener:
        addresses = world.all_gather((socket.gethostname(), listener.getsockname()[1]))
        refused = [peer for peer in range(world.size) if peer != world.rank and not _reaches(addresses[peer])]
        heard = world.all_gather(refused)
    pairs = [f"{rank} -> {peer}" for rank, peers in enumerate(heard) for peer in peers]
    if not pairs:
        return Finding("ports", True, "every rank reaches every other one")
    return Finding(
        "ports",
        False if world.nodes > 1 else None,
        f"ranks do not reach each other: {', '.join(pairs[:8])}",
        "names of hosts must stand for addresses that the other hosts reach, and no firewall be between",
    )


def _reaches(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_CONNECT_WITHIN_S).close()
        return True
    except OSError:
        return False


def _store(world: World) -> Finding:
    world.barrier()
    begin = time.perf_counter()
    for _ in range(_ROUNDS):
        world.store.check(["doctor"])
    own = (time.perf_counter() - begin) / _ROUNDS
    slowest = max(world.all_gather(own))
    return Finding("store", slowest < 0.1, f"answers within {slowest * 1e6:.0f} us", "the network to rank 0 is slow")


def _clocks(world: World) -> Finding:
    """A lower bound of two ranks' clock difference, from the times at which both left a barrier."""
    apart = []
    for _ in range(3):
        world.barrier()
        heard = world.all_gather(time.time())
        apart.append(max(heard) - min(heard))
    skew = min(apart)
    return Finding("clocks", skew < _MOST_SKEW_S, f"at most {skew:.3f} s apart", "start NTP or chrony on all hosts")


def _heap(world: World) -> Finding:
    """A tensor of each rank, read by each of its node."""
    import torch

    team = world.team("node")
    with SymmetricHeap(team, world.device) as heap:
        tensor = heap.from_tensor(torch.tensor([world.rank], dtype=torch.int32, device=world.device))
        everywhere = heap.peers(tensor)
        seen = [int(everywhere[heap.addresses.slot(peer)].item()) for peer in range(team.size)]
        heard = world.all_gather(seen == list(team.ranks))
        name = heap.provider
        del tensor, everywhere
    whose = "every other one's memory" + (" on its node" if world.nodes > 1 else "")
    return Finding("heap", all(heard), f"{name}: every rank reads {'' if all(heard) else 'not '}{whose}")


def _nccl(world: World) -> Finding:
    """The numbers of all ranks, added up by NCCL, which may find no way and wait for ever."""
    if world.device.type == "cpu":
        return Finding("NCCL", None, "not in use without GPUs")
    from tilescale.backends import device_services

    found: list[float] = []
    try:
        ended = device_services().runs_within(lambda: found.append(_added_up(world)), _NCCL_WITHIN_S)
        said = "" if ended else f"no result within {_NCCL_WITHIN_S:g} s"
    except RuntimeError as error:
        said = " ".join(str(error).split())
    if said:
        device_services().abort()
    heard = world.all_gather(said or ("" if found == [world.size * (world.size - 1) / 2] else f"a wrong sum: {found}"))
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(heard) if text]
    return Finding(
        "NCCL",
        not wrong,
        wrong[0] if wrong else "an all-reduce of all ranks is right",
        "NCCL_DEBUG=INFO says which interfaces and adapters it takes; tilescale bind --show python -V, which it should",
    )


def _added_up(world: World) -> float:
    import torch
    import torch.distributed as dist

    from tilescale.backends import device_services

    torch.cuda.set_device(world.device)
    number = torch.full((1,), float(world.rank), device=world.device)
    dist.all_reduce(number, group=device_services().group(world))
    return number.item()
