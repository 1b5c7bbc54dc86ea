"""`dataplane watch`: show which workers are waiting, and for what, in a terminal or web page."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import shutil
import signal
import socket
import sys

from dataplane.launch import settings, values
from dataplane.launch.rundir import Find
from dataplane.launch.token import read_token
from dataplane.watch import terminal
from dataplane.watch.history import View
from dataplane.watch.server import Server
from dataplane.watch.watcher import Watcher

ROLE = "page"
"""The role of the key that is derived from the cluster token."""


def watch(arguments: argparse.Namespace, find: Find) -> int:
    """Show the run until Ctrl-C, also after its peers are replaced."""
    arguments.run, _ = find()
    watcher = Watcher(arguments.run, lambda: find()[1])
    if arguments.page is not None:
        return _on_page(arguments, watcher)
    is_terminal = sys.stdout.isatty()
    while True:
        view = watcher.look()
        width = shutil.get_terminal_size().columns if is_terminal else 120
        text = "\n".join(terminal.lines(view, width, is_terminal))
        print(("\x1b[2J\x1b[H" if is_terminal else "") + text, flush=True)
        if not watcher.pause():
            return 0


def _on_page(arguments: argparse.Namespace, watcher: Watcher) -> int:
    """Serve the page until Ctrl-C or SIGTERM. Raise InvalidConfig, TokenMissing or AddressInUse."""
    where, file = values.parse_http(arguments.page, "page", "127.0.0.1:8787"), arguments.token_file
    token = read_token(file) if file else settings.of_variable("token-file")
    values.check_visible("the page", where, token)
    key = token.key(arguments.run, ROLE).hex() if token is not None else secrets.token_hex(16)
    asyncio.run(_serve(watcher, key, where.host, where.port))
    return 0


async def _serve(watcher: Watcher, key: str, host: str, port: int) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = Server(watcher.history.picture_of, key)
    bound, port = await server.open(host, port)
    shown = socket.gethostname() if bound in ("0.0.0.0", "::") else bound
    shown = f"[{shown}]" if ":" in shown else shown
    print(f"http://{shown}:{port}/?key={key}", flush=True)
    print(
        "Open this link in a browser. Keep it secret: anyone who has it can see the run. Press "
        "Ctrl-C to stop.",
        flush=True,
    )

    def seen(view: View) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(server.show, view)

    with watcher.looking(seen):
        await stop.wait()
        await server.close()
