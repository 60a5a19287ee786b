# SPDX-License-Identifier: MIT
"""Every mistake in a description is an error that names file, line, field and what is expected."""

import dataclasses
import inspect
import os
import pickle

import pytest

import tilescale.language as T
from tilescale.errors import MachineFileError, UnknownMachineError, UsageError
from tilescale.hda import Machine
from tilescale.hda.load import derive
from tilescale.hda.validate import TAKEN

WIRE = """\
networks:
  wire:
    level: chip
    topology: ring
    bandwidth: 100 GB/s
    latency: 1 us
    reaches: l1
"""
CACHE = """\
  cache:
    level: chip
    scopes: []
    capacity: 1 MiB
    shared: true
"""
MISTAKES = [
    # old text, new text, the field, the line, words of the message
    ("capacity: 64 KiB", "capacity: 64", "memory.l0.capacity", 21, '"228 KiB"'),
    ("capacity: 64 KiB", "capacity: [64]", "memory.l0.capacity", 21, "found [64]"),
    ("capacity: 64 KiB", "capacty: 64 KiB", "memory.l0.capacty", 21, "did you mean 'capacity'"),
    ("    capacity: 64 KiB\n", "", "memory.l0", 18, "needs the field 'capacity'"),
    ("shared: true", "shared: maybe", "memory.l0.shared", 22, "true or false"),
    ("scopes: [global]", "scopes: [globe]", "memory.l1.scopes", 25, "fragment, shared, global, host"),
    ("level: chip\n    scopes", "level: chap\n    scopes", "memory.l1.level", 24, "core, chip"),
    ("threads: 1", "threads: none", "levels.lane.threads", 5, "a whole number"),
    ("kind: thread_group", "kind: thread", "levels.lane.kind", 4, "thread_group, program, cluster, unit"),
    ("  chip:\n    kind", "  my chip:\n    kind", "levels.my chip", 14, "cannot be the name of a level"),
    ("  chip:\n    kind", "  class:\n    kind", "levels.class", 14, "letters, digits and _"),
    ("  chip:\n    kind", "  threads:\n    kind", "levels.threads", 14, "none of threads, prelude"),
    ("kind: unit", "kind: program", "levels", 2, "exactly one level of kind program, found core, chip"),
    ("kind: thread_group\n    threads: 1", "kind: unit\n    count: 1", "levels.core", 6, "finest first"),
    ("    threads: 1\n", "", "levels.lane", 3, "needs the field 'threads'"),
    ("    threads: 1", "    threads: 1\n    count: 3", "levels.lane.count", 6, "program or unit"),
    ("clock: 1 GHz", "clock: 1 GB", "levels.core.clock", 9, '"1.98 GHz"'),
    ("    clock: 1 GHz\n", "", "levels.core.compute.vector.rates.float32", 12, "needs a `clock`"),
    ("float32: 16 op/clock", "float32: fast", "levels.core.compute.vector.rates.float32", 13, "TFLOP/s"),
    ("topology: ring", "topology: rong", "networks.wire.topology", 31, "switch, ring, mesh"),
    ("topology: ring", "topology: mesh", "networks.wire", 29, "needs `dims`"),
    ("topology: ring", "topology: mesh\n    dims: [2, 2]", "networks.wire.dims", 32, "a product of 6"),
    ("topology: ring", "topology: graph", "networks.wire", 29, "needs `links`"),
    ("topology: ring", "topology: graph\n    links:\n      - between: [0, 6]", "networks.wire.links[0]", 33, "0 to 5"),
    ("reaches: l1", "reaches: l9", "networks.wire.reaches", 34, "l0, l1"),
    (WIRE, CACHE + WIRE.replace("l1", "cache"), "networks.wire.reaches", 39, "that has `scopes`: l0, l1"),
    ("level: chip\n    topology", "level: lane\n    topology", "networks.wire.level", 30, "not of kind thread_group"),
    ("    topology", "    within: core\n    topology", "networks.wire.within", 31, "coarser"),
    ("    topology", "    ports: core\n    topology", "networks.wire.ports", 31, "only a switch"),
    ("    latency", "    link_bandwidth: 1 TB/s\n    latency", "networks.wire.link_bandwidth", 33, "more than"),
    ("put: 90 %", "put: 101 %", "networks.wire.mechanisms.dma.put", 37, "80 %"),
    ("get: 80 GB/s", "get: 180 GB/s", "networks.wire.mechanisms.dma.get", 38, "the peak"),
    ("        put: 90 %\n        get: 80 GB/s\n", "", "networks.wire.mechanisms.dma", 36, "at least one of put, get"),
    ("title: a small machine", "title: [a]", "title", 1, "expected text"),
    ("shared: true", "shared: true\n    per_program_max: 65 KiB", "memory.l0.per_program_max", 23, "more than"),
    ("scopes: [global]", "scopes: [host]", "memory", 17, "exactly one layer with scope 'global', found none"),
    ("title: a small machine", "title: a\ntitle: b", "title", 2, "given twice, first in line 1"),
    ("float32: 16 op", "float13: 16 op", "levels.core.compute.vector.rates.float13", 13, "no such data type"),
    ("threads: 1", "threads: 100000000000000000000", "levels.lane.threads", 5, "from 1 to 16777216"),
    ("threads: 1", f"threads: {'9' * 5000}", "levels.lane.threads", 5, "from 1 to 16777216, found '999"),
    ("threads: 1", f"threads: 0x{'f' * 5000}", "levels.lane.threads", 5, "from 1 to 16777216, found '0xff"),
    ("threads: 1", "threads: 2026-13-32", "levels.lane.threads", 5, "not readable"),
    ("capacity: 64 KiB", f"capacity: {'9' * 4000} KiB", "memory.l0.capacity", 21, "at most 400 digits"),
    ("capacity: 64 KiB", f"capacity: {'9' * 390} KiB", "memory.l0.capacity", 21, "below 2**63 bytes"),
    ("threads: 1", "threads: 190:20:30", "levels.lane.threads", 5, "found '190:20:30'"),
    ("shared: true", "shared: !!bool maybe", "memory.l0.shared", 22, "not readable as bool: 'maybe'"),
    ("shared: true", "shared: =", "memory.l0.shared", 22, "not readable as value: '='"),
    ("threads: 1", "threads: !!timestamp soon", "levels.lane.threads", 5, "not readable as timestamp: 'soon'"),
    ("levels:\n", f"extends: {'x' * 300}\nlevels:\n", "extends", 2, "built-in machine or a file"),
    ("levels:\n", "extends: nothing-built-in\nlevels:\n", "extends", 2, "built-in machine or a file"),
]


def test_levels_are_not_called_as_what_a_launch_is_told_beside_them():
    named = inspect.signature(T.Kernel).parameters.values()
    assert TAKEN == tuple(p.name for p in named if p.kind is p.KEYWORD_ONLY)


@pytest.mark.parametrize(("old", "new", "field", "line", "words"), MISTAKES, ids=[m[2] + ":" + m[4] for m in MISTAKES])
def test_a_mistake_names_file_line_and_field(describe, old, new, field, line, words):
    path = describe((old, new))
    with pytest.raises(MachineFileError) as caught:
        Machine.load(path)
    text = str(caught.value)
    assert f"{path}:{line}" in text
    assert field in text and words in text
    assert caught.value.where[0].line == line


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "at most 100000 entries"),
        ("levels: &levels\n  chip: *levels\n", "sections inside sections without an end"),
        (f"levels: {'[' * 3000}", "sections inside sections without an end"),
        (f"levels: {' ' * (1 << 20)}", "at most 1048576 characters"),
    ],
    ids=["repeats itself", "contains itself", "deep", "long"],
)
def test_a_description_that_does_not_end(tmp_path, text, words):
    path = tmp_path / "endless.yaml"
    path.write_text(text)
    with pytest.raises(MachineFileError, match=words) as caught:
        Machine.load(path)
    assert str(path) in str(caught.value) and caught.value.hint


def test_a_file_that_this_user_may_not_read(describe, monkeypatch):
    path = describe()

    def refused(*given, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refused)
    with pytest.raises(MachineFileError, match=f"{path} cannot be read: Permission denied"):
        Machine.load(path)


@pytest.mark.parametrize("given", ["x" * 5000, "a\0b", ""])
def test_a_name_that_no_file_can_have(given):
    with pytest.raises(UnknownMachineError, match="no machine"):
        Machine.load(given)


@pytest.mark.parametrize("given", [3, None, ["h200-sxm-8"]])
def test_something_else_than_a_name(given):
    with pytest.raises(UsageError, match="machine=.* is of type"):
        Machine.load(given)


def test_all_problems_are_reported_at_once(describe):
    path = describe(("64 KiB", "64"), ("latency: 1 us", "latency: 1"), ("shared: true", "shared: 3"))
    with pytest.raises(MachineFileError) as caught:
        Machine.load(path)
    assert [place.line for place in caught.value.where] == [21, 22, 33]


@pytest.mark.parametrize("text", ["levels: [", "- a\n- b\n", "", "\x00"])
def test_not_yaml_or_no_mapping(describe, text):
    path = describe(text=text)
    with pytest.raises(MachineFileError, match=str(path)):
        Machine.load(path)


def test_unknown_machine_lists_the_built_in_ones():
    with pytest.raises(UnknownMachineError, match=r"did you mean 'h200-sxm-8'.*wafer-mesh"):
        Machine.load("h200-sxm8")


def test_extends_changes_adds_and_removes(describe):
    describe()
    path = describe(
        name="larger.yaml",
        text="extends: small.yaml\ntitle: larger\n"
        "levels:\n  chip:\n    count: 8\n  rack:\n    kind: unit\n    count: 2\n"
        "networks:\n  wire:\n    topology: switch\n    mechanisms:\n      dma:\n        get:\n",
    )
    machine = Machine.load(path)
    assert machine.name == "larger"
    assert machine.level_names == ("lane", "core", "chip", "rack")
    assert machine.count("chip") == 16
    assert machine.network("chip").mechanisms[0].get is None
    assert machine.network("chip").mechanisms[0].put == pytest.approx(90e9)


def test_an_inherited_mistake_points_to_its_own_file(describe):
    base = describe(("capacity: 64 KiB", "capacity: 64"))
    path = describe(name="child.yaml", text="extends: small.yaml\ntitle: child\n")
    with pytest.raises(MachineFileError, match=f"{base}:21"):
        Machine.load(path)


def test_a_description_cannot_extend_itself(describe):
    describe(("levels:\n", "extends: other.yaml\nlevels:\n"))
    path = describe(("levels:\n", "extends: small.yaml\nlevels:\n"), name="other.yaml")
    with pytest.raises(MachineFileError, match="itself"):
        Machine.load(path)


def test_machines_are_frozen_hashable_and_stable(describe):
    path = describe()
    one, two = Machine.load(path), Machine.load(path)
    assert one == two and hash(one) == hash(two) and one.digest == two.digest
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.levels[0].threads = 3
    other = Machine.load(describe(("64 KiB", "65 KiB")))
    assert other.digest != one.digest and other != one


def test_a_path_object_and_the_working_directory(describe, monkeypatch):
    path = describe()
    monkeypatch.chdir(path.parent)
    assert Machine.load("small.yaml") == Machine.load(path)
    assert os.fspath(path) == Machine.load(path).file


def test_derive_reports_mistakes_too():
    with pytest.raises(MachineFileError, match=r"levels\.core\.count"):
        derive("cpu-node", "host", {"levels": {"core": {"count": 0}}})
