"""`make quick` installs less than `make test`: its tests import nothing that it lacks."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {"scikit_image": "skimage"}
"""Of packages whose module has another name."""


def lacking() -> set[str]:
    """Modules of the packages that the extra `test` brings and `quick` does not."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]

    def brought(extra: str) -> set[str]:
        found: set[str] = set()
        for wanted in extras[extra]:
            name = re.split(r"[\[<>=,; ]", wanted)[0]
            if name == "dataplane-rl":
                for other in re.search(r"\[(.*?)\]", wanted)[1].split(","):  # type: ignore[index]
                    found |= brought(other)
            else:
                module = name.replace("-", "_").lower()
                found.add(MODULES.get(module, module))
        return found

    return brought("test") - brought("quick")


def test_files_of_make_quick_import_nothing_that_it_does_not_install() -> None:
    recipe = subprocess.run(
        ["make", "-n", "quick"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("pytest")[-1]
    left_out = {ROOT / path for path in re.findall(r"--ignore=(\S+)", recipe)}
    named = [ROOT / path for path in re.findall(r" (tests/\S+)", recipe)]
    files = {f for path in named for f in (path.rglob("*.py") if path.is_dir() else [path])}
    assert files and left_out <= files
    absent = lacking()
    assert "torch" in absent
    for file in sorted(files - left_out):
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported = {name.partition(".")[0] for name in names}
            assert not imported & absent, f"{file.relative_to(ROOT)} imports {imported & absent}"
