# SPDX-License-Identifier: MIT
"""The scripts under launch/ start jobs; srun and scontrol are stand-ins that do what Slurm would."""

from __future__ import annotations

import mmap
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.comm.conftest import ROOT, SCRIPTS, Done, run_words

LAUNCH = sorted((ROOT / "launch").glob("*.sh"))
COLLECTIVES = str(SCRIPTS / "collectives.py")

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done  # its options
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 SLURM_NTASKS=2 "$@" &
done
wait -n && wait -n
"""
SCONTROL = "#!/usr/bin/env bash\necho 127.0.0.1\necho another-node\n"


def stand_in(folder: Path, **programs: str) -> str:
    """PATH with these programs, as texts for bash, before all others."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])


@pytest.mark.parametrize("script", LAUNCH, ids=lambda path: path.name)
def test_syntax_and_usage(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    for words in ([], ["script.py", "2"]):  # the script first, or not within a job of Slurm's
        done = run_words([str(script), *words], SLURM_JOB_ID="")
        assert done.code == 2 and "usage:" in done.output


def test_there_is_one_for_every_launcher() -> None:
    assert [path.stem for path in LAUNCH] == ["mpirun", "slurm", "torchrun"]


@pytest.mark.parametrize("line", ["node0", "  node0:8", "node0 slots=8"])
def test_hosts_of_open_mpi_get_the_environment_by_name(tmp_path: Path, line: str) -> None:
    """With the address of rank 0, which is on the first host; no value is on the command line."""
    shown = 'if [[ $1 == --version ]]; then echo "mpirun (Open MPI) 4"; else echo "$MASTER_ADDR: $*"; fi'
    path = stand_in(tmp_path, mpirun=f"#!/usr/bin/env bash\n{shown}\n")
    (tmp_path / "hosts").write_text(f"# the cluster\n\n{line}\nnode1\n")
    variables = {"HOSTFILE": str(tmp_path / "hosts"), "TILESCALE_JOB_KEY": "secret", "SHELL_OF_MINE": "1"}
    done = run_words([str(ROOT / "launch/mpirun.sh"), "2", "script.py"], PATH=path, **variables)
    assert done.output.startswith("node0: ") and f"--hostfile {tmp_path}/hosts" in done.output
    named = {"TILESCALE_JOB_KEY", "PATH", "MASTER_ADDR", "OMP_NUM_THREADS", "MPI4PY_MPIABI"}
    assert named <= set(re.findall(r"-x (\w+)", done.output))
    assert "secret" not in done.output and "SHELL_OF_MINE" not in done.output
    assert done.output.rstrip().endswith("-m tilescale.cli bind python script.py")


def test_torchrun_needs_to_know_its_node() -> None:
    done = run_words([str(ROOT / "launch/torchrun.sh"), "2", COLLECTIVES], NNODES="2")
    assert done.code != 0 and "set NODE_RANK" in done.output


@pytest.mark.parametrize(("launcher", "words"), [("mpirun", ["2"]), ("torchrun", ["2"]), ("slurm", [])])
@pytest.mark.parametrize(("code", "examined"), [(0, False), (5, True), (143, False)])
def test_a_failed_job_is_examined(tmp_path: Path, launcher: str, words: list[str], code: int, examined: bool) -> None:
    """All launchers are one that fails, but runs the doctor."""
    fails = f"#!/usr/bin/env bash\n[[ $* == *doctor* ]] && echo examined || exit {code}\n"
    path = stand_in(tmp_path, mpirun=fails, torchrun=fails, srun=fails, scontrol=SCONTROL)
    script = str(ROOT / f"launch/{launcher}.sh")
    done = run_words([script, *words, "script.py"], PATH=path, SLURM_JOB_ID="1", SLURM_JOB_NODELIST="n")
    assert done.code == code and ("examined" in done.output) == examined, done.output


def launched(folder: Path, *words: str, **variables: str) -> Done:
    """Result of a command with a script under launch/, whose Python and torchrun have torch loaded already."""
    torchrun = f'#!/bin/sh\nexec "{warm.python()}" -m torch.distributed.run "$@"\n'
    path = stand_in(folder, srun=SRUN, scontrol=SCONTROL, torchrun=torchrun)
    return run_words(words, PATH=path, PYTHON=warm.python(), **variables)


def test_mpirun() -> None:
    # With plain Python: MPICH killed ranks at their end that the warm server had forked.
    done = run_words([str(ROOT / "launch/mpirun.sh"), "2", COLLECTIVES, "MPI", "2"])
    assert done.code == 0 and done.output.count("is content") == 2, done.output


def test_memory_that_killed_ranks_of_mpich_left_is_given_back(tmp_path: Path) -> None:
    """It is not in any process's address space. The memory of a running job is, and new memory may soon be."""
    names = [Path(f"/dev/shm/mpich_shm_{kind}_{os.getpid()}") for kind in ("left", "used", "new")]
    path = stand_in(tmp_path, mpirun="#!/usr/bin/env bash\nexit 143\n")
    try:
        for name in names:
            name.write_bytes(bytes(4096))
            if "new" not in name.name:
                os.utime(name, (0, 0))
        with open(names[1], "r+b") as file, mmap.mmap(file.fileno(), 4096):
            assert run_words([str(ROOT / "launch/mpirun.sh"), "2", "script.py"], PATH=path).code == 143
            assert [name.exists() for name in names] == [False, True, True]
    finally:
        for name in names:
            name.unlink(missing_ok=True)


def test_slurm(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "n[0-1]"}
    done = launched(tmp_path, f"{ROOT}/launch/slurm.sh", COLLECTIVES, "torchrun", "2", **job)
    assert done.code == 0 and done.output.count("is content") == 2, done.output


def test_two_nodes_with_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "nodes.py"
    script.write_text(
        "from tilescale.comm import init\n"
        "w = init()\n"
        "facts = ['node', w.node, w.nodes, w.local_rank, w.local_size, w.team('node').all_gather(w.rank)]\n"
        "print(' '.join(map(str, facts)), flush=True)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    both = f'for NODE_RANK in 0 1; do export NODE_RANK; "{ROOT}/launch/torchrun.sh" 1 "{script}" & done; wait'
    rendezvous = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = launched(tmp_path, "bash", "-c", both, **rendezvous)
    assert "node 0 2 0 1 [0]" in done.output and "node 1 2 0 1 [1]" in done.output, done.output
