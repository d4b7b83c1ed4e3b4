"""Makes pictures of all pages of the console, for `make shots`: light, dark and narrow, with little
and with much data, in the folder that SHOTS names. Without it nothing is done."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.console.conftest import Visit
from tests.gateway.console.figures.showcase import make_showcase
from tests.gateway.console.server import ConsoleServer
from tests.gateway.console.test_pages import addresses

SHOTS = os.environ.get("SHOTS", "")
LOOKS = (("light", False), ("dark", False), ("light", True))
OF_README: Any = {"width": 1280, "height": 1160}
"""The size of the pictures that the README shows."""
IDS = re.compile(r"[a-z_]+[-_][0-9a-f]{32}")


@pytest.mark.skipif(not SHOTS, reason="`make shots` makes pictures")
@pytest.mark.timeout(3600)
def test_pictures_are_made(visit: Visit, console: ConsoleServer) -> None:
    folder = Path(SHOTS)
    folder.mkdir(parents=True, exist_ok=True)
    for org in ("little", "much"):
        for theme, narrow in LOOKS:
            tab = visit(org, "owner", "/console", theme=theme, narrow=narrow, quiet=False)
            for address in ["/oauth/account", *addresses(console, console.organization(org))]:
                tab.goto(console.url + address)
                tab.wait_for_load_state("networkidle")
                look = "narrow" if narrow else theme
                path = folder / f"{name_of(address)}-{org}-{look}.png"
                tab.screenshot(path=path, full_page=narrow)


@pytest.mark.skipif(not SHOTS, reason="`make shots` makes pictures")
def test_the_readmes_picture_of_the_overview_is_made(chromium: Any, console: ConsoleServer) -> None:
    cookies = console.session(console.call(lambda: make_showcase(console)), "owner")
    size = {**OF_README, "height": 1310}
    context = chromium.new_context(viewport=size, timezone_id="Europe/Vienna")
    context.add_cookies(
        [{"name": name, "value": value, "url": console.url} for name, value in cookies.items()]
    )
    tab = context.new_page()
    for _ in range(2):  # the browser has told its zone by then
        tab.goto(f"{console.url}/console/overview")
        tab.wait_for_load_state("networkidle")
    Path(SHOTS).mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=Path(SHOTS) / "readme-overview.png")
    context.close()


def name_of(address: str) -> str:
    """Return a page's name without ids: an address is drawn anew each time."""
    plain = IDS.sub("one", address.removeprefix("/console/"))
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")
