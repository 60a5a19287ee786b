# SPDX-License-Identifier: MIT
"""The whole GPU verification, as jobs of this computer's GPUs; `gpu_check.sh` sets the environment.

Every step is a job with a time limit. Most of a step is compilation on the host, so several run at a time. Scripts
print lines `PASS name` and `FAIL name: why`; pytest its own summary. Outcomes go to one file, gpu_checks.json, in the
place of earlier ones of the same steps and ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import click
import torch
from jobs import stop

from tilescale.tuning.race import record
from tilescale.tuning.versions import machine, versions

ROOT = Path(__file__).parent.parent
LIMITS = {"device_phases": 360, "never_hang": 240, "cluster_check": 240, "thread_groups_check": 400,
          "overlap_check": 400, "collectives_check": 300, "ops_check": 420, "nodes_check": 450, "nvshmem_check": 300,
          "schedules_check": 400, "float8_check": 400, "tile_sums_check": 300, "flags_check": 240,
          "bits_check": 240, "endurance_check": 240, "fuzz_check": 240, "attention_check": 420,
          "peer_atomics": 300, "prefetch_check": 240, "dynamic_check": 300, "messages_check": 300,
          "moe_check": 300, "moe_float8_check": 300, "order_check": 300, "decode_check": 300}  # fmt: skip
"""Seconds of scripts that need more than 150: about twice their time next to others, as hosts differ as much."""
PARTS = Counter(ops_check=4, attention_check=2, messages_check=2)
"""Number of jobs that a script's checks are divided into, as each of them compiles for long."""
WORDS = {"fuzz_check": "100"}
"""Arguments of scripts: 100 random programs next to other jobs, 500 alone."""
LOGS = ROOT / "build/gpu_check"
EXAMPLES = sorted(p.name for p in (ROOT / "examples/distributed").glob("[0-9]*.py"))
DEVICES = {"16_cannon.py": (1, 4), "19_two_nodes.py": (), "20_wafer_mesh.py": (), "21_stacked_dram.py": ()}
"""Numbers of GPUs of one server for examples that do not take all."""
ALONE = ("never_hang",)
"""Scripts that need the GPUs exclusively, as they time."""
UNSHARED = ("nodes_check", "never_hang", "nvshmem", "sanitizer", "one device", "symm_mem_check")
"""Steps that need a GPU for each rank: those that time, and those of NVSHMEM and of NCCL."""
SHARED_LONGER = 2
"""Factor of a step's time limit where ranks share GPUs, which are time-sliced for milliseconds each."""
REPEATED = {
    "emulator's tests, one device": """emulator/test_accesses.py emulator/test_branches.py emulator/test_clusters.py
        emulator/test_thread_group_exchanges.py emulator/test_thread_groups.py emulator/test_phases.py
        emulator/test_plain_kernels.py
        emulator/checks language/test_programs.py language/test_exchange.py language/test_scale.py""",
    "emulator's tests of copies and collectives": "emulator/test_remote_copy.py emulator/test_collectives.py",
    "emulator's other tests": """emulator/test_phases.py emulator/test_thread_groups.py emulator/test_clusters.py
        emulator/checks language/test_programs.py language/test_exchange.py language/test_scale.py""",
    "exercises": "test_learn.py::test_a_solution_is_right",
}
"""Tests whose emulations GPUs repeat, with the same results."""


@dataclass(frozen=True)
class Step:
    """A job: its name, command, and time limit in seconds; `alone` if it must not share the GPUs with others."""

    name: str
    command: list[str]
    limit_s: float
    alone: bool = False


@dataclass
class Outcome:
    """Outcome of a job.

    Attributes:
        ranks, gpus: their numbers.
        passed, failed, skipped: numbers of its checks.
        failures: the first ones, a line each.
    """

    name: str
    ranks: int
    gpus: int
    ok: bool
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)


def steps(devices: int, shared: bool) -> list[Step]:
    """All jobs of `devices` ranks; `shared`: on fewer GPUs."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    mpirun = ["mpirun", "-n", str(devices), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    launchers = (("torchrun", torchrun), ("mpirun", [*mpirun, sys.executable]))
    result = _checks(torchrun)
    for launcher, command in launchers[: 1 if shared else 2]:
        names = [name for name in EXAMPLES if devices in DEVICES.get(name, (devices,))]
        result += [Step(f"{name} ({launcher})", [*command, f"examples/distributed/{name}"], 150) for name in names]
    demo = [sys.executable, "-c", "from tilescale.cli import main; main()", "run", "-n", str(devices)]
    result.append(Step("the demo by tilescale run", [*demo, "examples/distributed/08_tp_gemm.py"], 150))
    if not shared:
        return result
    able = [step for step in result if not any(word in step.name for word in UNSHARED)]
    return [replace(step, limit_s=SHARED_LONGER * step.limit_s) for step in able]


def _checks(torchrun: list[str]) -> list[Step]:
    """Scripts of tests/gpu, and tests that GPUs repeat."""
    result = []
    for name, places in REPEATED.items():
        job = [sys.executable, "-m", "pytest", "-n", "6"] if "one device" in name else [*torchrun, "-m", "pytest"]
        plugin = ["-q", "-p", "no:cacheprovider", "-p", "tests.gpu.plugin", "-rf"]
        result.append(Step(name, [*job, *plugin, *(f"tests/{place}" for place in places.split())], 440))
    for provider in ("cuda_vmm", "nvshmem"):
        # Alone: it looks for leaks in the memory that is left on the GPU.
        result.append(Step(f"heap {provider}", [*torchrun, "tests/gpu/heap_check.py", provider], 110, alone=True))
    for script in sorted((ROOT / "tests/gpu").glob("*.py")):
        text = script.read_text()
        if "__main__" in text and script.name != "heap_check.py":
            command = [*([sys.executable] if "ONE PROCESS" in text else torchrun), f"tests/gpu/{script.name}"]
            for part in [f"{n + 1}/{PARTS[script.stem]}" for n in range(PARTS[script.stem])] or [""]:
                name, words = f"{script.stem} {part}".strip(), [*command, *WORDS.get(script.stem, part).split()]
                result.append(Step(name, words, LIMITS.get(script.stem, 150), script.stem in ALONE))
    for part in ("1/3", "2/3", "3/3"):  # most of its programs are for one device
        groups = [sys.executable, "tests/gpu/thread_groups_check.py", part]
        result.append(Step(f"thread_groups_check, one device, {part}", groups, 400))
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if Path(sanitizer).exists():
        # Errors of the driver's interface are not errors of kernels: bindings ask for functions that it lacks.
        options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
        small = [sanitizer, *options, sys.executable]
        result.append(Step("sanitizer, a cluster", [*small, "tests/gpu/cluster_check.py", "one stage"], 200))
        result.append(Step("sanitizer, warpgroups", [*small, "tests/gpu/thread_groups_check.py", "couriers"], 200))
        racing = [sanitizer, "--tool", "racecheck", "--error-exitcode", "9", sys.executable, "tests/gpu/fuzz_check.py"]
        result.append(Step("sanitizer, random programs", [*racing, "seeds", "1", *map(str, range(10))], 200))
        job = [sanitizer, *options, "--target-processes", "all", *torchrun]
        result.append(Step("sanitizer, devices", [*job, "tests/gpu/device_phases.py", "mixed", "tiles dst"], 200))
    return result


_RUNNING: set[subprocess.Popen] = set()
"""Jobs that have sessions of their own: they outlive this process unless it ends them."""


def end(*_: object) -> None:
    """End all jobs and this process, on SIGTERM. Outcomes so far are in the file."""
    for process in list(_RUNNING):
        os.killpg(process.pid, signal.SIGTERM)
    os._exit(128 + signal.SIGTERM)


def run(step: Step, log: Path, ranks: int) -> Outcome:
    """Run a job and read its output; a job that hangs is killed with all its processes."""
    begin = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(step.command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        _RUNNING.add(process)
        try:
            code = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            code = stop(process)
        _RUNNING.discard(process)
    text = log.read_text(errors="replace").replace(f"{ROOT}/", "")
    failures = re.findall(r"^.*\bFAIL(?:ED)?\b.*$", text, re.MULTILINE)
    passed = len(re.findall(r"\bPASS\b", text)) + _pytest_count(text, "passed")
    seconds = round(time.monotonic() - begin, 1)
    outcome = Outcome(
        step.name, ranks, min(ranks, torch.cuda.device_count()), code == 0 and not failures, seconds, passed
    )
    outcome.failed, outcome.skipped = len(failures), _pytest_count(text, "skipped")
    outcome.failures = failures[:8] if failures or code == 0 else [f"exit code {code}", *text.splitlines()[-6:]]
    outcome.failures += re.findall(r"^.*(?:\bSignal \d+|terminate called|what\(\)).*$", text, re.MULTILINE)[:4]
    return outcome


def _pytest_count(text: str, word: str) -> int:
    counts = [int(n) for n in re.findall(rf"(\d+) {word}", text)]
    return max(counts, default=0)


_SHOWING = threading.Lock()
"""Prints and writes the outcomes of jobs."""


def show(outcome: Outcome) -> None:
    """Print the outcome of a job."""
    mark = "ok  " if outcome.ok else "FAIL"
    counts = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
    print(f"{mark} {outcome.seconds:6.1f} s  {outcome.name}: {counts}", flush=True)
    for line in outcome.failures:
        print(f"       {line[:300]}", flush=True)


@click.command()
@click.option("--devices", type=int, default=None, help="Ranks; more than GPUs share them.  [default: all GPUs]")
@click.option("--only", default="", help="Run only steps in whose name this regular expression is found.")
@click.option("--out", type=Path, default=ROOT / "benchmarks/results", show_default=True, help="Folder of the JSON.")
@click.option("--budget", default=420, show_default=True, help="Seconds after which no further step starts.")
@click.option("--jobs", default=8, show_default=True, help="Steps that run at a time.")
def main(devices: int | None, only: str, out: Path, budget: float, jobs: int) -> None:
    """Run every GPU check and write the outcome as JSON."""
    signal.signal(signal.SIGTERM, end)
    gpus = torch.cuda.device_count()
    devices = devices or gpus
    if devices > gpus:
        os.environ["TILESCALE_SHARE_GPUS"] = "1"
    out.mkdir(parents=True, exist_ok=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    wanted, begin = [step for step in steps(devices, devices > gpus) if re.search(only, step.name)], time.monotonic()
    outcomes: list[Outcome] = []

    def do(step: Step) -> None:
        if time.monotonic() - begin > budget:
            outcome = Outcome(
                step.name, devices, min(devices, gpus), False, 0.0, failures=["not run: the budget is spent"]
            )
        else:
            outcome = run(step, LOGS / (re.sub(r"\W+", "_", step.name) + ".log"), devices)
        with _SHOWING:
            show(outcome)
            outcomes.append(outcome)
            write([outcome], out / "gpu_checks.json")  # now, as the run may be killed

    for step in (step for step in wanted if step.alone):
        do(step)
    # Long ones first: the short ones then fill the gaps.
    others = sorted((step for step in wanted if not step.alone), key=lambda step: -step.limit_s)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(do, others))
    sys.exit(0 if outcomes and all(o.ok for o in outcomes) else 1)


def write(outcomes: Sequence[Outcome], path: Path) -> None:
    """Add outcomes to the results file."""
    key = lambda row: (row["name"], row["ranks"], row["gpus"])  # noqa: E731
    record(path, [asdict(o) for o in outcomes], machine(), versions(), same=lambda a, b: key(a) == key(b))


if __name__ == "__main__":
    main()
