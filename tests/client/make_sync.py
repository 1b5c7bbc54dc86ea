"""Generates the blocking client, `dataplane/client/_sync`, from the one that awaits, `_async`.

Run as `make sync`; `--check` only compares. Both have each public method with its signature and
docstring, where editors and type checkers look for them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[2] / "dataplane" / "client"
BY_HAND = {"__init__.py", "backend.py"}
RULES = [
    (r"\bawait ", ""),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bdataplane\.client\._async\b", "dataplane.client._sync"),
    (r"\baio\.", ""),
    (r"\bConnecting\[Plane\]", "Plane"),
    (r"\bAwaitable\[(\w+)\]", r"\1"),
    (r"\bCoroutine\[Any, Any, (\w+)\]", r"\1"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\b__a(enter|exit|iter)__", r"__\1__"),
    (r"\b__anext__", "__next__"),
    (r"\baclose\b", "close"),
]


def modules() -> list[str]:
    """The names of what is made."""
    return sorted({path.name for path in (CLIENT / "_async").glob("*.py")} - BY_HAND)


def made_of(name: str) -> str:
    """The blocking module that belongs to the awaiting one of this name."""
    text = (CLIENT / "_async" / name).read_text()
    for awaiting, blocking in RULES:
        text = re.sub(awaiting, blocking, text)
    head, rest = text.split('"""\n', 1)
    text = f'{head}\n\nGenerated from dataplane/client/_async/{name}: change that.\n"""\n{rest}'
    stdin = ("--stdin-filename", str(CLIENT / "_sync" / name), "-")
    text = _ruff("check", "--select", "I,F401", "--fix", "--quiet", *stdin, text=text)
    return _ruff("format", "--quiet", *stdin, text=text)


def _ruff(*arguments: str, text: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments]
    return subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    stale = []
    for name in modules():
        path, text = CLIENT / "_sync" / name, made_of(name)
        if not path.exists() or path.read_text() != text:
            stale.append(str(path))
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale and "--check" in sys.argv:
        sys.exit(f"not as new, run make sync: {', '.join(stale)}")


if __name__ == "__main__":
    main()
