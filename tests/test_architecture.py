# SPDX-License-Identifier: MIT
"""The rules of docs/architecture.md, checked on the source: imports, reads of the environment, sizes of files."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

import tilescale
from docs import modules
from tests.public_names import documented, public_names
from tilescale.hda import Machine

ROOT = Path(__file__).parents[1]
PRODUCT = ("tilescale", "tilelang_core")
ALL_CODE = (*PRODUCT, "examples", "launch", "benchmarks", "docs", "tests")

_BASE = {"errors", "settings"}
_MODEL = _BASE | {"hda", "program"}
_LIBRARY = _MODEL | {"cost", "collectives", "passes", "comm", "timing"}
MAY_IMPORT = {
    "errors": {"tracebacks"},
    "tracebacks": _BASE,
    "settings": {"errors"},
    "alarm": set(),
    "hda": _BASE,
    "comm": _BASE | {"hda", "tracebacks"},
    "program": _BASE | {"hda"},
    "cost": _MODEL,
    "collectives": _MODEL | {"cost"},
    "language": _MODEL | {"collectives"},
    "passes": _MODEL | {"cost", "collectives"},
    "timing": _MODEL | {"cost", "collectives"},
    "backends": _LIBRARY | {"alarm"},
    "runtime": _LIBRARY | {"backends", "language"},
    "ops": _LIBRARY | {"backends", "language", "runtime"},
    "tuning": _LIBRARY | {"alarm", "backends", "language", "runtime", "ops", "tracebacks"},
    "plugins": {"settings", "ops"},
    "cli": _LIBRARY | {"backends", "language", "runtime", "ops", "tuning", "tracebacks"},
}
"""Part of tilescale -> the other parts that it may import. The package's own `__init__` loads all lazily."""

USES_CORE = {"program", "language", "cost", "passes", "backends", "runtime", "tuning"}
"""Parts that see TIR, through tilelang_core."""

READS_ENVIRONMENT = {
    "tilescale/settings.py": "the TILESCALE_* variables",
    "tilescale/comm/world.py": "hands the environment to the launchers, which are functions of it",
    "tilescale/cli/run.py": "passes it on to the processes that it starts",
    "tilescale/cli/bind.py": "passes it on to the program that it becomes",
    "tilescale/cli/doctor/job.py": "says what ranks were bound to by it",
}

FILE_CAP, FUNCTION_CAP = 450, 80

CIRCLE_CAP = 3
"""Files of a part that may import each other in cycles, for types only included."""


@functools.cache
def sources(*tops: str) -> tuple[Path, ...]:
    """The Python files below some folders of the project."""
    return tuple(sorted(path for top in tops for path in (ROOT / top).rglob("*.py")))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree."""
    return tuple(ast.walk(tree(path)))


@functools.cache
def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(node: ast.AST) -> list[str]:
    """Full names that an import statement names (relative ones with their dots); [] for other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        origin = "." * node.level + (node.module or "")
        return [f"{origin}.{alias.name}" for alias in node.names]
    return []


@functools.cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Every name that a file imports anywhere, with its line."""
    return [(name, node.lineno) for node in nodes(path) for name in imported(node)]


def part(path: Path) -> str:
    """The part of tilescale that a file belongs to."""
    return path.relative_to(ROOT / "tilescale").parts[0].removesuffix(".py")


def at_module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from at_module_level(getattr(node, inner, []))
        for handler in getattr(node, "handlers", []):
            yield from at_module_level(handler.body)


# -- imports -----------------------------------------------------------------------------------------------------------


def test_imports_run_one_way():
    wrong = []
    for path in sources("tilescale"):
        mine = part(path)
        if mine == "__init__":
            continue
        for name, line in imports(path):
            top, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if top == "tilescale" and other in MAY_IMPORT:
                allowed = other == mine or other in MAY_IMPORT[mine]
            else:
                allowed = top and (top != "tilelang_core" or mine in USES_CORE)
            if not allowed:
                wrong.append(f"{short(path)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("backend", "order"),
    [("tilelang", "headers lowering"), ("emulator", "numerics execute interpret operations record")],
)
def test_folders_of_a_back_end_do_not_know_later_ones(backend: str, order: str):
    folders = order.split()
    wrong = [
        f"{short(path)}:{line} imports {name}"
        for position, mine in enumerate(folders)
        for path in sources(f"tilescale/backends/{backend}/{mine}")
        for name, line in imports(path)
        if name.startswith(tuple(f"tilescale.backends.{backend}.{later}" for later in folders[position + 1 :]))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_part_has_its_rule():
    parts = {part(path) for path in sources("tilescale")} - {"__init__"}
    assert parts <= MAY_IMPORT.keys(), "add the new part to MAY_IMPORT and to docs/architecture.md"


def test_back_ends_are_reached_by_their_manifests():
    """A back end knows no other one but the common parts, and other parts know none: only the package itself, whose
    names load at first use, knows where public functions of a back end are."""
    folder = ROOT / "tilescale" / "backends"
    names = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
    for path in set(sources("tilescale")) - {folder / "__init__.py", ROOT / "tilescale" / "__init__.py"}:
        mine = path.relative_to(folder).parts[0] if folder in path.parents else ""
        others = names - {"tilelang", mine} if mine in names else names
        prefixes = tuple(f"tilescale.backends.{other}." for other in others)
        found = [name for name, _ in imports(path) if f"{name}.".startswith(prefixes)]
        assert not found, f"{short(path)} imports {found}"


def test_only_the_seam_imports_tilelang():
    wrong = [
        f"{short(path)}:{line} imports {name}"
        for path in sources("tilescale")
        for name, line in imports(path)
        if name.split(".")[0] in {"tilelang", "tvm", "tvm_ffi"}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_seam_is_a_leaf():
    found = [(short(path), line, name) for path in sources("tilelang_core") for name, line in imports(path)]
    assert not [each for each in found if each[2].split(".")[0] == "tilescale"]


def test_nobody_imports_tests_or_scripts():
    scripts = {"tests", "examples", "launch", "benchmarks"}
    wrong = [
        f"{short(path)}:{line} imports {name}"
        for path in sources(*PRODUCT, *scripts)
        for name, line in imports(path)
        if name.split(".")[0] in scripts and not (name.startswith("tests.") and short(path).startswith("tests/"))
    ]
    assert not wrong, "\n".join(wrong)


def test_machines_and_jobs_load_without_torch():
    """Each package alone, in a separate process: the transitive imports of its files as they load."""
    for package in ("tilescale.hda", "tilescale.comm", "tilescale.cli"):
        heavy = python(f"import sys, json, {package}; print(json.dumps(sorted(sys.modules)))")
        assert not {"torch", "tilelang", "tvm", "mpi4py"} & set(heavy), package
    wrong = [
        f"{short(path)}:{node.lineno} imports {name} as it loads"
        for path in sources("tilescale/hda", "tilescale/comm")
        for node in at_module_level(tree(path).body)
        for name in imported(node)
        if name.split(".")[0] in {"torch", "tilelang", "tvm", "tilelang_core", "mpi4py"}
    ]
    assert not wrong, "\n".join(wrong)


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def circles(folder: str) -> list[set[Path]]:
    """Groups of files below a folder that import each other in cycles, for types only included."""
    files = {module(path): path for path in sources(folder)}
    graph = networkx.DiGraph()
    for name, path in files.items():
        # `from package import x` imports the file x where there is one, else the package
        found = (n if n in files else n.rpartition(".")[0] for n, _ in imports(path))
        graph.add_edges_from((path, files[n]) for n in found if n in files and n != name)
    return [group for group in networkx.strongly_connected_components(graph) if len(group) > 1]


@pytest.mark.parametrize("folder", ["tilescale/backends", "tilescale/comm", "tilescale/hda"])
def test_circles_of_imports_are_small(folder: str):
    for circle in circles(folder):
        found = ", ".join(sorted(map(short, circle)))
        assert len(circle) <= CIRCLE_CAP, f"{len(circle)} files import each other, at most {CIRCLE_CAP}: {found}"


# -- comparisons in the source -----------------------------------------------------------------------------------------


def test_the_environment_is_read_in_one_place():
    attributes, imports = {"environ", "environb", "getenv", "putenv"}, {"os.environ", "os.getenv"}
    readers = {
        short(path)
        for path in sources(*PRODUCT)
        for node in nodes(path)
        if getattr(node, "attr", "") in attributes or imports & {*imported(node)}
    }
    assert readers == READS_ENVIRONMENT.keys()


def names_of_hardware() -> set[str]:
    machines = [Machine.load(name) for name in Machine.names()]
    levels = {level.name for machine in machines for level in machine.levels}
    networks = {network.name for machine in machines for network in machine.networks}
    layers = {layer.name for machine in machines for layer in machine.memory}
    return levels | networks | layers | set(Machine.names()) | {"nvidia", "amd", "gpu"}


def compared_strings(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(subject, literal) of every comparison of something with a string: ==, in, match, startswith, table[...]."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        subject = next((ast.unparse(s) for s in sides if not strings(s)), "")
        yield from ((subject, text) for side in sides for text in strings(side))
    elif isinstance(node, ast.Match):
        patterns = (p.value for case in node.cases for p in ast.walk(case.pattern) if isinstance(p, ast.MatchValue))
        yield from ((ast.unparse(node.subject), text) for value in patterns for text in strings(value))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in {"startswith", "endswith", "removeprefix"}:
            yield from ((ast.unparse(node.func.value), text) for arg in node.args for text in strings(arg))
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
        yield from ((ast.unparse(node.slice), text) for key in node.value.keys if key for text in strings(key))


def strings(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    items = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else []
    return [text for item in items for text in strings(item)]


def test_no_code_asks_for_hardware_by_name():
    """Levels, layers, networks and machines are data; what differs between them is asked as a property.

    A level's kind and a network's topology are words of the schema, not names that a description chooses.
    """
    hardware, wrong = names_of_hardware(), []
    for path in sources("tilescale"):
        for node in nodes(path):
            wrong += [
                f"{short(path)}:{node.lineno} compares {subject} with {text!r}"
                for subject, text in compared_strings(node)
                if text in hardware and not subject.endswith((".kind", ".topology"))
            ]
    assert not wrong, "\n".join(wrong)


def test_no_shared_code_asks_for_a_back_end_by_name():
    folder = ROOT / "tilescale" / "backends"
    names = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
    wrong = [
        f"{short(path)}:{node.lineno} compares {subject} with {text!r}"
        for path in sources("tilescale")
        if path.parent == folder or folder not in path.parents
        for node in nodes(path)
        for subject, text in compared_strings(node)
        if text in names
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("level.name == 'device'", [("level.name", "device")]),
        ("'block' != name", [("name", "block")]),
        ("name in ('warp', 'thread')", [("name", "warp"), ("name", "thread")]),
        ("name.startswith('cuda')", [("name", "cuda")]),
        ("{'node': 1}[level]", [("level", "node")]),
        ("match level:\n    case 'node':\n        pass", [("level", "node")]),
        ("f(level='device')", []),
    ],
)
def test_comparisons_are_recognised(code: str, found: list[tuple[str, str]]):
    assert [pair for node in ast.walk(ast.parse(code)) for pair in compared_strings(node)] == found


# -- the shape of the source -------------------------------------------------------------------------------------------


def test_files_are_small_and_licensed():
    wrong = []
    for path in sources(*ALL_CODE):
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines or lines[0] != "# SPDX-License-Identifier: MIT":
            wrong.append(f"{short(path)}: the first line is not the SPDX line")
        if not ast.get_docstring(tree(path)):
            wrong.append(f"{short(path)}: no module docstring")
        if len(lines) > FILE_CAP:
            wrong.append(f"{short(path)}: {len(lines)} lines, at most {FILE_CAP}")
    assert not wrong, "\n".join(wrong)


def test_functions_are_short():
    wrong = [
        f"{short(path)}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines, at most {FUNCTION_CAP}"
        for path in sources(*ALL_CODE)
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= FUNCTION_CAP
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", sorted({path.parent for path in sources(*PRODUCT)}), ids=short)
def test_files_are_listed_by_what_their_docstrings_say(folder: Path):
    """A copy of the list in a package's docstring would have to follow."""
    assert not re.findall(r"[\w/]+\.py\b", ast.get_docstring(tree(folder / "__init__.py")) or "")
    wrong = [path.name for path in folder.glob("*.py") if not 3 <= len(modules.sentence(path).split()) <= 40]
    assert not wrong, f"the first sentence of a docstring says what is in the file: {wrong}"


# -- public names ------------------------------------------------------------------------------------------------------


def errors_raised(function: object, seen: set[object]) -> set[str]:
    """Classes of tilescale.errors that a function raises, itself or in helpers of its own file."""
    seen.add(function)
    found: set[str] = set()
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (TypeError, OSError):
        return found
    for node in ast.walk(body):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found |= {ast.unparse(node.exc.func)} & set(tilescale.errors.__all__)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            helper = getattr(function, "__globals__", {}).get(node.func.id)
            if inspect.isfunction(helper) and helper.__module__ == function.__module__ and helper not in seen:
                found |= errors_raised(helper, seen)
    return found


@pytest.mark.parametrize("name", sorted(public_names()))
def test_public_names_are_documented(name: str):
    value = public_names()[name]
    function = documented(value)
    text = inspect.getdoc(function)
    assert text and len(text.split()) >= 3
    assert not isinstance(value, str | int | float | tuple | list | dict), "its docstring is that of its type"
    raised = errors_raised(inspect.unwrap(function), set()) if inspect.isroutine(function) else set()
    assert not [error for error in raised if error not in text], "the docstring names every error that it raises"


# -- side effects of imports -------------------------------------------------------------------------------------------

WATCH = """
import json, os, sys, threading
before = dict(os.environ), threading.active_count(), os.getcwd(), len(os.listdir("/proc/self/task"))
seen = []
def audit(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
        seen.append(f"opens {args[0]} for writing")
    elif event.startswith(("subprocess.", "socket.", "os.mkdir", "os.remove", "os.rename", "ctypes.dlopen")):
        seen.append(f"{event} {args}")
sys.addaudithook(audit)
import tilescale
after = dict(os.environ), threading.active_count(), os.getcwd(), len(os.listdir("/proc/self/task"))
seen += [] if before == after else [f"{before} became {after}"]
seen += sorted({"torch", "tilelang", "tvm", "numpy", "tilelang_core"} & set(sys.modules))
print(json.dumps(seen))
"""

OPERATORS = """
import json, sys, torch, tilelang
before = set(sys.modules)
import tilescale.language, tilescale.ops
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def python(code: str) -> object:
    """JSON that `code` prints, in a new process that writes no byte code."""
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_has_no_side_effect():
    assert python(WATCH) == []


def test_side_effects_are_seen():
    probe = "import numpy; os.environ['X'] = '1'"
    seen = python(WATCH.replace("import tilescale\n", f"{probe}; open('/dev/null', 'w')\n"))
    assert any("/dev/null" in what for what in seen) and any("became" in what for what in seen) and "numpy" in seen


def test_operators_load_no_compiler():
    heavy = "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "triton"
    assert not [name for name in python(OPERATORS) if name.startswith(heavy)]
