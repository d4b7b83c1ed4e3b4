"""A browser in front of the console, for every test here: one server and one Chromium a session.

A page is tested by all that is here as soon as it is registered (`test_pages.py`). What is its own
journey takes five lines:

    def test_a_key_is_revoked(visit: Visit) -> None:
        tab = visit("little", "owner", "/console/keys")
        tab.get_by_role("button", name="Revoke").first.click()
        tab.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        expect(tab.get_by_role("status")).to_contain_text("is revoked")

`visit` fails a test whose page says anything on its console, or breaks its policy. Playwright's
objects belong to a thread, where such tests run as a whole: in the main one its event loop would
be in the way of all tests that have another.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.databases import Databases
from tests.gateway.conftest import be_patient
from tests.gateway.console.seeds import sow
from tests.gateway.console.server import ConsoleServer, serving

log = logging.getLogger(__name__)

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
WIDE, NARROW = {"width": 1360, "height": 960}, {"width": 390, "height": 844}
CLOSE_S = 60.0
"""Closing a tab takes some hundredths of a second."""
Visit = Callable[..., Any]
BROWSER = ThreadPoolExecutor(1, thread_name_prefix="browser")


def in_browser_thread(work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    return BROWSER.submit(work, *arguments, **named).result()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if "playwright" not in pyfuncitem.fixturenames:
        return None
    named = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    in_browser_thread(pyfuncitem.obj, **named)
    return True


@pytest.fixture(scope="session")
def console(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ConsoleServer]:
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        home = tmp_path_factory.mktemp("console")
        with serving(databases, redis_server_url, home, sow) as server:
            patch.undo()
            yield server


@pytest.fixture(autouse=True)
def patient_server(patient: None) -> None:
    """Let the server wait during the tests here alone: it outlives them, beside tests of others."""


@pytest.fixture(scope="session")
def playwright() -> Iterator[Any]:
    if not Path(CHROMIUM).exists():
        pytest.skip("there is no Chromium (apt-get install chromium)")
    started = in_browser_thread(begin_playwright)
    yield started
    in_browser_thread(started.stop)


def begin_playwright() -> Any:
    from playwright.sync_api import sync_playwright

    return sync_playwright().start()


@pytest.fixture(scope="session")
def launch(playwright: Any) -> Callable[[], Any]:
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    return partial(playwright.chromium.launch, executable_path=CHROMIUM, args=options)


@pytest.fixture(scope="session")
def chromium(launch: Callable[[], Any]) -> Iterator[Any]:
    browser = in_browser_thread(launch)
    yield browser
    in_browser_thread(browser.close)


class Contexts:
    """Lends contexts of a browser. One that was given back is lent again, without cookies: a new
    one, whose first page gets a process of its own, takes four times what a page takes in an old
    one. What a tab stored goes with the tab."""

    def __init__(self, launch: Callable[[], Any]) -> None:
        self._launch = launch
        self._browser: Any = None
        self._free: dict[str, list[Any]] = {}
        self._lent: list[tuple[str, Any]] = []

    def lend(self, url: str, **options: Any) -> Any:
        """`url`: of the server; `options`: as of `browser.new_context`."""
        named = f"{url} {options}"
        free = self._free.setdefault(named, [])
        if free:
            context = free.pop()
        else:
            if self._browser is None:
                self._browser = self._launch()
            context = self._browser.new_context(**options)
            context.new_page().goto(f"{url}/health/live")  # stays, and with it its process
        self._lent.append((named, context))
        return context

    def take_back(self) -> None:
        """Take back all that are lent. A browser that does not close a tab in CLOSE_S hangs: its
        processes are killed, and who lends next gets another browser."""
        from playwright.sync_api import Error

        hangs = threading.Event()

        def end_browser() -> None:
            hangs.set()
            kill_browsers()

        timer = threading.Timer(CLOSE_S, end_browser)
        timer.start()
        try:
            for named, context in self._lent:
                _, *opened = context.pages
                for tab in opened:
                    tab.close()
                context.clear_cookies()
                self._free[named].append(context)
        except (Error, ValueError):
            if not hangs.is_set():
                raise
            log.warning("Chromium hung while it closed a tab: another one is started")
            self._browser = None
            self._free.clear()
        finally:
            timer.cancel()
            self._lent.clear()

    def close(self) -> None:
        if self._browser is not None:
            self._browser.close()


def kill_browsers() -> None:
    """Kill what this process has started of Chromium."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "chromium" in child.name():
                child.kill()


@pytest.fixture(scope="session")
def kept_contexts(launch: Callable[[], Any]) -> Iterator[Contexts]:
    contexts = Contexts(launch)
    yield contexts
    in_browser_thread(contexts.close)


@pytest.fixture
def contexts(kept_contexts: Contexts) -> Iterator[Contexts]:
    yield kept_contexts
    in_browser_thread(kept_contexts.take_back)


@pytest.fixture(scope="session")
def sessions(console: ConsoleServer) -> Callable[[str, str], dict[str, str]]:
    """The cookies of somebody who is signed in; each signs in once."""
    known: dict[tuple[str, str], dict[str, str]] = {}

    def of(org: str, role: str) -> dict[str, str]:
        if (org, role) not in known:
            known[org, role] = console.session(console.organization(org), role)
        return known[org, role]

    return of


@pytest.fixture
def visit(
    contexts: Contexts, console: ConsoleServer, sessions: Callable[[str, str], dict[str, str]]
) -> Iterator[Visit]:
    """Opens an address as somebody: `visit("little", "reader", "/console/keys", theme="dark",
    narrow=True, script=False)`."""
    said: list[str] = []

    def open_page(
        org: str,
        role: str | None,
        address: str,
        *,
        theme: str = "light",
        narrow: bool = False,
        script: bool = True,
        quiet: bool = True,
    ) -> Any:
        context = contexts.lend(
            console.url,
            viewport=NARROW if narrow else WIDE,
            color_scheme=theme,
            java_script_enabled=script,
            timezone_id="Europe/Vienna",
        )
        if role is not None:
            context.add_cookies(
                [
                    {"name": name, "value": value, "url": console.url}
                    for name, value in sessions(org, role).items()
                ]
            )
        tab = context.new_page()
        if quiet:
            tab.on("console", lambda message: note(said, message))
            tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(console.url + address)
        return tab

    yield open_page
    in_browser_thread(contexts.take_back)  # by then its tabs have said all
    assert said == []


def note(said: list[str], message: Any) -> None:
    """Note what a page says, but for the browser's word that a page is not theirs."""
    if message.type in ("error", "warning") and "status of 403" not in message.text:
        said.append(f"{message.type}: {message.text}")
