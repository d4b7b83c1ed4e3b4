"""Stored settings beside those of the file: who hides whom, and what may not be stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.installation.merge import ChangeCheck, Kind, Merger, StoredSetting, file_names, without
from gateway.lanes import LaneDeadlines
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings, load, read_api_key
from gateway.settings.prices import load_prices
from tests.budget import examples
from tests.gateway.whole_app import SECRET

MERGER = Merger("host:/home", SECRET)
FILE = """
[[model]]
name = "far"
upstream = "https://far.example/v1"
api_key_env = "FAR_KEY"
[[mcp.servers]]
name = "tools"
url = "https://tools.example/mcp"
[deadlines]
agentic = 120
"""
CONTENT: dict[Kind, dict[str, Any]] = {
    "model": {"upstream": "https://stored.example/v1"},
    "mcp_server": {"url": "https://stored.example/mcp"},
    "price_book": {"price": [{"model": "far", "valid_from": "2027-01-01", "output": "0.4"}]},
    "deadlines": {"seconds": 7},
}
NAMES: dict[Kind, list[str]] = {
    "model": ["far", "near", "wide"],
    "mcp_server": ["tools", "files", "mail"],
    "price_book": ["2026-12", "2027-01"],
    "deadlines": ["interactive", "agentic", "batch"],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder: Path = tmp_path_factory.mktemp("settings")
    path = folder / "tollgate.toml"
    path.write_text(FILE)
    return load({"config": path, "home": folder / "home"}, {})


def merged(file: Settings, items: Sequence[StoredSetting]) -> Settings:
    return MERGER.merged(file, items, file_names(file))


def stored(kind: Kind, at: str, /, **content: Any) -> StoredSetting:
    return StoredSetting(kind=kind, name=at, content=CONTENT[kind] | content)


@settings(max_examples=examples(50))
@given(st.sets(st.sampled_from([(kind, name) for kind in NAMES for name in NAMES[kind]])))
def test_the_file_hides_the_same_name_and_all_else_is_added(
    file: Settings, wanted: set[tuple[Kind, str]]
) -> None:
    items = [stored(kind, name) for kind, name in sorted(wanted)]
    found = merged(file, items)
    names = file_names(found)
    for kind in ("model", "mcp_server"):
        of_file = file_names(file)[kind]
        assert names[kind][: len(of_file)] == of_file
        rest = sorted(name for it, name in wanted if it == kind and name not in of_file)
        assert sorted(names[kind][len(of_file) :]) == rest
    assert found.models[0] == file.models[0]
    assert found.mcp.servers[0] == file.mcp.servers[0]
    assert list(found.stored_prices) == sorted(n for it, n in wanted if it == "price_book")
    lanes = {name for kind, name in wanted if kind == "deadlines"}
    assert found.deadlines == LaneDeadlines(
        interactive=7 if "interactive" in lanes else 60,
        agentic=120,
        batch=7 if "batch" in lanes else None,
    )
    assert without(found, items, file_names(file)) == file


@pytest.mark.parametrize(
    ("kind", "content", "complaint"),
    [
        ("model", {"path": "models/penny"}, "model.near.path: stands in the settings file alone"),
        ("model", {"tokenizer": "/etc/passwd"}, "model.near.tokenizer: stands in"),
        ("model", {"upstraem": "x"}, "model.near.upstraem: unknown key"),
        ("model", {"upstream": "https://u:p@h.example/v1"}, "model.near.upstream: a user"),
        ("model", {"upstream": "https://h.example/v1?key=k"}, "model.near.upstream: a user"),
        ("model", {"api_key_env": "FAR_KEY"}, "model.near.api_key_env: the settings file shows"),
        ("model", {"api_key_env": "HOME"}, "model.near.api_key_env: the settings file shows"),
        ("model", {"api_key_file": "/etc/passwd"}, "model.near.api_key_file: stands in"),
        ("model", {"name": "other"}, "model.near.name: stands beside the content"),
        ("mcp_server", {"command": "/bin/sh"}, "mcp_server.near.command: stands in"),
        ("mcp_server", {"openapi": "/etc/passwd"}, "mcp_server.near.openapi: a path"),
        ("price_book", {"price": [{"model": "m"}]}, "price_book.near: price 1: valid_from must be"),
        ("price_book", {"price": ["m"]}, "price_book.near: price 1: must be a table"),
        ("price_book", {"prices": []}, "price_book.near: must only have [[price]]"),
        ("deadlines", {"seconds": 9}, "deadlines.near: no lane; there are interactive"),
        ("mcp_server", {"oauth": {"client_id": "c"}}, "mcp_server.near.oauth: stands in"),
    ],
)
def test_what_reaches_into_the_machine_or_fits_nothing_is_refused_by_name(
    file: Settings, kind: Kind, content: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        base = CONTENT[kind] if kind in ("model", "mcp_server") else {}
        merged(file, [StoredSetting(kind=kind, name="near", content=base | content)])
    assert str(refused.value).startswith(complaint)
    assert "u:p" not in str(refused.value)


@pytest.mark.parametrize(
    ("seconds", "complaint"), [(0, "deadlines.batch.seconds: "), ("x", "deadlines.batch.seconds: ")]
)
def test_a_deadline_is_a_time(file: Settings, seconds: Any, complaint: str) -> None:
    with pytest.raises(SettingsError) as refused:
        merged(file, [stored("deadlines", "batch", seconds=seconds)])
    assert str(refused.value).startswith(complaint)


def test_an_entry_of_a_file_hides_the_same_stored_one(file: Settings, tmp_path: Path) -> None:
    """So that a stored book may move into a file, whose amount counts."""
    path = tmp_path / "prices.toml"
    path.write_text('[[price]]\nmodel = "far"\nvalid_from = 2027-01-01\noutput = "0.5"\n')
    other = {"model": "far", "valid_from": "2027-02-01", "output": "0.6"}
    book = CONTENT["price_book"] | {"price": [*CONTENT["price_book"]["price"], other]}
    found = msgspec.structs.replace(
        merged(file, [StoredSetting(kind="price_book", name="b", content=book)]),
        price_books=(path,),
    )
    amounts = [
        price.pico_per_token for entry in load_prices(found) for price in entry.prices.values()
    ]
    assert amounts == [500_000, 600_000]


def test_no_replica_of_many_names_a_file_either(file: Settings) -> None:
    replica = {"upstream": "https://near.example/v1", "api_key_file": "/etc/passwd"}
    item = StoredSetting(kind="model", name="near", content={"replica": [replica]})
    with pytest.raises(SettingsError, match="model.near.api_key_file: stands in"):
        merged(file, [item])


def test_a_key_of_the_file_goes_where_the_file_shows_it(file: Settings) -> None:
    other = stored("model", "near", upstream="https://far.example/v1", api_key_env="FAR_KEY")
    (replica,) = merged(file, [other]).models[1].replicas
    assert replica.api_key_env == "FAR_KEY"
    assert replica.upstream_model == "near"


def test_a_key_goes_to_the_upstream_that_it_was_given_for(file: Settings, tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_bytes(msgspec.json.encode(SECRET))
    item = MERGER.with_key(stored("model", "near"), "sk-canary")
    (replica,) = merged(file, [item]).models[1].replicas
    assert read_api_key(replica, path) == "sk-canary"
    assert "sk-canary" not in str(msgspec.to_builtins(replica))
    thief = {"upstream": "https://thief.example/v1"}
    assert not MERGER.has_key_for(item, thief)
    assert MERGER.has_key_for(item, {"upstream": "https://stored.example/v2"})
    (replica,) = merged(file, [msgspec.structs.replace(item, content=thief)]).models[1].replicas
    with pytest.raises(SettingsError, match="is for another upstream"):
        read_api_key(replica, path)
    other = msgspec.structs.replace(item, name="wide")
    (replica,) = merged(file, [other]).models[1].replicas
    with pytest.raises(SettingsError, match="does not open"):
        read_api_key(replica, path)


def test_a_key_is_shown_in_no_diff(file: Settings) -> None:
    check_of = ChangeCheck(file, MERGER)
    check_of.check([], [MERGER.with_key(stored("model", "near"), "sk-canary")], file_names(file))
    assert len(check_of.lines) == 1
    assert "sk-canary" not in check_of.lines[0]
    assert 'sealed_key = "(not shown)"' in check_of.lines[0]


PROGRAM = {"command": "/bin/sh", "args": ["-c", "true"]}


def test_a_program_runs_in_the_home_whose_people_added_it(file: Settings) -> None:
    item = MERGER.as_program(StoredSetting(kind="mcp_server", name="near", content=PROGRAM))
    assert merged(file, [item]).mcp.servers[1].command == "/bin/sh"
    elsewhere = Merger("host:/elsewhere", SECRET)
    assert elsewhere.merged(file, [item], file_names(file)) == file


@pytest.mark.parametrize(
    "forged",
    [
        {"sealed": None, "secret_id": None},
        {"content": PROGRAM | {"args": ["-c", "false"]}},
        {"name": "other"},
        {"sealed": b"0" * 64},
        {"home": "host:/elsewhere"},
    ],
)
def test_a_program_that_nobody_of_the_home_added_does_not_run(
    file: Settings, forged: dict[str, Any]
) -> None:
    """Neither an operator's key nor whoever writes to Postgres starts programs here."""
    item = MERGER.as_program(StoredSetting(kind="mcp_server", name="near", content=PROGRAM))
    item = msgspec.structs.replace(item, **forged)
    here = Merger(item.home or "", SECRET)
    with pytest.raises(SettingsError, match="no person of this home has added this program"):
        here.merged(file, [item], file_names(file))
