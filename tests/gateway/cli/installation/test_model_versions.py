"""`tollgate models versions`, `pin` and `unpin` ask the API for what is there, and change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.cli.shared.fake_gateway import FakeGateway, serving

VERSIONS, PINS = "/v1/admin/models/versions", "/v1/admin/models/pins"
VERSION = {
    "id": "mver_1",
    "model": "qwen",
    "version": 2,
    "served_by": "next",
    "digest": "0123456789abcdef",
    "serves": False,
    "created_at": 1_790_000_000,
}
PIN = {
    "id": "mpin_1",
    "model": "qwen",
    "scope": "installation",
    "scope_id": "",
    "version": 2,
    "created_at": 1_790_000_000,
}


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with serving() as found:
        found.on("GET", VERSIONS, {"data": [VERSION], "has_more": False})
        found.on("GET", PINS, {"data": [PIN], "has_more": False})
        found.on("POST", VERSIONS, VERSION)
        found.on("POST", PINS, PIN)
        found.on("DELETE", f"{VERSIONS}/mver_1", VERSION)
        found.on("DELETE", f"{PINS}/mpin_1", PIN)
        yield found


def test_versions_are_listed_added_and_removed(gateway: FakeGateway) -> None:
    listed = gateway.run("models", "versions", "list", "qwen").output.splitlines()
    assert listed[1].split()[:5] == ["qwen", "2", "next", "no", "0123456789ab"]
    added = gateway.run("models", "versions", "add", "qwen", "next")
    assert added.output == "next is version 2 of qwen, digest 0123456789ab.\n"
    gone = gateway.run("models", "versions", "remove", "qwen", "2")
    assert gone.output == "Version 2 of qwen is forgotten.\n"
    missing = gateway.run("models", "versions", "remove", "qwen", "3")
    assert missing.exit_code == 2 and "qwen has no version 3" in missing.output


def test_pins_are_listed_set_and_taken_away(gateway: FakeGateway) -> None:
    assert gateway.run("models", "pins").output.splitlines()[1].split()[:3] == ["qwen", "2", "all"]
    assert gateway.run("models", "pin", "qwen", "2", "--org", "org_a").exit_code == 0
    assert gateway.asked[-1][3] == {
        "model": "qwen",
        "version": 2,
        "scope": "org",
        "scope_id": "org_a",
    }
    gone = gateway.run("models", "unpin", "qwen", "--all")
    assert gone.output == "Everybody is pinned to no version of qwen.\n"
    for who in ((), ("--all", "--org", "org_a")):
        refused = gateway.run("models", "pin", "qwen", "2", *who)
        assert refused.exit_code == 2 and "name one of --org" in refused.output
