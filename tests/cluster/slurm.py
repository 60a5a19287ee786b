# SPDX-License-Identifier: MIT
"""`launch/slurm.sh` and `srun --mpi` under a real Slurm: slurmctld here, a slurmd on each of two hosts, munge."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.conftest import JOB, LIMIT_S, ROOT, Hosts

OPEN_MPI = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")
NEEDED = ("slurmctld", "slurmd", "munged", "srun")

CONFIGURATION = """
ClusterName=tilescale
SlurmctldHost={controller}({gateway})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={temporary}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=600
InactiveLimit=0
MessageTimeout=60
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


class Slurm:
    """A cluster of two nodes, from `start` to `stop`; its daemons are child processes."""

    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts, self.folder = hosts, folder
        # PMIx keeps files of a node there, with paths that must be short, as sockets are among them.
        self._temporary = tempfile.TemporaryDirectory(prefix="ts-")
        self.env = hosts.env | {"SLURM_CONF": str(folder / "slurm.conf")}
        del self.env["TILESCALE_JOB_KEY"]
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Write the configuration and start all daemons; wait until both nodes are idle."""
        for name in ("state", *(f"spool-{name}" for name in self.hosts.names)):
            (self.folder / name).mkdir()
        for name in self.hosts.names:
            Path(self._temporary.name, name).mkdir()
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # it is not used, and needs no file system
        controller = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs=4 State=UNKNOWN"
            for name, address in list(zip(self.hosts.names, self.hosts.addresses, strict=True))[:2]
        )
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                controller=controller, gateway=self.hosts.gateway, folder=self.folder, nodes=nodes,
                temporary=self._temporary.name
            )
        )  # fmt: skip
        with open(self.folder / "hosts", "a") as file:
            file.write(f"{self.hosts.gateway} {controller}\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        # munged requires folders that other users cannot write to, up to the root; those of temporary files do not
        # qualify
        self._start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
                    f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
                    f"--seed-file={self.folder}/munged.seed")  # fmt: skip
        self._until(lambda: (self.folder / "munge.socket").exists())
        self._start("slurmctld", "-D", "-c")
        for name in self.hosts.names[:2]:
            self._start(str(Path(__file__).parent / "enter"), name, "slurmd", "-D", "-c", "-N", name)
        self._until(lambda: self.run("sinfo", "-h", "-o", "%D %t")[1].split() == ["2", "idle"])

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
        self._temporary.cleanup()

    def run(self, *words: str, **variables: str) -> tuple[int, str]:
        """Exit code and output of a command of Slurm's."""
        done = subprocess.run(
            words, env=self.env | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        print(done.stdout)
        return done.returncode, done.stdout

    def sbatch(self, output: Path, *words: str, **variables: str) -> tuple[int, str]:
        """Exit code and output of a batch job of launch/slurm.sh on two nodes with two tasks each."""
        shape = ["--wait", "--nodes", "2", "--ntasks-per-node", "2", "--output", str(output)]
        code, _ = self.run("sbatch", *shape, str(ROOT / "launch/slurm.sh"), *words, **variables)
        self._until(output.exists)
        print(output.read_text())
        return code, output.read_text()

    def _start(self, *words: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            mortal = ["setpriv", "--pdeathsig", "TERM", *words]  # a killed pytest leaves no processes
            self._daemons.append(subprocess.Popen(mortal, env=self.env, stdout=log, stderr=log))

    def _until(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not ready():
            if time.monotonic() > end:
                logs = [path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.log")]
                pytest.fail("the cluster is not ready:\n" + "\n".join(logs))
            time.sleep(0.5)


@pytest.fixture(scope="module")
def slurm(hosts: Hosts) -> Iterator[Slurm]:
    """Slurm on two of the hosts."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"there is no {', '.join(missing)}: apt-get install slurm-wlm munge")
    found = Slurm(hosts, hosts.folder)
    try:
        found.start()
        yield found
    finally:
        found.stop()


def assert_right(text: str, ranks: int = 4) -> None:
    said = re.findall(r"rank (\d) on tsnode(\d): node (\d) of 2, local rank (\d) of (\d)", text)
    half = ranks // 2
    expected = [(r, r // half, r // half, r % half, half) for r in range(ranks)]
    assert sorted(tuple(map(int, found)) for found in said) == expected, text


def test_sbatch(slurm: Slurm, tmp_path: Path) -> None:
    code, text = slurm.sbatch(tmp_path / "out", JOB, "2")
    assert code == 0
    assert_right(text)
    assert re.search(r"^[0-3]: rank ", text, re.M), "each line carries its task"


def test_sbatch_of_a_job_that_fails(slurm: Slurm, tmp_path: Path) -> None:
    """The script's exit code is the job's, the error comes first, and the hint names the doctor."""
    code, text = slurm.sbatch(tmp_path / "out", JOB, "2", "--fail", "3")
    assert code == 1
    assert "ValueError: as asked" in text and "the job failed with exit code 1" in text
    assert re.search(r"yes  ports +every rank reaches", text)


def with_library(kind: str) -> dict[str, str]:
    """Environment in which mpi4py loads an MPI for this kind of process management."""
    if kind != "pmix":
        return {}
    if not OPEN_MPI.exists():
        pytest.skip("no MPI here speaks PMIx: apt-get install libopenmpi3")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return root | {"MPI4PY_LIBMPI": str(OPEN_MPI), "MPI4PY_MPIABI": "openmpi"}


@pytest.mark.parametrize("kind", ["pmix", "pmi2"])
def test_srun_with_mpi(slurm: Slurm, kind: str) -> None:
    code, text = slurm.run("srun", "--mpi=list")
    if kind not in text:
        pytest.skip(f"this Slurm has no {kind}: {' '.join(text.split())}")
    words: Sequence[str] = ["--nodes", "2", "--ntasks-per-node", "1", f"--mpi={kind}", sys.executable, JOB, "2"]
    code, text = slurm.run("srun", *words, **with_library(kind))
    assert code == 0 and "MPI" in text
    assert_right(text, ranks=2)
