"""Gather the pages of the site in build/pages, where any generator of sites can read them.

The pages are those of docs/, without its history, and of protocol/. In the repository they link to
each other and to files that the site does not have; here such a file is named instead.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "build" / "pages"
LEFT_OUT = {".site", "history"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")


def gather(pages: Path = PAGES) -> None:
    """Write all pages, and what they show, to an empty folder."""
    shutil.rmtree(pages, ignore_errors=True)
    docs = ROOT / "docs"
    kept = [path for path in docs.iterdir() if path.name not in LEFT_OUT]
    files = [file for path in kept for file in [path, *path.rglob("*")] if file.is_file()]
    there = {file: file.relative_to(docs).as_posix() for file in files}
    there |= {file: f"protocol/{file.name}" for file in (ROOT / "protocol").glob("*.md")}
    for file, name in there.items():
        (pages / name).parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            (pages / name).write_text(_linked(file, name, there))
        else:
            shutil.copyfile(file, pages / name)


def _linked(file: Path, name: str, there: dict[Path, str]) -> str:
    """The text of a page with links between the pages of the site only."""

    def link(found: re.Match[str]) -> str:
        image, text, path, anchor = found.groups()
        target = (file.parent / path).resolve()
        if not target.exists():
            return found[0]  # the generator says so
        if target in there:
            path = posixpath.relpath(there[target], posixpath.dirname(name) or ".")
            return f"{image}[{text}]({path}{anchor or ''})"
        named = target.relative_to(ROOT).as_posix()
        return text if named.split("/")[-1] in text else f"{text} (`{named}`)"

    return _LINK.sub(link, file.read_text())


if __name__ == "__main__":
    gather()
