# SPDX-License-Identifier: MIT
"""The seam to stock TileLang: the only package that imports `tilelang` and `tvm`.

It is a leaf: it knows nothing of `tilescale`. An upstream rename is mended here.
"""

from tilelang_core.version import TESTED, TileLangCacheError, TileLangVersionError, load_tilelang, require_tilelang

require_tilelang()
load_tilelang()

from tilelang_core import dialect, ellipsis, logs, mixed_fp8, modules, parameters, quick_objects, reserved_names  # noqa: E402

dialect.install()
ellipsis.install()
logs.install()
mixed_fp8.install()
modules.install()
parameters.install()
quick_objects.install()
reserved_names.install()

__all__ = ["TESTED", "TileLangCacheError", "TileLangVersionError", "load_tilelang", "require_tilelang"]
