"""The page's HTTP: who is let in, what a browser may do with it, and how many may look."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import time
from collections.abc import Iterator

import msgspec
import pytest

from dataplane.watch import server
from dataplane.watch.history import History
from tests.watch.plane import HOSTILE, stats, step
from tests.watch.served import KEY, Page, served

BEGIN = 1_000.0


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    history = History("run")
    history.look(step(HOSTILE, BEGIN), stats(2), BEGIN + 30)
    with served(history) as shown:
        shown.show(history.view(BEGIN + 31, 2.0))
        yield shown


@pytest.mark.parametrize("path", ["/", "/live", "/step?number=1", "/page.js", "/%00"])
@pytest.mark.parametrize("given", ["", "key=", "key=wrong", "cookie"])
def test_a_stranger_without_the_key_is_shown_nothing(page: Page, path: str, given: str) -> None:
    headers = (
        [f"Cookie: dataplane-page-{page.port}=wrong; other={KEY}"] if given == "cookie" else []
    )
    query = f"{'&' if '?' in path else '?'}{given}" if given[:3] == "key" else ""
    status, told, body = page.ask(path + query, *headers)
    assert status == "403 Forbidden"
    assert "dataplane watch --page" in body and "step-1" not in body
    assert "Set-Cookie" not in told


def test_the_link_gives_a_cookie_and_the_address_loses_the_key(page: Page) -> None:
    status, told, _ = page.ask(f"/?key={KEY}")
    assert (status, told["Location"]) == ("303 See Other", "/")
    cookie, *rules = told["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Lax"} <= set(rules)
    status, told, body = page.ask("/", f"cookie: {cookie}")
    assert status == "200 OK" and body.startswith("<!doctype html>")
    assert told["Cache-Control"] == "no-store" and told["Referrer-Policy"] == "no-referrer"


def test_a_browser_may_run_only_the_pages_own_script_and_fetch_from_nowhere_else(
    page: Page,
) -> None:
    _, told, body = page.ask("/", f"Cookie: dataplane-page-{page.port}={KEY}")
    policy = told["Content-Security-Policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", body, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", body, re.DOTALL)
    for kind, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert re.findall(r"(?:src|href)=\"(.*?)\"", body) == ["data:,"]
    assert "innerHTML" not in script and "http" not in script


def test_what_a_user_named_comes_as_json_and_not_as_markup(page: Page) -> None:
    status, told, body = page.ask(f"/step?number=1&key={KEY}")
    assert (status, told["Content-Type"]) == ("200 OK", "application/json")
    assert told["X-Content-Type-Options"] == "nosniff"
    assert json.loads(body)["partition"] == HOSTILE


def test_the_picture_of_a_step_is_told_by_its_number(page: Page) -> None:
    assert json.loads(page.ask(f"/step?number=1&key={KEY}")[2])["partition"] == HOSTILE
    for number in ("2", "-1", "9" * 400):
        assert page.ask(f"/step?number={number}&key={KEY}")[0] == "404 Not Found"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(page: Page, method: str) -> None:
    assert page.ask(f"/?key={KEY}", method=method)[0] == "405 Method Not Allowed"


@pytest.mark.parametrize(
    "sent",
    [b"\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/1.1\xff\r\n\r\n", b"GET //[ HTTP/1.1\r\n\r\n",
     b"GET /step?number=x&key=%s HTTP/1.1\r\n\r\n" % KEY.encode(), b"x" * 70_000],
)  # fmt: skip
def test_a_request_that_is_none_is_hung_up_on(page: Page, sent: bytes) -> None:
    with page.connect() as sock:
        try:
            sock.sendall(sent)
            assert sock.recv(100) == b""
        except ConnectionError:
            pass
    assert page.ask(f"/step?number=1&key={KEY}")[0] == "200 OK"


def viewer(page: Page) -> socket.socket:
    sock = page.connect()
    sock.sendall(f"GET /live?key={KEY} HTTP/1.1\r\n\r\n".encode())
    return sock


def test_strangers_that_send_nothing_do_not_shut_out_a_request_with_the_key(page: Page) -> None:
    idle = [page.connect() for _ in range(2 * server.MAX_REQUESTS)]
    try:
        assert page.ask(f"/step?number=1&key={KEY}")[0] == "200 OK"
        assert idle[0].recv(1) == b""  # it made room
    finally:
        for one in idle:
            one.close()


def test_viewers_have_a_limit_and_each_gets_the_newest_view(page: Page) -> None:
    viewers = [viewer(page) for _ in range(server.MAX_VIEWERS)]
    try:
        for one in viewers:
            told = b""
            while b"\n\n" not in told.partition(b"\r\n\r\n")[2]:
                told += one.recv(1 << 16)
            head, _, event = told.partition(b"\r\n\r\n")
            assert b"text/event-stream" in head
            assert json.loads(event.removeprefix(b"data: "))["run"] == "run"
        assert page.ask(f"/live?key={KEY}")[0] == "503 Service Unavailable"
        assert page.ask(f"/step?number=1&key={KEY}")[0] == "200 OK"
    finally:
        for one in viewers:
            one.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # those that left make room
        with viewer(page) as one:
            if one.recv(15) == b"HTTP/1.1 200 OK":
                return
        time.sleep(0.05)
    pytest.fail("viewers that have left are still counted")


def test_nothing_queues_for_a_viewer_that_does_not_read(page: Page) -> None:
    """It is told the newest view when it reads again, not all of those meanwhile."""
    history = History("run")
    history.look(step("step-99", BEGIN, hosts=64, groups=64), stats(64), BEGIN + 30)
    view = history.view(BEGIN + 31, 2.0)
    assert len(msgspec.json.encode(view)) > 20_000
    with viewer(page) as slow:
        for _ in range(800):
            page.show(view)
        page.ask(f"/step?number=1&key={KEY}")  # after all of them
        slow.settimeout(0.5)
        told = 0
        try:
            while more := slow.recv(1 << 20):
                told += more.count(b"data: ")
        except TimeoutError:
            pass
        assert 1 <= told < 400
