# SPDX-License-Identifier: MIT
"""Stands for a process that the server forks: client.py ADDRESS EXECUTABLE ARGUMENTS...

It loads little, to start at once.
"""

import json
import os
import signal
import socket
import sys

FDS_AT_ONCE = 200  # a message carries up to 253


def main() -> None:
    server = socket.socket(socket.AF_UNIX)
    server.connect(sys.argv[1])
    fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd != server.fileno() and _is_open(fd)]
    _, _, executable, *arguments = sys.argv
    asked = {"executable": executable, "arguments": arguments, "environment": dict(os.environ), "fds": fds}
    asked["folder"] = os.getcwd()
    text = json.dumps(asked).encode()
    socket.send_fds(server, [len(text).to_bytes(8, "little")], fds[:FDS_AT_ONCE])
    server.sendall(text)
    pid = int.from_bytes(server.recv(8), "little")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
    status = int.from_bytes(server.recv(8), "little")
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


main()
