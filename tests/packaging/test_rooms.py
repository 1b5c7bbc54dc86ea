"""The rooms of the house: folders import one way, so that each is read without those after it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HOUSE = Path(__file__).parents[2] / "dataplane"
PLUG_INS = {HOUSE / "gpu" / "client", HOUSE / "gpu" / "peer.py"}
ORDER = {
    "": [
        "errors",
        "latest",
        "plugins",
        "version",
        "wire",
        "events",
        "timeline",
        "memory",
        "gpu",
        "transport",
        "metadata",
        "launch",
        "progress",
        "peer",
    ],
    "metadata": ["tables", "shard", "roster"],
    "peer": [
        *("descriptors", "failures", "tasks", "operations", "once"),
        *("rates", "host", "notices", "sessions", "pipeline"),
        *("net", "room", "pull", "shards", "requests", "door", "membership", "watch"),
        *("peer", "main"),
    ],
    "client": [
        *("ref", "arguments", "tracebacks", "session", "write", "read"),
        *("balancing", "checkpoint", "_async", "_sync"),
    ],
}
"""Modules and folders of each folder; each imports from those before it only."""


def imports(folder: str) -> Iterator[tuple[Path, str, str]]:
    """(file, its room in this folder, a room of the folder that it imports from)."""
    parts = folder.split(".") if folder else []
    for path in sorted(HOUSE.joinpath(*parts).rglob("*.py")):
        here = path.relative_to(HOUSE).with_suffix("").parts[len(parts)]
        if folder == "" and PLUG_INS & {path, *path.parents}:
            continue  # imports what it plugs into, which loads it by name
        for node in _run(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{name.name}" for name in node.names]
            elif isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            for name in names:
                found = name.split(".")[1:]
                if name.startswith("dataplane.") and found[: len(parts)] == parts:
                    yield path, here, found[len(parts)]


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """What is carried out, so not what only types need."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _run(child)


def test_rooms_import_one_way() -> None:
    wrong = []
    for folder, order in ORDER.items():
        rank = {name: at for at, name in enumerate(order)}
        for path, here, there in imports(folder):
            if rank.get(there, -1) > rank.get(here, len(order)):
                wrong.append(f"{path.relative_to(HOUSE)} imports from {folder}.{there}")
    assert not wrong


def test_client_and_peer_load_what_they_have_on_devices_by_name() -> None:
    """`gpu/client` and `gpu/peer` import what they plug into, so an import in the other direction
    would be a cycle. Without device arenas nothing of them is loaded."""
    wrong = [
        path.relative_to(HOUSE)
        for path in HOUSE.rglob("*.py")
        if not PLUG_INS & {path, *path.parents}
        for node in _run(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith(("dataplane.gpu.client", "dataplane.gpu.peer"))
    ]
    assert not wrong


def test_every_room_has_its_place() -> None:
    for folder, order in ORDER.items():
        if folder:
            there = {path.stem for path in HOUSE.joinpath(folder).iterdir()}
            assert there - {"__init__", "__pycache__"} == set(order)


def test_clients_and_peers_know_nothing_of_each_other() -> None:
    """Only users import integrations and the packages beside dataplane."""
    for path in HOUSE.rglob("*.py"):
        room = path.relative_to(HOUSE).parts[0]
        text = path.read_text()
        assert room != "peer" or "dataplane.client" not in text, path
        assert room != "client" or "from dataplane.peer" not in text, path
        assert room == "integrations" or "from dataplane.integrations" not in text, path
        assert "import dataplane_transfer_queue" not in text, path
        assert "from dataplane_transfer_queue" not in text, path


def test_only_the_backends_of_the_client_wait() -> None:
    """The rest of `_async` is `async def` without a library of its own, so that `_sync` can be
    generated from it."""
    for folder in ("_async", "_sync"):
        for path in HOUSE.joinpath("client", folder).glob("*.py"):
            if path.stem != "backend":
                imported = {
                    name.name
                    for node in ast.walk(ast.parse(path.read_text()))
                    if isinstance(node, ast.Import)
                    for name in node.names
                }
                assert not imported & {"asyncio", "threading", "select", "socket"}, path


def test_the_registry_names_engines_and_nobody_imports_them() -> None:
    """A bulk worker loads the one that it runs."""
    engines = HOUSE / "transport" / "engines"
    for path in HOUSE.rglob("*.py"):
        if engines not in path.parents:
            assert "from dataplane.transport.engines" not in path.read_text(), path
