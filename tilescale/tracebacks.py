# SPDX-License-Identifier: MIT
"""Hook that prints an uncaught error: its message first, then the user's lines that led to it.

That is so for errors of ours, and for those of Python within a traced function, whose other frames are TileLang's. The
import of the language, or the first error of ours, sets `sys.excepthook`, unless another hook is set; notebooks ask the
error itself.
`TILESCALE_TRACEBACK=full` prints Python's traceback instead, with every frame.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from functools import cache
from textwrap import dedent, indent
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from tilescale.errors import Location, TileScaleError, UsageError
from tilescale.settings import settings

if TYPE_CHECKING:
    from rich.text import Text

_OURS = ("tilescale", "tilelang_core")

_PLAIN = ("sys", "tvm")
"""Modules whose hooks print a traceback and no more: Python's own, and one that TVM sets around it."""

_CALLED = "'PrimFunc' object is not callable"
_RUN = "hint: run it on the CPU, `tilescale.emulate(program, tensors)`, or make a kernel: `tilescale.compile(program)`"


def install() -> None:
    """Print errors of TileScale by `show`, unless another hook prints errors already."""
    if getattr(sys.excepthook, "__module__", None) in _PLAIN:
        sys.excepthook = show


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's hook for uncaught exceptions: those of programs in short, others as before."""
    if not _is_of_a_program(error, trace) or _is_full():
        sys.__excepthook__(kind, error, trace)
        return
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(_text(error, trace))


def _is_of_a_program(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether an error is of ours, was raised within a traced function, or is the call of one."""
    seam = sys.modules.get("tilelang_core.upstream_errors")
    if isinstance(error, TileScaleError) or seam is None or not isinstance(error, Exception):
        return isinstance(error, TileScaleError)
    return str(error) == _CALLED or any(seam.is_traced(frame.f_code) for frame, _ in traceback.walk_tb(trace))


def lines(error: TileScaleError) -> list[str]:
    """The lines that a notebook shows, with colours as terminals have them."""
    if _is_full():
        return "".join(traceback.format_exception(error)).splitlines()
    from rich.console import Console

    console = Console(force_terminal=True, color_system="standard", highlight=False, soft_wrap=True)
    with console.capture() as shown:
        console.print(_text(error, error.__traceback__))
    return shown.get().splitlines()


def line_of(error: BaseException) -> Location | None:
    """The user's line where an error came from; None if none is known."""
    if isinstance(error, SyntaxError) and error.filename:
        return Location(error.filename, error.lineno or 1)
    own = (pair for pair in traceback.walk_tb(error.__traceback__) if _is_users(pair[0]))
    places = [(frame.f_code.co_filename, line) for frame, line in own]
    known = [place for place in places if linecache.getline(*place)]  # TVM adds lines of C++
    return Location(*known[-1]) if known else None


def _is_full() -> bool:
    try:
        return settings().traceback == "full"
    except UsageError:  # the error to print may be that very one
        return False


def _text(error: BaseException, trace: TracebackType | None) -> Text:
    from rich.text import Text

    body = Text(str(error))
    body.highlight_regex(r"(?m)^    at \S.*$", "cyan")
    body.highlight_regex(r"(?m)^    hint:", "bold green")
    text = Text.assemble((f"{type(error).__name__}: ", "bold red"), body)
    for note in (*getattr(error, "__notes__", ()), *([_RUN] if str(error) == _CALLED else [])):
        text.append("\n" + indent(dedent(note), "    "))
    if error.__cause__ is not None:
        text.append("\n    caused by " + "".join(traceback.format_exception_only(error.__cause__)).strip())
    calls = _calls(trace)
    if calls:
        text.append(f"\n    called from (TILESCALE_TRACEBACK=full shows every frame)\n{calls}", "dim")
    return text


def _calls(trace: TracebackType | None) -> str:
    """The user's lines that led to the error, the innermost last."""
    own = (pair for pair in traceback.walk_tb(trace) if _is_users(pair[0]))
    frames = [frame for frame in traceback.StackSummary.extract(own) if frame.line]  # TVM adds lines of C++
    return "\n".join(f"        {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)


def _is_users(frame: FrameType) -> bool:
    """Whether its code is neither ours nor installed nor Python's own."""
    top = str(frame.f_globals.get("__name__")).partition(".")[0]
    file = frame.f_code.co_filename
    return top not in _OURS and not file.startswith(("<frozen", *_installed()))


@cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
