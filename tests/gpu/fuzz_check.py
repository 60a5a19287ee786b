# SPDX-License-Identifier: MIT
"""Random programs on GPUs against the emulator's values: `python tests/gpu/fuzz_check.py [programs [seconds [seed]]]`.

ONE PROCESS that starts workers: most for programs of one device, each on one GPU, some for programs of two. A worker
takes seed after seed until enough programs are right or the time is up: it generates the program, emulates it with all
checks, compiles it with delays for its warps, and compares all tensors bit for bit, call after call, outputs poisoned
first. Texts that workers wait for are compiled together. What the emulator does not accept or the back end refuses by
name is not counted. A program that fails is printed with its seed, smaller if that is cheap.
`python tests/gpu/fuzz_check.py seeds DEVICES SEED ...` runs some.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from tilelang.contrib import nvcc

sys.path.insert(0, str(Path(__file__).parents[2]))

import tilescale  # noqa: E402
from tests.fuzz.compiler import SharedCompiler, compile_at  # noqa: E402
from tests.fuzz.generator import generate  # noqa: E402
from tests.fuzz.program import Fuzzed, smaller  # noqa: E402
from tests.fuzz.skew import skewed  # noqa: E402
from tests.gpu.limits import bounded  # noqa: E402
from tilelang_core.modules import COMPILE, with_flags  # noqa: E402
from tilescale.backends.processes import cores  # noqa: E402
from tilescale.errors import TileScaleError  # noqa: E402

PROGRAMS, SECONDS = 500, 200.0
"""Number of programs, and seconds within which all of them must pass on 16 cores."""
EACH_S, GRACE_S = 60.0, 3.0
"""Seconds that one program may take, and that workers take to end."""
CALLS = (0, 1, 0)
"""Inputs of each call of a program."""


class Refused(Exception):
    """No comparison: the program is not accepted, or not supported on GPUs."""


def check(program: Fuzzed) -> None:
    """Call a program several times and compare with the emulator. Raises Refused, and any other error."""
    rank = tilescale.init().rank
    try:
        func = program.trace()
        first, *others = sorted(set(CALLS))
        expected = {first: program.emulated(first, func=func)[rank]}
        expected |= {call: program.emulated(call, check="none", func=func)[rank] for call in others}
        kernel = tilescale.compile(func, schedule="sequential")
        kernel.prepare()
    except TileScaleError as error:
        raise Refused(type(error).__name__) from error
    for number, call in enumerate(CALLS):
        mine = [x.cuda() for x in program.arguments(call)[rank]]
        torch.cuda.synchronize()
        kernel(*mine)
        kernel.synchronize()
        torch.cuda.synchronize()
        for parameter, found, wanted in zip(program.parameters, mine, expected[call], strict=True):
            wrong = found.cpu() != wanted
            if wrong.any():
                first = tuple(int(i) for i in wrong.nonzero()[0])
                raise AssertionError(
                    f"call {number}: {int(wrong.sum())} of {wrong.numel()} elements of {parameter.name} differ, "
                    f"{first} first: {float(found.cpu()[first]):g}, expected {float(wanted[first]):g}"
                )


def is_wrong(program: Fuzzed) -> bool:
    """Whether its results differ on a GPU."""
    try:
        check(program)
    except AssertionError:
        return True
    except Exception:
        return False
    return False


def delay_warps(compiler: str | None) -> None:
    """From now on nvcc gets texts with delays, behind the checks of texts; by the shared compiler of an address.

    It optimizes them less: that takes a third of the time, and the order of a text is the same.
    """
    compile_text = tvm_ffi.get_global_func(COMPILE)
    flags = ("-Xcicc=-O1", "-Xptxas=-O1")
    delayed = lambda text, target, given=None: compile_text(skewed(text), target, with_flags(given, flags))  # noqa: E731
    tvm_ffi.register_global_func(COMPILE, delayed, override=True)
    if compiler:
        ask = compile_at(compiler)
        nvcc.compile_cuda = lambda text, *given, **named: bytearray(ask(text, (given, named)))


def run(devices: int, seeds: Iterator[int]) -> None:
    """A worker: prints a line for each program."""
    delay_warps(os.environ.get("FUZZ_COMPILER"))
    world = tilescale.init()
    torch.cuda.set_device(world.device)
    for seed in seeds:
        program = generate(seed, devices)
        with bounded(program.name, EACH_S):
            verdict = _verdict(program)
        print(f"{verdict} {program.name} (rank {world.rank})", flush=True)
        if any(world.all_gather(verdict.startswith("WRONG"))):
            _explain(program, verdict, world)


def _verdict(program: Fuzzed) -> str:
    try:
        check(program)
    except Refused as refused:
        return f"REFUSED {refused}"
    except Exception as error:
        return f"WRONG {type(error).__name__}: {error}".replace("\n", " ")[:600]
    return "RIGHT"


def _explain(program: Fuzzed, verdict: str, world: Any) -> None:
    if world.size == 1 and "AssertionError" in verdict:
        with contextlib.suppress(Exception), bounded(f"{program.name}, smaller", 2 * EACH_S):
            end = time.time() + EACH_S / 2
            program = smaller(program, lambda candidate: time.time() < end and is_wrong(candidate), tries=60)
    if world.rank == 0:
        print(f"FAIL {program.name}: {verdict}\n{program.source}", flush=True)
    if "Assertion" not in verdict:
        os._exit(4)  # the GPU's context may be lost


@dataclass
class Tally:
    """Results of workers so far; errors are printed as they come."""

    count: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, devices: int, line: str) -> None:
        """A line of a worker."""
        with self.lock:
            verdict = re.match(r"(RIGHT|WRONG|REFUSED \w+).*\(rank 0\)", line)
            if verdict is not None:
                self.count[f"{devices} device(s): {verdict[1]}"] += 1
            if not re.match("RIGHT|REFUSED|INFO", line):
                print(line, flush=True)

    def of(self, word: str) -> int:
        """Number of programs of all workers."""
        with self.lock:
            return sum(times for what, times in self.count.items() if word in what)

    def say(self, seconds: float) -> None:
        print(f"INFO {seconds:.0f} s, {dict(sorted(self.count.items()))}", flush=True)


@dataclass
class Supervisor:
    """A worker, which restarts after a program that ends it: seeds from `seed` on, every `step`-th one."""

    devices: int
    seed: int
    step: int
    env: dict[str, str]
    tally: Tally
    process: subprocess.Popen[str] | None = None
    ended: bool = False

    def run(self) -> None:
        """Start the worker until it ends, or is ended."""
        port = f"--master-port={29700 + 20 * (self.seed % self.step)}"
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.devices}", port]
        seed = self.seed
        while not self.ended:
            command = [*(launcher if self.devices > 1 else launcher[:1]), __file__, "worker"]
            self.process = subprocess.Popen(
                [*command, *map(str, (self.devices, seed, self.step))], stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, env={**os.environ, **self.env}, start_new_session=True,
            )  # fmt: skip
            begun = None
            for line in self.process.stdout or ():
                if not self.ended:
                    self.tally.add(self.devices, line.rstrip("\n"))
                found = re.match(rf"INFO begins: fuzz_{self.devices}_(\d+)$", line)
                begun = int(found[1]) if found else begun
            self.process.wait()
            if begun is None:
                return
            seed = begun + self.step

    def end(self) -> None:
        """End it and all its processes."""
        self.ended = True
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)


def supervisors(first: int, tally: Tally, compiler: str) -> list[Supervisor]:
    """Two workers for each core, as half of them wait for the compiler; an eighth of them for two devices.

    Where there is one GPU, all workers share it.
    """
    gpus, workers = torch.cuda.device_count(), max(2, 2 * cores())
    pairs = max(1, workers // 16)
    env = {"TILESCALE_HEAP_BYTES": "64MiB", "OMP_NUM_THREADS": "1", "TILELANG_DISABLE_CACHE": "1"}
    env["FUZZ_COMPILER"] = compiler
    alone = max(1, workers - 2 * pairs)
    found = [
        Supervisor(1, first + n, alone, {**env, "CUDA_VISIBLE_DEVICES": str(n % gpus)}, tally) for n in range(alone)
    ]
    two = {**env, "CUDA_VISIBLE_DEVICES": "0,1"} if gpus > 1 else {**env, "TILESCALE_SHARE_GPUS": "1"}
    return [*found, *(Supervisor(2, first + n, pairs, two, tally) for n in range(pairs))]


def main() -> int:
    """Start all workers, and sum up."""
    programs = int(sys.argv[1]) if len(sys.argv) > 1 else PROGRAMS
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    tally, begin = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        compile_text = nvcc.compile_cuda
        compiler = SharedCompiler(
            f"{folder}/compiler", lambda text, given: bytes(compile_text(text, *given[0], **given[1])),
            max(1, cores() // 2),
        )  # fmt: skip
        workers = supervisors(first, tally, compiler.address)
        for one in workers:
            threading.Thread(target=one.run, daemon=True).start()
        while tally.of("RIGHT") < programs and time.monotonic() - begin < seconds:
            time.sleep(1)
            if (passed := int(time.monotonic() - begin)) % 10 == 0:
                tally.say(passed)
        for one in workers:
            one.end()
        time.sleep(GRACE_S)
    right, wrong = tally.of("RIGHT"), tally.of("WRONG")
    ok = not wrong and right >= programs
    print(f"{'PASS' if ok else 'FAIL'} {right} of {right + wrong} random programs compute what the emulator does")
    return 0 if ok else 1


def worker() -> None:
    """Command line of a worker."""
    if sys.argv[1] == "seeds":
        return run(int(sys.argv[2]), iter(map(int, sys.argv[3:])))
    devices, first, step = (int(given) for given in sys.argv[2:])
    run(devices, itertools.count(first, step))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ("worker", "seeds"):
        worker()
    else:
        code = main()
        sys.stdout.flush()
        os._exit(code)  # remaining processes of the workers
