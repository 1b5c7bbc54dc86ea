"""The page as people see it: in a browser, with 64 hosts and 100 steps, and by keyboard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from dataplane.events.merge import Event
from dataplane.watch.history import MAX_STEPS, History
from tests.bench.browser import Browser, chromium
from tests.watch.plane import HOSTILE, STEP_S, stats, step
from tests.watch.served import Page, served

HOSTS = 64
END = 1_000.0 + STEP_S * MAX_STEPS


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def browser(chrome: Browser) -> Iterator[Browser]:
    yield chrome
    chrome.open("about:blank", 1200)  # it hangs up


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """Of 100 steps, most of them small; the last but one has a hostile name."""
    events, number = list[Event](), 0
    for nth in range(MAX_STEPS):
        begin, late = 1_000.0 + STEP_S * nth, nth >= MAX_STEPS - 2
        how = {"hosts": HOSTS, "groups": 128, "batch": 64} if late else {"hosts": 2, "groups": 4}
        name = HOSTILE if nth == MAX_STEPS - 2 else f"step-{nth}"
        events += step(name, begin, number, slow_reward=8.0, seed=nth, **how)
        number = len(events)
    history = History("run")
    history.look(events, stats(HOSTS, HOSTILE), END)
    with served(history) as shown:
        shown.show(history.view(END, 2.0))
        yield shown


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def opened(browser: Browser, page: Page, width: int = 1200, dark: bool = False) -> None:
    browser.open(page.address, width, dark)
    until(lambda: bool(browser.tell("document.querySelector('canvas') !== null")), "it is drawn")


def press(browser: Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def text(browser: Browser, of: str) -> str:
    return str(browser.tell(f"document.querySelector({of!r}).textContent"))


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_of_64_hosts_and_100_steps_fits_its_screen_and_fetches_nothing_else(
    page: Page, browser: Browser, width: int, dark: bool
) -> None:
    opened(browser, page, width, dark)
    assert browser.errors == []
    assert [url.rpartition("/")[2] for url in browser.fetched] == ["live"]
    assert browser.tell("document.documentElement.scrollWidth") <= width
    assert browser.tell("document.querySelectorAll('#bars > div').length") == MAX_STEPS
    assert browser.tell("document.querySelectorAll('canvas')[1].lanes.length") == HOSTS
    assert text(browser, "body").lstrip().startswith("step-99 took ")
    assert "64 hosts · known" in text(browser, "#state")
    colours = "(e => [e.color, e.backgroundColor])(getComputedStyle(document.body))"
    ink, paper = browser.tell(colours)
    assert (ink == "rgb(228, 232, 238)", paper == "rgb(13, 17, 23)") == (dark, dark)


@pytest.mark.needs("chromium")
def test_by_keyboard_one_chooses_a_step_and_reads_a_lane(page: Page, browser: Browser) -> None:
    opened(browser, page)
    browser.tell("document.activeElement.blur()")
    press(browser, "Tab")
    assert browser.tell("document.activeElement.id") == "bars"
    press(browser, "ArrowLeft")
    until(lambda: text(browser, "#chosen").startswith(HOSTILE), "the step before is chosen")
    # Its name is text: it made no element, and no script of it ran.
    assert browser.tell("document.querySelectorAll('img').length") == 0
    assert browser.tell("document.title") == "step-99 · dataplane"
    press(browser, "Home")
    until(lambda: text(browser, "#chosen").startswith("step-0 took"), "the first one is")
    press(browser, "Tab")
    assert browser.tell("document.activeElement.id") == "follow"
    browser.tell("document.activeElement.click()")
    until(lambda: bool(browser.tell("document.getElementById('follow').hidden")), "the newest is")
    browser.tell("document.querySelectorAll('canvas')[1].focus()")
    press(browser, "End")
    press(browser, "ArrowDown")
    assert text(browser, "#cursor").startswith("reward on host-1, after ")


@pytest.mark.needs("chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_what_the_cursor_is_on_is_said_where_it_can_be_seen(
    page: Page, browser: Browser, width: int
) -> None:
    """Though the pictures of 64 hosts are higher than the screen. It is said to screen readers
    too, which leave the arrow keys to an application."""
    opened(browser, page, width)
    for n in range(3):
        browser.tell(f"document.querySelectorAll('canvas')[{n}].focus()")
        assert text(browser, "#cursor") == ""
        press(browser, "ArrowRight")
        assert " on host-0, after 0 s: " in text(browser, "#cursor")
        box = "(r => [r.top, r.bottom, innerHeight])(said.getBoundingClientRect())"
        top, bottom, screen = browser.tell(box)
        assert 0 < top < bottom <= screen
        press(browser, "ArrowRight")
        assert " on host-0, after 0 s: " not in text(browser, "#cursor")
        press(browser, "Escape")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
    assert roles.count("application") == 3
    says = [property["value"]["value"] for node in nodes for property in node.get("properties", [])
            if property["name"] == "live" and node["role"]["value"] == "status"]  # fmt: skip
    assert says == ["polite", "polite"]
    bars = next(node for node in nodes if node["role"]["value"] == "listbox")
    told = {one["name"]: one["value"].get("value") for one in bars["properties"]}
    assert told["orientation"] == "horizontal"


@pytest.mark.needs("chromium")
def test_the_cursor_belongs_to_its_step_and_escape_goes_back_to_the_newest(
    page: Page, browser: Browser
) -> None:
    opened(browser, page)
    browser.tell("document.querySelector('canvas').focus()")
    press(browser, "End")
    said = text(browser, "#cursor")
    assert said
    browser.tell("document.getElementById('bars').focus()")
    press(browser, "Home")
    until(lambda: text(browser, "#chosen").startswith("step-0 took"), "another step is shown")
    assert text(browser, "#cursor") == ""
    press(browser, "Escape")
    until(lambda: bool(browser.tell("document.getElementById('follow').hidden")), "the newest is")
    assert text(browser, "#cursor") == said


@pytest.mark.needs("chromium")
def test_a_step_that_has_just_begun_is_drawn_as_it_grows(browser: Browser) -> None:
    """Its picture lacks the stages that have not begun, and the focus is not lost with them."""
    history = History("run")
    history.look(step("step-1", 1_000.0), stats(4), 1_040.0)
    puts = [event for event in step("step-2", 1_040.0, 10_000) if event.kind == "put"]

    def show(many: int, drawn: int) -> None:
        """The page, after so many puts of the second step; drawn: the stages in its picture."""
        later, events = History("run"), [*step("step-1", 1_000.0), *puts[:many]]
        later.look(events, stats(4), events[-1].at)
        growing.show(later.view(events[-1].at, 2.0))
        many_drawn = "document.querySelectorAll('canvas').length"
        until(lambda: browser.tell(many_drawn) == drawn, f"{drawn} stages are drawn")

    with served(history) as growing:
        growing.show(history.view(1_040.0, 2.0))
        opened(browser, growing)
        focused = "(e => e.id || e.getAttribute('aria-label'))(document.activeElement)"
        for focus, many, drawn, then in (
            (0, len(puts), 1, "rollout (puts) on "),
            (2, len(puts), 1, "rollout (puts) on "),
            (2, 1, 0, "bars"),
        ):
            browser.tell(f"document.querySelectorAll('canvas')[{focus}].focus()")
            show(many, drawn)
            assert browser.tell(focused).startswith(then)
            show(0, 3)
            assert browser.tell(focused).startswith(then)
        assert browser.errors == []
        browser.open("about:blank", 1200)


@pytest.mark.needs("chromium")
def test_the_page_says_when_what_it_shows_is_old(page: Page, browser: Browser) -> None:
    history = page.history
    opened(browser, page)
    try:
        history.failed("peer 'a' does not answer")
        page.show(history.view(END + 60, 2.0))
        until(lambda: "Stale: the plane has not answered" in text(browser, "#state"), "it is stale")
        assert "the state shown is 60 s old" in text(browser, "#trouble")
        assert "stale" in browser.tell("document.body.className")
    finally:
        history.look([], None, END)
        page.show(history.view(END, 2.0))


@pytest.mark.needs("chromium")
def test_the_page_says_when_nobody_serves_it_any_more(browser: Browser) -> None:
    history = History("run")
    history.look(step("step-1", 1_000.0), stats(4), 1_010.0)
    with served(history) as page:
        page.show(history.view(1_010.0, 2.0))
        opened(browser, page)
    until(lambda: text(browser, "#state").startswith("No connection"), "it says so")
    assert text(browser, "h1").startswith("step-1 took")
