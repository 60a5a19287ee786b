# SPDX-License-Identifier: MIT
"""Break jobs by every known fault, and record the errors of their ranks and the time until them.

    python benchmarks/faults.py [--only WORD]      prints the table; with UPDATE_DOCS=1 it goes into docs/faults.md

Needs Linux and no GPU; the faults of the network need root and `ip`, that of the cache root, those of MPI an MPICH in
Python's environment, and an Open MPI in the folder OPEN_MPI, or in /usr. The time is measured inside the job, from the
fault to the error on the last surviving rank: all processes of a host share CLOCK_MONOTONIC.
After each job the script checks that no process or file of it is left.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from broken_jobs import (
    HANGS,
    ROOT,
    alive,
    launched,
    launcher_killed,
    network,
    one_port,
    output_gone,
    started_again,
    under_mpirun,
    with_full_cache,
)

PAGE = ROOT / "docs" / "faults.md"
MARK = "<!-- what follows is written by benchmarks/faults.py -->\n"
TIMEOUT_S = 5

PRELUDE = """
import os, resource, signal, socket, subprocess, sys, threading, time
def say(*words): os.write(1, (" ".join(map(str, (*words, time.monotonic()))) + "\\n").encode())
say("PID", os.getpid())
os.environ.setdefault("TILESCALE_TIMEOUT_S", "{timeout}")
"""
JOIN = """
import torch
from tilescale import comm
world = comm.init()
world.barrier()
rank = world.rank
"""
WAIT = """
world.barrier()
say("REACHED")
"""
SAY = """
except BaseException as error:
    if not isinstance(error, ValueError | SystemExit):  # those are the fault
        say("ERROR", type(error).__name__ + ":", " ".join(str(error).split()), "|")
    raise
"""


@dataclass(frozen=True)
class Fault:
    """A fault in a job.

    Attributes:
        name: for the table.
        does: code of the ranks after the rendezvous, before a barrier; it calls `say("FAULT")` at the fault.
        before: code of the ranks before they join.
        timeout_s: TILESCALE_TIMEOUT_S of the job.
        run: runs the job from its script; returns all output.
    """

    name: str
    does: str
    before: str = ""
    timeout_s: int = 600
    run: Callable[[Path], str] = field(default=lambda script: launched(script))


@dataclass(frozen=True)
class Row:
    """Outcome of a fault: seconds until the last rank was notified, and the ranks' errors."""

    name: str
    seconds: float
    said: str


MEETS_LATE = "say('READY')\ntime.sleep(1)"
PROGRAM = """
import tilescale, tilescale.language as T
def shifted(n, devices=3):
    @T.prim_func
    def program(X: T.Tensor((n,), "float32")):
        with T.Kernel(device=devices):
            with T.Scale("device"): T.allreduce(X)
    return tilescale.compile(program)
"""
KILLED = "if rank == 1: say('FAULT'); os.kill(os.getpid(), signal.SIGKILL)"
FAULTS = [
    Fault("a rank raises an exception", "if rank == 1: say('FAULT'); raise ValueError('no more tea')"),
    Fault("a rank's script ends", "if rank == 1: say('FAULT'); sys.exit(3)"),
    Fault("a rank is killed", KILLED),
    Fault("a rank is killed under mpirun (MPICH)", KILLED, run=under_mpirun(sys.prefix)),
    Fault("a rank is killed under mpirun (Open MPI)", KILLED, run=under_mpirun(os.environ.get("OPEN_MPI", "/usr"))),
    Fault("rank 0 is killed", "if rank == 0: say('FAULT'); os.kill(os.getpid(), signal.SIGKILL)"),
    Fault("a rank is stopped (SIGSTOP)", "if rank == 1: say('FAULT'); os.kill(os.getpid(), signal.SIGSTOP)",
          timeout_s=TIMEOUT_S),
    Fault("rank 0 is stopped (SIGSTOP)", "if rank == 0: say('FAULT'); os.kill(os.getpid(), signal.SIGSTOP)",
          timeout_s=TIMEOUT_S),
    Fault("a rank calls something else", "say('FAULT')\nif rank == 1: world.gather(1)"),
    Fault("a rank fails in a call before it takes part", """
say('FAULT')
if rank == 1:
    try: world.broadcast(0, root=9)
    except Exception: time.sleep(1); sys.exit(1)
"""),
    Fault("a rank is interrupted in a call, and its script goes on", """
if rank == 0:
    threading.Timer(0.5, lambda: (say('FAULT'), os.kill(os.getpid(), signal.SIGINT))).start()
    try: world.gather(0)
    except KeyboardInterrupt: time.sleep(2); sys.exit(1)
else:
    time.sleep(1)
    world.gather(0)
"""),
    Fault("a rank forks, and the child calls a collective", """
if rank == 1 and os.fork() == 0:
    say('FAULT')
    try: world.barrier()
    except BaseException as error: say('ERROR', 'the child:', ' '.join(str(error).split()), '|')
    os._exit(0)
"""),
    Fault("a rank starts a program that joins as this rank", """
if rank == 1:
    code = 'import time, torch; from tilescale import comm; print("FAULT", time.monotonic(), flush=True); comm.init()'
    said = subprocess.run([sys.executable, '-c', code], stderr=subprocess.PIPE, text=True).stderr
    said = said[said.rindex('LaunchError'):]
    say('ERROR', 'the program:', ' '.join(said.split()), '|')
"""),
    Fault("ranks run different versions", "", """
import importlib.metadata, torch, tilescale.comm.world
own, found = importlib.metadata.version, sys.modules['tilescale.comm.world']
if os.environ['RANK'] == '1': found.version = lambda name: '9.9' if name == 'torch' else own(name)
say('FAULT')
"""),
    Fault("ranks call different programs", f"""{PROGRAM}
say('FAULT')
shifted(16 + rank)(torch.zeros(16 + rank))
"""),
    Fault("ranks describe different machines", f"""{PROGRAM}
say('FAULT')
shifted(16)(torch.zeros(16))
""", "\nos.environ['TILESCALE_MACHINE'] = ['h200-sxm-8', 'h100-sxm-8'][os.environ['RANK'] == '1']\n"),
    Fault("there are more ranks than the program launches", f"""{PROGRAM}
say('FAULT')
shifted(16, devices=2)(torch.zeros(16))
"""),
    Fault("a rank sees fewer GPUs than there are ranks on its node", """
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1 if rank == 1 else 3
say('FAULT')
world.device
"""),
    Fault("the heap is full", """
say('FAULT')
comm.zeros(1 << 40, torch.float32)
""", "\nos.environ['TILESCALE_HEAP_BYTES'] = '64MiB'\n"),
    Fault("a rank runs out of descriptors while the heap grows", """
comm.zeros(1, torch.float32)
say('FAULT')
if rank == 1: resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')),) * 2)
comm.zeros(8 << 20, torch.float32)
"""),
    Fault("the disk of the cache is full", """
import tilescale, tilescale.language as T
@tilescale.autotune(configs={"threads": [32, 64]})
@tilescale.jit
def doubled(n, threads=32):
    @T.prim_func
    def double(X: T.Tensor((n,), "float32")):
        with T.Kernel(n // 64, threads=threads) as block:
            for i in T.Parallel(64): X[block * 64 + i] *= 2
    return double
say('FAULT')
doubled.tune(128)
""", run=with_full_cache),
    Fault("the home of a rank is read-only", "import tilescale.language", """
if os.environ['RANK'] == '1': os.environ['HOME'] = '/dev/null'
say('FAULT')
"""),
    Fault("another user has planted a link in the cache", """
import shutil
from pathlib import Path
from tilescale.backends.cuda.running.toolchain import objection
from tilescale.errors import UntrustedCacheError
cache = Path(os.environ['TMPDIR']) / 'cache'
if rank == 0:
    cache.mkdir()
    (cache / 'kernels').symlink_to('/etc')
    os.lchown(cache / 'kernels', 65534, 65534)
world.barrier()
say('FAULT')
found = objection(cache)
world.barrier()
if rank == 0: shutil.rmtree(cache)
if found: raise UntrustedCacheError(found)
"""),
    Fault("a rank has no memory for a thread (`ulimit -v`)", """
if rank == 1:
    used = int(open('/proc/self/statm').read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used, used))
    say('FAULT')
    threading.Thread(target=world.barrier).start()
"""),
    Fault("the clock jumps by a year", """
if rank == 1:
    time.time = lambda now=time.time(): now + 31536000
    time.time_ns = lambda: int(time.time() * 1e9)
for _ in range(50): world.all_gather(rank)
say('FAULT')
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
"""),
    Fault("a rank calls init() and a collective after it has left", """
import atexit
def late():
    try: comm.init().barrier()
    except BaseException as error: say('ERROR', type(error).__name__ + ':', ' '.join(str(error).split()), '|')
atexit._clear(); atexit.register(late)
from tilescale.comm import shutdown
shutdown.install(world._session, None)
say('FAULT')
sys.exit(0)
"""),
    Fault("an intruder appends a pickle to the job's store", """
if rank == 1:
    say('FAULT')
    import pickle
    world.store.append('call/0,1,2/2', pickle.dumps(print))
"""),
    Fault("1000 connections that say nothing, then a rank is killed", """
if rank == 1:
    port = world._session.liveness._connection.getpeername()
    held = [socket.create_connection(port) for _ in range(1000)]
    say('FAULT')
    os.kill(os.getpid(), signal.SIGKILL)
"""),
    Fault("`tilescale run` is killed", HANGS, run=launcher_killed),
    Fault("a job starts where one was killed", HANGS, run=started_again),
    Fault("a second job takes the port of the first", HANGS, run=one_port),
    Fault("the reader of the output ends (`| head -1`)", "while True: print('x' * 1000)", run=output_gone("| head -1")),
    Fault("the disk of the log is full", "while True: print('x' * 1000)", run=output_gone("> /dev/full")),
    Fault("a host is cut off", MEETS_LATE, run=network("ip -n ts1 link set tsv1 down")),
    Fault("one direction of a link drops everything", MEETS_LATE,
          run=network("ip -n ts1 neigh replace 10.77.0.1 lladdr 02:00:00:00:00:99 dev tsv1")),  # an unused address
]  # fmt: skip


def outcome(fault: Fault) -> Row:
    """Run the job of a fault. Raises SystemExit if it hangs, leaves a process or file, or reports no error."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.py"
        os.environ["TMPDIR"] = folder
        body = textwrap.indent(fault.before + JOIN + fault.does + WAIT, "    ")
        script.write_text(PRELUDE.format(timeout=fault.timeout_s) + "try:" + body + SAY)
        output = fault.run(script)
        left = {path.name for path in Path(folder).iterdir()} - {script.name}
        left |= {str(path) for path in Path("/dev/shm").glob("*tilescale*")}
    begins = [float(t) for t in re.findall(r"FAULT ([\d.]+)", output)]
    errors = re.findall(r"ERROR (.*) \| ([\d.]+)", output) or [(last_error(output), str(max(begins, default=0.0)))]
    wait_for_end(output, fault.name)
    if not begins or left:
        raise SystemExit(f"{fault.name}: left {left}, output:\n{output}")
    said, _ = errors[0]
    return Row(fault.name, max(float(t) for _, t in errors) - max(begins), readable(said))


def last_error(output: str) -> str:
    """Return the last error that a rank printed. Raises SystemExit if there is none."""
    found = re.findall(r"(?:tilescale\.errors\.)?(\w+Error: .*)", output)
    if not found:
        raise SystemExit(f"nobody noticed anything:\n{output}")
    return found[-1]


def wait_for_end(output: str, name: str) -> None:
    """Wait until killed processes are gone."""
    end = time.monotonic() + 5
    while alive(output):
        if time.monotonic() > end:
            raise SystemExit(f"{name}: processes {alive(output)} are left")
        time.sleep(0.01)


def readable(text: str) -> str:
    """Return an error's text without the parts that differ from run to run."""
    text = re.sub(r"\(pid \d+ on [^)]+\)", "(pid 4711 on node0)", text)
    text = re.sub(r"process \d+", "process 4712", text).replace("a rank (process 4712)", "a rank (process 4711)")
    text = re.sub(r"/\S+/job.py:\d+", "job.py:12", text)
    text = re.sub(r"/\S+/cache/(\w+/\w+)-\w+", r"~/.cache/tilescale/\1", text)
    text = re.sub(r"/\S+/cache/kernels belongs", "~/.cache/tilescale/kernels belongs", text)
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:29500", text)
    return re.split(r" at job\.py:12 (?:\(|with |try:)", text.split(" hint: ")[0])[0]


def cell(text: str) -> str:
    """Escape text for a Markdown table."""
    return text.replace("|", "\\|")


def table(rows: list[Row]) -> str:
    """Format the rows as Markdown."""
    lines = ["| what happens | the others know after | and say |", "|---|---|---|"]
    lines += [f"| {cell(row.name)} | {row.seconds:.2f} s | {cell(row.said)} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults with this word in their name")
    chosen = [fault for fault in FAULTS if parser.parse_args().only in fault.name]
    rows = []
    for fault in chosen:
        rows.append(outcome(fault))
        print(table(rows).splitlines()[-1], flush=True)
    if os.environ.get("UPDATE_DOCS") == "1" and len(rows) == len(FAULTS):
        prose, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
        PAGE.write_text(prose + mark + "\n" + table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
