# SPDX-License-Identifier: MIT
"""`tilescale machine`: what it prints, draws and returns."""

import io
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner
from rich.console import Console

from tilescale.cli.machine import machine
from tilescale.hda import Machine
from tilescale.hda.draw import terminal
from tilescale.hda.draw.mesh import cells
from tilescale.hda.draw.svg import picture


def run(*arguments):
    return CliRunner().invoke(machine, [str(a) for a in arguments])


def test_list_names_every_machine():
    result = run("list")
    assert result.exit_code == 0
    for name in Machine.names():
        assert name in result.output


@pytest.mark.parametrize("name", Machine.names())
def test_show_draws_levels_memory_and_networks(name):
    result = run("show", name)
    assert result.exit_code == 0
    found = Machine.load(name)
    parts = [*found.level_names, *(n.name for n in found.networks), *(layer.name for layer in found.memory)]
    parts += [m.name for n in found.networks for m in n.mechanisms]
    for part in parts:
        assert part in result.output


def test_show_says_numbers_with_units():
    output = run("show", "h200-sxm-8x4").output
    for words in ("4 × node", "132 × block", "140.4 GiB", "450 GB/s per device", "1.2 us", "989.4 TOP/s", "395 GB/s"):
        assert words in output


@pytest.mark.parametrize("name", Machine.names())
def test_svg_is_well_formed_and_complete(name):
    found = Machine.load(name)
    root = ET.fromstring(picture(found))
    assert root.tag.endswith("svg") and float(root.get("width")) < 3000
    text = " ".join("".join(element.itertext()) for element in root.iter())
    for part in [*found.level_names, *(n.name for n in found.networks), *(layer.name for layer in found.memory)]:
        assert part in text


def said(machine: Machine) -> str:
    return " ".join("".join(element.itertext()) for element in ET.fromstring(picture(machine)).iter())


def test_svg_counts_programs_that_clusters_are_made_of():
    text = said(Machine.load("h200-sxm-8"))
    assert "132 blocks" in text and "made at launch, up to 8 blocks each" in text and "up to 16" not in text


@pytest.mark.parametrize(("rows", "columns", "drawn"), [(2, 3, 6), (8, 8, 64), (9, 8, 56), (996, 757, 49)])
@pytest.mark.parametrize("topology", ["mesh", "torus"])
def test_units_on_a_mesh_lie_in_rows_and_columns(rows, columns, drawn, topology):
    width, height, text = cells((rows, columns), topology == "torus")
    found = ET.fromstring(f"<svg>{text}</svg>")
    boxes = [(float(box.get("x")), float(box.get("y"))) for box in found.iter("rect")]
    assert len(set(boxes)) == drawn and len({x for x, _ in boxes}) == min(columns, 7 + (columns == 8))
    assert all(0 <= x < width and 0 <= y < height for x, y in boxes)
    lines = list(found.iter("line"))
    assert len(lines) == len({x for x, _ in boxes}) + len({y for _, y in boxes})
    assert any(line.get("stroke-dasharray") for line in lines) == (max(rows, columns) > 8)


def test_the_wafer_is_drawn_in_two_dimensions():
    text = said(Machine.load("wafer-mesh"))
    assert "996 rows, 757 columns" in text and "mesh 996 x 757 of cores" in text
    assert "8 rows, 8 columns" in said(Machine.load("stacked-3d"))


def test_drawings_have_colours_for_light_and_dark():
    root = ET.fromstring(picture(Machine.load("wafer-mesh")))
    style = next(element.text for element in root.iter() if element.tag.endswith("style"))
    assert "@media (prefers-color-scheme: dark)" in style
    used = {name for element in root.iter() for name in (element.get("class") or "").split()} - {"machine"}
    assert used and all(style.count(f".machine .{name} ") == 2 for name in used)
    assert not [element for element in root.iter() if (element.get("fill") or "none") != "none"]


def test_a_notebook_shows_the_drawing():
    found = Machine.load("wafer-mesh")
    assert found._repr_html_() == picture(found)


def test_svg_escapes_what_a_description_says(describe):
    found = Machine.load(describe(("title: a small machine", "title: 1 < 2 & 3")))
    assert "1 < 2 & 3" in "".join(ET.fromstring(picture(found)).itertext())


def test_svg_of_every_topology(describe):
    graph = "graph\n    links:\n      - between: [0, 1]"
    for shape in ("ring", "switch", "point-to-point", "torus\n    dims: [2, 3]", "mesh\n    dims: [6]", graph):
        assert ET.fromstring(picture(Machine.load(describe(("topology: ring", f"topology: {shape}")))))


def test_show_writes_the_file(tmp_path):
    result = run("show", "wafer-mesh", "--svg", tmp_path / "wafer.svg")
    assert result.exit_code == 0 and "wafer.svg" in result.output
    assert ET.parse(tmp_path / "wafer.svg")
    result = run("show", "wafer-mesh", "--svg", tmp_path / "no" / "such" / "wafer.svg")
    assert result.exit_code == 2 and "cannot be written" in result.output
    result = run("show", "wafer-mesh", "--svg", tmp_path / "wafer.png")
    assert result.exit_code == 2 and f"name the file {tmp_path / 'wafer.svg'}" in result.output


def test_detect_shows_this_host():
    assert "peak rates" in run("detect").output


def test_check(describe):
    path = describe()
    result = run("check", path)
    assert result.exit_code == 0 and "is valid" in result.output and "lane, core, chip" in result.output
    wrong = describe(("capacity: 64 KiB", "capacity: 64"))
    result = run("check", wrong)
    assert result.exit_code == 2 and f"{wrong}:21" in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(("file", "found"), [("nothing.yaml", "does not exist"), (".", "is a directory")])
def test_check_reads_files_alone(file: str, found: str):
    result = run("check", file)
    assert result.exit_code == 2 and f"File '{file}' {found}." in result.output


def test_errors_are_messages():
    result = run("show", "h200-sxm8")
    assert result.exit_code == 2
    assert "Error: no machine 'h200-sxm8'" in result.output and "did you mean 'h200-sxm-8'" in result.output


def test_help_teaches():
    output = run("--help").output
    for words in ("tilescale machine show h200-sxm-8", "--svg wafer.svg", "detect", "check my-chip.yaml"):
        assert words in output


@pytest.mark.parametrize("name", Machine.names())
def test_nothing_is_cut_off_where_a_terminal_has_80_columns(name):
    console = Console(width=80, file=io.StringIO())
    machine = Machine.load(name)
    console.print(terminal.picture(machine), terminal.listing([machine]))
    assert "…" not in console.file.getvalue()
