"""Large offers are shown page by page: each page reads what it shows, once."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from gateway.mcp.admin import pins_admin
from gateway.mcp.admin.pins_admin import chosen, compared
from gateway.routes.mcp import pins
from gateway.routes.mcp.pins import page_of, to_offer
from gateway.tenancy.errors import InvalidField
from gateway.wire.admin.mcp_pins import McpOfferQuery
from mcp_bridge.pinning import ApprovedPins, Offer, Pin, offer_of
from mcp_bridge.trust import scan
from mcp_bridge.trust.meaning import Comparison
from mcp_bridge.trust.scan import LabelledPin, scan_together
from mcp_bridge.upstream.upstream import ServerConfig

CONFIG = ServerConfig(name="s", url="https://s.example/mcp")
MANY = 1_200


def offered(count: int) -> Offer:
    return offer_of(
        ("tool", {"name": f"t{at:04}", "description": f"Number {at}."}) for at in range(count)
    )


def test_a_page_scans_no_more_than_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[str] = []

    def counting(kind: Any, value: Any) -> Any:
        scanned.append(value["name"])
        return scan.scan(kind, value)

    monkeypatch.setattr(pins_admin, "scan", counting)
    monkeypatch.setattr(pins_admin, "SCANNED", {})
    seen = compared(CONFIG, ApprovedPins(), offered(MANY))
    assert scanned == []
    names: list[str] = []
    query = McpOfferQuery(limit=500)
    for pages in range(1, 4):
        page = to_offer(seen, page_of(seen, query))
        assert (page.waiting, page.digest) == (MANY + 1, seen.digest)
        names += [change.name for change in page.changes if change.kind == "tool"]
        assert scanned == names
        assert (page.next is None) == (pages == 3)
        query = McpOfferQuery(limit=500, after=page.next)
    assert names == [f"t{at:04}" for at in range(MANY)]
    to_offer(seen, page_of(seen))
    assert len(chosen(seen.found(), None)) == MANY + 1
    assert len(scanned) == MANY, "what is known to the byte is not read again"


def test_the_first_page_comes_without_reading_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first changes are shown at once, as a stream would have it."""
    monkeypatch.setattr(pins_admin, "SCANNED", {})
    approved, offer = offered(MANY), dict[Any, Pin]()
    for at, (key, pin) in enumerate(approved.pins.items()):
        body = pin.body if at < 499 else b"no JSON"
        offer[key] = Pin(pin.kind, pin.name, f"sha256:{at}", body)
    seen = compared(CONFIG, ApprovedPins(approved.pins), Offer(offer))
    page = to_offer(seen, page_of(seen, McpOfferQuery(limit=500)))
    assert [change.state for change in page.changes] == ["new", *["changed"] * 499]
    assert page.waiting == MANY + 1
    with pytest.raises(msgspec.DecodeError):
        to_offer(seen, page_of(seen, McpOfferQuery(limit=500, after=page.next)))


def test_a_page_of_large_things_is_shorter() -> None:
    large = {"description": "Numbers.", "_meta": {"n": ["x" * 200] * 2_000}}
    offer = offer_of(("tool", {"name": f"t{at}", **large}) for at in range(6))
    seen = compared(CONFIG, ApprovedPins(), offer)
    sizes, query = [], McpOfferQuery()
    while True:
        page = to_offer(seen, page_of(seen, query))
        sizes.append(len(page.changes))
        if page.next is None:
            break
        query = McpOfferQuery(after=page.next)
    assert sum(sizes) == 7 and max(sizes) <= 4


async def test_a_page_is_found_once_and_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    class NoModel:
        async def compare(self, changes: Any) -> Comparison:
            return Comparison(note=f"{len(changes)} were asked about")

    def found(seen: Any, query: Any) -> tuple[int, int]:
        threads.append(threading.get_ident())
        return page_of(seen, query)

    monkeypatch.setattr(pins, "page_of", found)
    admin: Any = NoModel()
    page = await pins.show_page(admin, compared(CONFIG, ApprovedPins(), offered(3)))
    assert (len(page.changes), page.notes) == (4, ["4 were asked about"])
    assert len(threads) == 1 and threads[0] != threading.get_ident()


def test_a_cursor_of_something_else_is_refused_by_name() -> None:
    seen = compared(CONFIG, ApprovedPins(), offered(3))
    with pytest.raises(InvalidField) as refused:
        page_of(seen, McpOfferQuery(after="f" * 32))
    assert refused.value.param == "after"


def test_ten_thousand_names_that_look_alike_are_compared_once_each() -> None:
    """Each is shown three others, whichever; nobody is compared with all."""
    names = [f"a{at:014b}b".replace("0", "_").replace("1", "-") for at in range(10_000)]
    pins = offer_of(("tool", {"name": name}) for name in names).pins.values()
    found = scan_together([LabelledPin("s", pin) for pin in pins])
    assert len(found) == len(names)
    for (_, _, name), findings in found.items():
        (finding,) = findings
        assert finding.code == "lookalike" and f": {name}," not in f"{finding.detail},"
