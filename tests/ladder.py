# SPDX-License-Identifier: MIT
"""The examples of examples/distributed as modules: tests run them and use their programs."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "examples" / "distributed"
EXAMPLES = sorted(FOLDER.glob("[0-9]*.py"))
NUMBERED = {int(path.name[:2]): path for path in EXAMPLES}


def load(path: Path) -> ModuleType:
    """A file of that folder, or a changed copy of one, which imports its neighbours as a script would."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(FOLDER))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module
