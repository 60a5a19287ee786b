# SPDX-License-Identifier: MIT
"""The TileLang version that this seam was tested with, and the message for another installed one."""

from __future__ import annotations

from importlib import metadata

TESTED = ("0.1.15", "0.1.16")
"""First tested version and the first one that was not."""


class TileLangVersionError(ImportError):
    """TileLang is missing or is not a version that this release was tested with."""


class TileLangCacheError(ImportError):
    """TileLang makes the folders of its cache when it is imported, and cannot."""


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("+")[0].split("."):
        digits = "".join(ch for ch in part if ch.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def require_tilelang() -> str:
    """The installed TileLang's version. Raises TileLangVersionError: it is missing or outside `TESTED`; the text says
    what to install."""
    install = f'pip install "tilelang>={TESTED[0]},<{TESTED[1]}"'
    try:
        found = metadata.version("tilelang")
    except metadata.PackageNotFoundError:
        raise TileLangVersionError(f"TileLang is not installed. Install it with: {install}") from None
    if not _numbers(TESTED[0]) <= _numbers(found) < _numbers(TESTED[1]):
        raise TileLangVersionError(
            f"TileLang {found} is installed; this release was tested with {TESTED[0]} up to, not including, "
            f"{TESTED[1]}. "
            f"Install a tested one with: {install}"
        )
    return found


def load_tilelang() -> None:
    """Import TileLang. Raises TileLangCacheError: the folder of its cache cannot be written, such as in a home that is
    read-only."""
    try:
        import tilelang  # noqa: F401
    except OSError as error:
        raise TileLangCacheError(
            f"TileLang cannot make the folder of its cache, {error.filename}: {error.strerror}. "
            "Set TILELANG_CACHE_DIR to a folder that you can write"
        ) from error
