"""Makes pictures of all pages of the console, for `make shots`: light, dark and narrow, with little
and with much data, in the folder that SHOTS names. Without it nothing is done."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.gateway.console.conftest import Visit
from tests.gateway.console.server import ConsoleServer
from tests.gateway.console.test_pages import addresses

SHOTS = os.environ.get("SHOTS", "")
LOOKS = (("light", False), ("dark", False), ("light", True))
OF_README = {"keys": "light", "playground": "dark"}
"""The pages that the README shows, and how."""
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

    for name, theme in OF_README.items():
        tab = visit("little", "owner", f"/console/{name}", theme=theme, quiet=False)
        tab.set_viewport_size({"width": 1200, "height": 720})
        tab.wait_for_load_state("networkidle")
        tab.screenshot(path=folder / f"readme-{name}.png")


def name_of(address: str) -> str:
    """Return a page's name without ids: an address is drawn anew each time."""
    plain = IDS.sub("one", address.removeprefix("/console/"))
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")
