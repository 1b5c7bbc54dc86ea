"""Links of the pages as the repository has them, made links of the site.

Pages link to files beside docs/ too, which a reader of the repository follows; on the site these
are named, and pages of protocol/ lie under docs/ by a symbolic link.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs for each page."""
    docs = Path(config["docs_dir"])
    here = Path(os.path.realpath(page.file.abs_src_path)).parent

    def link(found: re.Match[str]) -> str:
        image, text, path, anchor = found.groups()
        target = Path(os.path.normpath(here / path))
        for folder, name in ((docs, ""), (docs.parent / "protocol", "protocol/")):
            if target.is_relative_to(folder) and target.is_file():
                inside = name + target.relative_to(folder).as_posix()
                start = posixpath.dirname(page.file.src_uri)
                return f"{image}[{text}]({posixpath.relpath(inside, start)}{anchor or ''})"
        if not target.exists():
            return found[0]  # mkdocs says so
        named = target.relative_to(docs.parent).as_posix()
        return text if named.split("/")[-1] in text else f"{text} (`{named}`)"

    return _LINK.sub(link, markdown)
