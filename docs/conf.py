# SPDX-License-Identifier: MIT
"""The documentation site, built by `make docs`: these Markdown pages, and a reference made from docstrings."""

import sys
from importlib.metadata import metadata
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "extensions")]

import tilescale  # noqa: E402 - found through the path above

sys.modules["T"] = tilescale.language  # programs import it as T, so that is what the reference calls it

project = "TileScale"
release = tilescale.__version__
html_title = f"{project} {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
extensions += ["name_links", "example_pages", "inline_figures", "code_blocks"]
exclude_patterns = ["figures", "extensions"]
myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 3
copybutton_selector = ":is(.highlight-python, .highlight-console, .highlight-yaml, .highlight-sh) pre"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
default_role = "literal"  # what docstrings set in backticks, as on the pages; name_links makes links of both
highlight_language = "text"

autodoc_typehints = "none"  # docstrings say what arguments hold: shapes and units, not only types
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = False
napoleon_attr_annotations = False

html_theme = "furo"
html_favicon = html_logo = "_static/icon.svg"
urls = dict(line.split(", ") for line in metadata("tilescale").get_all("Project-URL", []))
if "Repository" in urls:  # as [project.urls] of pyproject.toml says
    html_theme_options = {"source_repository": urls["Repository"], "source_branch": "main", "source_directory": "docs/"}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def without_parameters(app, what, name, obj, options, signature, annotation):
    """All errors are made alike, which their base class says."""
    return ("", None) if what == "exception" else None


def without_type(app, what, name, obj, options, lines):
    """What a property's first line says before a colon is no type, for which Napoleon takes it."""
    if what == "property":
        lines[:0] = ["..", ""]  # a comment, which has no colon


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", without_type, priority=400)
    app.connect("autodoc-process-signature", without_parameters)
