# SPDX-License-Identifier: MIT
"""The writing rules of CONTRIBUTING.md as patterns, and the texts of the project that they are matched against."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Rule(NamedTuple):
    """A pattern of lower-case prose.

    Attributes:
        pattern: matches what breaks the rule. A docstring begins with `"`, a comment with `#`, a paragraph of a page
            with its first word.
        say: the form to use instead.
        found: a text that breaks the rule.
    """

    pattern: str
    say: str
    found: str


RULES = {
    "relative clause": Rule(
        r'^"(?:what|who|whose|whom|that|where|which|how(?! to)) |^#(?:what|who|whom) ',
        "the noun: unsupported inputs, device-side sizes, the producer warp",
        '"what is not supported.',
    ),
    "empty docstring": Rule(
        r'^"whether [^.]*\b(?:is|are|does|do|has|have|was|were|can) (?:that|those|one|it|so|such)\.?$',
        "what is tested, or no docstring",
        '"whether a statement is one.',
    ),
    "bare pronoun": Rule(
        r"\b(?:is|are|was|were|does|do|has|have) (?:that|those|such)[.;:](?= |$)",
        "the noun",
        "warps load it, and these are those.",
    ),
    "fronted": Rule(
        r'(?:^["#]?|[.;] )(?:of(?! course)|beside|behind|aimed at|asked for|told) [^.:\n]*? (?:is|are|was|were)\b',
        "subject first",
        "fast. of float8 it is the product.",
    ),
    "is no": Rule(
        r"\b(?<!there )(?:is|are|was|were) (?:none\b(?! (?:or|where|for)\b)"
        r"|no (?!longer|more|less|later|earlier|faster|slower|better|such))",
        "is not a",
        "a number that is no multiple of 16",
    ),
    "beside": Rule(r"\bbesides?\b", "concurrent with, next to, compared with", "runs beside the kernel"),
    "turn": Rule(
        r"\b(?:in|by|tak\w+) turns\b"
        r"|\b(?:one|a|the|each|every|next|last|first|this|another|same|per|its|two|three|four|of|other|many) turns?\b"
        r"(?! (?:into|out|on|off|to)\b)",
        "iteration, interleaved, time-sliced",
        "in the next turn",
    ),
    "tell": Rule(r"\b(?:tells?|told|telling)\b", "notify, signal, pass, report", "a rank that is told"),
    "nobody": Rule(r"\b(?:no|any|every|some)body\b", "no rank, every device, other users", "nobody waits"),
    "who": Rule(
        r"\b(?<!users )(?<!user )(?<!people )(?<!readers )(?<!anyone )(?<!attacker )who(?:m|ever)?\b",
        "the rank, the warp that",
        "who waits for it",
    ),
    "whatever": Rule(r"\b(?:what|wher|which)ever\b", "any", "whatever it holds"),
    "own": Rule(
        r"\b(?:the|an|of|in|on|from|for|at|by|with|all|between|as|into|over|only) own\b",
        "this rank's, local",
        "the own rows",
    ),
    "served": Rule(r"\bserved\b|\bgets? (?:along|past)\b", "supported, works with", "served are 64 and 128"),
    "product": Rule(
        r"\bproducts? of (?:two |the |its |small |large )?(?:matrices|matrix|float8|fp8)\b|\bmatrix products?\b",
        "GEMM",
        "the product of matrices",
    ),
    "processor": Rule(r"\bprocessors?\b(?! sharing)", "SM, CPU core", "a block on each processor"),
    "stand": Rule(r"\bst(?:ands?|ood)\b(?! in for| for| alone|-)", "is, has the position", "behind it stands a loop"),
    "room": Rule(r"\broom\b(?![:,)]| /)", "capacity, space", "no room for a tensor"),
    "shall": Rule(r"\bshall\b", "must, does", "it shall run"),
    "so many": Rule(r"\bso many\b(?! \w+ that)", "the number, `n`", "a grid of so many blocks"),
    "on its way": Rule(
        r"\b(?:on|in) (?:its|their|the) way\b|\bway back\b", "in flight, the reverse transfer", "while it is on its way"
    ),
    "became of": Rule(r"\b(?:became|becomes?|c[ao]mes?) of\b", "result, state", "what became of it"),
    "rest on": Rule(r"\brests? on\b|\bno measure\b", "depend on, assume", "the line rests on a network"),
}
"""What no text of the project has."""

PRINTED = {
    r"nothing orders the": "no happens-before between the",
    r"tells? the time": "predicts execution time",
    r"(?:ranks|devices|threads|blocks) meet|the meetings? (?:at|of)": "synchronize, a barrier",
    r"no room for": "exhausted, does not fit",
    r"inbox (?:of|has) two places": "double-buffered inbox",
    r"never written": "uninitialized",
    r"how the project is cut": "how the code is organized",
    r"now speaking of|a level to speak of|speaks? to its": "across, a T.Scale, sends to",
    r"lanes of (?:one|a|the) program": "thread groups",
    r"straight to whom": "directly to their destinations",
    r"pip install \W?tilescale": "an index has another project of that name: say what to install, or install a clone",
}
"""Words that the project once made up in pages and printed texts -> the field's word."""

LONGEST_SENTENCE = 40
"""Words of a sentence on a page."""

NO_HEADING = re.compile(
    r"(?:what|who|whom|whose|when|where|which|while|that|those|if|as|on|at|of|for|by|to|too|with|without|behind|beside"
    r"|in(?! (?:v?LLM|SGLang|torchtitan|transformers|a model))"
    r"|never|not|and|or|one|nowhere|whole|right|long|several)\b",
    re.IGNORECASE,
)
"""First words that are neither a noun nor a verb."""

TREES = {
    "pages": ["*.md", "docs/**/*.md"],
    "backends": ["tilescale/backends/**/*"],
    "tilescale": ["tilescale/**/*"],
    "tilelang_core": ["tilelang_core/**/*"],
    "tests": ["tests/**/*"],
    "benchmarks": ["benchmarks/**/*", "launch/*"],
    "examples": ["examples/**/*"],
}
"""Tree -> its files; a file is of the first tree that has it."""

SUFFIXES = {".py", ".txt", ".md", ".ipynb", ".cuh", ".h", ".yaml", ".sh"}

STRING_OR_COMMENT = re.compile(
    r'[rbfuRBFU]{0,2}(?:"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')'
    r"|\#[^\n]*",
    re.DOTALL,
)
C_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
HASH_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:(?<=\s)|^)\#[^\n]*', re.MULTILINE)
CODE_BLOCK = re.compile(r"^( *)(```+|~~~+).*?^\1\2|<!--.*?-->", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`+[^`]*`+")


def comments(source: str, pattern: re.Pattern[str], marks: str) -> Iterator[str]:
    """Comments of a source, as `#text`; those on consecutive lines as one."""
    block: list[str] = []
    end = 0
    for match in pattern.finditer(source):
        if not match[0].startswith(tuple(marks)):
            continue
        if block and source[end : match.start()].strip(" ") != "\n":
            yield "#" + " ".join(block)
            block = []
        block.append(" ".join(match[0].strip("/*# \n").replace("\n *", "\n").split()))
        end = match.end()
    if block:
        yield "#" + " ".join(block)


def docstrings(source: str) -> Iterator[str]:
    """Docstrings of a module, its classes, functions and constants, as `"text`."""
    for match in STRING_OR_COMMENT.finditer(source):
        line = source[source.rfind("\n", 0, match.start()) + 1 : match.start()]
        if match[0].endswith('"""') and not line.strip():
            yield '"' + " ".join(match[0].strip('rR"').split())


def paragraphs(page: str) -> Iterator[str]:
    """Prose of a page, without code blocks; every item of a list and row of a table is a paragraph."""
    for text in re.split(r"\n\s*\n|\n(?=\s*(?:[-|#:]|\d+\.) ?)", CODE_BLOCK.sub("\n\n", page)):
        if text.strip():
            yield " ".join(text.split())


def prose(path: Path, source: str) -> list[str]:
    """The texts of a file that people read, with ` `` ` in place of code."""
    if path.name.endswith((".py", ".py.txt")):
        texts = [*docstrings(source), *comments(source, STRING_OR_COMMENT, "#")]
    elif path.suffix in {".cuh", ".h"}:
        texts = list(comments(source, C_COMMENT, "/"))
    elif path.suffix in {".yaml", ".sh"}:
        texts = list(comments(source, HASH_COMMENT, "#"))
    elif path.suffix == ".md":
        texts = list(paragraphs(source))
    elif path.suffix == ".ipynb":
        cells = json.loads(source)["cells"]
        texts = [
            text for cell in cells if cell["cell_type"] == "markdown" for text in paragraphs("".join(cell["source"]))
        ]
    else:
        texts = []
    return [CODE.sub("``", text) for text in texts]


@cache
def files(tree: str) -> list[Path]:
    """The files of a tree, without those that are generated."""
    earlier = (files(other) for other in list(TREES)[: list(TREES).index(tree)])
    found = {path for pattern in TREES[tree] for path in ROOT.glob(pattern)}.difference(*earlier)
    generated = ("docs/examples/", "docs/upstream/", "CHANGELOG.md")
    paths = ((path, path.relative_to(ROOT).as_posix()) for path in found if path.suffix in SUFFIXES)
    return sorted(path for path, name in paths if not name.startswith(generated) and name != "tests/words.py")


def broken(texts: list[str], rules: dict[str, Rule]) -> dict[str, list[str]]:
    """Rule -> excerpts of the texts that break it."""
    text = "\n".join(texts).lower()
    found = {}
    for name, rule in rules.items():
        if matches := list(re.finditer(rule.pattern, text, re.MULTILINE)):
            found[name] = [text[max(0, m.start() - 30) : m.end() + 30].replace("\n", " ") for m in matches]
    return found


def long_sentences(texts: list[str]) -> list[str]:
    """Sentences of paragraphs that are too long. Rows of tables and lists of links or names are not sentences."""
    paragraphs = (text for text in texts if not text.startswith("|") and " · " not in text and "`` ``" not in text)
    sentences = (s for text in paragraphs for s in re.split(r"(?<=[.?!:;]) ", text))
    return [sentence for sentence in sentences if len(sentence.split()) > LONGEST_SENTENCE]


def headings(texts: list[str]) -> Iterator[str]:
    yield from (text.lstrip("# ") for text in texts if text.startswith("#"))


def printed(source: str) -> Iterator[str]:
    """The texts of a module without docstrings; parts of one f-string together."""
    tree = ast.parse(source)
    inner: set[ast.AST] = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and node not in inner:
            inner.update(node.values)
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner:
            yield node.value
