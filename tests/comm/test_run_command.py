# SPDX-License-Identifier: MIT
"""`tilescale run`: its options, its output, its exit code, its end. The ranks here need no torch, so they are quick."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.comm.conftest import ROOT, RUN, Done, command, run_words

ECHO = """
import os, sys
env = os.environ
print("out", env["RANK"], env["WORLD_SIZE"], env.get("TILESCALE_MACHINE"), env.get("TILESCALE_EMULATE"), sys.argv[1:])
print("tracebacks", env.get("TILESCALE_TRACEBACK"))
print("err", file=sys.stderr)
sys.exit(int(sys.argv[1]) if env["RANK"] == "1" else 0)
"""


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    path = tmp_path / "tool_for_run.py"
    path.write_text(ECHO)
    return path


def _run(*words: str, **variables: str) -> Done:
    return run_words([*RUN, *words], **variables)


def test_options_output_and_success(tool: Path) -> None:
    words = "--machine", "h100-sxm-8", "--emulate", "--traceback", str(tool), "0", "--machine", "for the script"
    done = _run("-n", "2", *words)
    assert done.code == 0
    for rank in "01":
        assert f"[{rank}] tracebacks full" in done.output
        assert f"[{rank}] out {rank} 2 h100-sxm-8 1 ['0', '--machine', 'for the script']" in done.output
        assert f"[{rank}] err" in done.output


def test_module_and_exit_code_of_the_failing_rank(tool: Path) -> None:
    done = _run("-n", "3", "-m", tool.stem, "7", PYTHONPATH=f"{ROOT}{os.pathsep}{tool.parent}")
    assert done.code == 7
    assert done.output.rstrip().endswith("rank 1 failed first, with exit code 7: err")


def test_the_error_is_named_not_its_last_line(tool: Path) -> None:
    """Also where PyTorch prints the rank before each line, with a process group."""
    fails = tool.with_name("fails.py")
    lines = "[rank0]: Traceback:", "[rank0]:   File", "[rank0]: ValueError: as asked", "[rank0]:     at a line"
    fails.write_text(f"import sys\nsys.exit({chr(10).join(lines)!r})")
    done = _run("-n", "1", str(fails))
    assert done.output.rstrip().endswith("rank 0 failed first, with exit code 1: ValueError: as asked"), done.output


@pytest.mark.parametrize("words", ["can't start new thread", "OpenBLAS error: Memory allocation still failed"])
def test_a_limit_behind_a_launcher_that_cannot_start_is_named(words: str, tool: Path) -> None:
    """The limit is one of memory: a thread needs some for its stack."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({1 << 36}, {1 << 36}))"
    fails = f"def fail(*_): raise RuntimeError({words!r})\nrun.callback.__globals__['_run'] = fail"
    launcher = "\n".join((RUN[2].removesuffix("; run()"), limited, fails, "run()"))
    done = run_words([RUN[0], "-c", launcher, "-n", "1", str(tool)])
    said = f"the ranks cannot be started, RuntimeError: {words} (`ulimit -v` is 67108864 here: raise it)"
    assert said in done.output and "Traceback" not in done.output, done.output


@pytest.mark.parametrize(("limit", "said"), [(1 << 36, " (`ulimit -v` is 67108864 here: raise it)"), (-1, "")])
def test_a_limit_behind_a_failure_is_named(tool: Path, limit: int, said: str) -> None:
    """Of the address space, where a rank has no memory."""
    fails = tool.with_name("fails.py")
    fails.write_text("raise MemoryError")
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))"
    done = run_words([RUN[0], "-c", f"{limited}; {RUN[2]}", "-n", "1", str(fails)])
    assert done.output.rstrip().endswith("MemoryError" + said)


def test_failure_before_init_ends_the_others(run_job) -> None:
    done = run_job("tilescale run", 2, "failures.py", "early", "1")
    assert done.code == 1
    assert "ranks [0] did not stop and were ended" in done.output and "ValueError: before init" in done.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text("import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [*command("tilescale run", 2), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        # A test run in the background of a shell has SIGINT ignored, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    pids = [int(re.findall(r"pid (\d+)", process.stdout.readline())[0]) for _ in range(2)]
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and "interrupted" in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


LOUD = """
import os, sys, time
print("pid", os.getpid(), file=sys.stderr)
while True:
    print("x" * 100)
    time.sleep(0.001)
"""


def ended(pids: list[int]) -> bool:
    """Whether all these processes end within a moment."""
    end = time.monotonic() + 20
    while (left := [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]) and time.monotonic() < end:
        time.sleep(0.02)
    return not left


@pytest.mark.parametrize(
    ("output", "code", "said"), [("reader", 141, "Broken pipe"), ("/dev/full", 74, "No space left on device")]
)
def test_output_that_nobody_takes_ends_the_job(tmp_path: Path, output: str, code: int, said: str) -> None:
    """Neither side blocks on a full pipe: `tilescale run ... | head -1`, or a disk that is full."""
    (tmp_path / "loud.py").write_text(LOUD)
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing if output == "reader" else output, "wb", buffering=0) as sink:
        words = [*command("tilescale run", 3), str(tmp_path / "loud.py")]
        process = subprocess.Popen(words, stdout=sink, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"the output cannot be written any more ({said}), all ranks were ended" in errors
    assert ended([int(pid) for pid in re.findall(r"pid (\d+)", errors)])


SILENT = LOUD.partition("while")[0] + "time.sleep(600)\n"


@pytest.mark.parametrize("text", [LOUD, SILENT], ids=["loud", "silent"])
def test_no_rank_outlives_its_launcher(tmp_path: Path, text: str) -> None:
    """A loud one would die of its broken pipe; the kernel ends a silent one."""
    (tmp_path / "rank.py").write_text(text)
    words = [*command("tilescale run", 2), str(tmp_path / "rank.py")]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    pids = [int(re.findall(r"pid (\d+)", process.stderr.readline())[0]) for _ in range(2)]
    process.kill()
    assert ended(pids)
    process.communicate()


def test_text_that_the_terminal_cannot_show_is_shown_otherwise(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text("import sys; sys.stdout.buffer.write(bytes([0xE2, 0x86, 0x92, 10]))")
    done = _run("-n", "1", str(tmp_path / "words.py"), PYTHONIOENCODING="latin-1")
    assert done.code == 0 and r"[0] \u2192" in done.output, done.output


def test_the_ranks_have_a_key_that_no_command_line_shows(tmp_path: Path) -> None:
    (tmp_path / "key.py").write_text(
        "import os, pathlib\n"
        "key = os.environ['TILESCALE_JOB_KEY']\n"
        "lines = [path.read_bytes() for path in pathlib.Path('/proc').glob('[0-9]*/cmdline') if path.exists()]\n"
        "print('key', key, any(key.encode() in line for line in lines))\n"
    )
    found = re.findall(r"key (\w{64}) (\w+)", _run("-n", "2", str(tmp_path / "key.py")).output)
    assert len(found) == 2 and len(set(found)) == 1 and found[0][1] == "False"


def test_more_ranks_than_the_machine_has_devices(tool: Path) -> None:
    done = _run("-n", "9", "--machine", "h200-sxm-8", str(tool), "0")
    assert done.code == 2 and "[0]" not in done.output, "no rank was started"
    assert done.output.count("h200-sxm-8 has 8 units of level 'device', and the job 9 ranks: start at most 8") == 1


@pytest.mark.parametrize(
    ("before", "code", "said"),
    [("exec >&-;", 0, ""), ("ulimit -n 12;", 1, "OSError: Too many open files (`ulimit -n` is 12 here: raise it)")],
)
def test_an_output_that_is_closed_and_few_open_files(tool: Path, before: str, code: int, said: str) -> None:
    words = shlex.join([*RUN, "-n", "2", str(tool), "0"])
    done = subprocess.run(["sh", "-c", f"{before} {words}"], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr
