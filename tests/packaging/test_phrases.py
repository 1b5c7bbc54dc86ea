"""What users read is plain English: no page, docstring or message has a phrase of phrases.toml."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = tomllib.loads((Path(__file__).parent / "phrases.toml").read_text())
PHRASES = re.compile("|".join(rf"(?<!\w)(?:{one})(?!\w)" for one in LIST["phrases"]), re.IGNORECASE)
PUBLIC = (
    "__init__",
    "aio",
    "errors",
    "surface",
    "client/_async/",
    "client/ref",
    "integrations/",
    "testing/",
    "packages/",
)
"""Modules whose docstrings users read: of dataplane, and of the packages beside it."""
PAGES = (
    "*.md",
    "docs/**/*.md",
    "protocol/*.md",
    "deploy/**/*",
    "examples/**/*",
    "packages/**/*.md",
    "bench/**/*.md",
)


def pages() -> list[Path]:
    found = [path for pattern in PAGES for path in ROOT.glob(pattern) if path.is_file()]
    return [path for path in found if not name_of(path).startswith(tuple(LIST["exempt"]))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def texts_of(module: Path) -> Iterator[tuple[int, str]]:
    """Strings of more than a word, where they stand: messages and help; of public modules
    docstrings too. Strings beside an f-string's values are joined."""
    tree = ast.parse(module.read_text())
    public = name_of(module).removeprefix("dataplane/").removesuffix(".py").startswith(PUBLIC)
    comments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if id(node) in inside or (id(node) in comments and not public):
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [one.value if isinstance(one, ast.Constant) else "{}" for one in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def found_in(text: str, where: str, line: int = 1) -> Iterator[str]:
    for match in PHRASES.finditer(text):
        at = line + text.count("\n", 0, match.start())
        instead = next(
            words
            for one, words in LIST["phrases"].items()
            if re.fullmatch(one, match[0], re.IGNORECASE)
        )
        yield f"{where}:{at}: {match[0]!r}, write: {instead}"


def test_no_page_has_a_phrase_that_is_no_plain_english() -> None:
    found: list[str] = []
    for page in pages():
        try:
            found += found_in(page.read_text(), name_of(page))
        except UnicodeDecodeError:
            continue  # a picture
    assert not found, "\n".join(found)


def test_no_message_or_public_docstring_has_one() -> None:
    found: list[str] = []
    folders = ("dataplane", "bench", "packages")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for module in sorted(modules):
        for line, text in texts_of(module):
            found += found_in(text, name_of(module), line)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["It is asked anew.", "the call Came\nto nothing", "an heir", "keeps the roster: b"]
)
def test_a_phrase_is_found_in_any_case_and_across_lines(text: str) -> None:
    assert list(found_in(text.replace("\n", " "), "here"))
