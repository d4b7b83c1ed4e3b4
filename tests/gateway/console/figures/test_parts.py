"""The parts of pages by themselves: how figures are written, what a CSV holds, which time is meant,
where a login may lead."""

from __future__ import annotations

import csv
import io
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from gateway.console import assets, formats
from gateway.console.pages import is_place, templates
from gateway.console.ranges import read_range
from gateway.console.tables import Table, TableColumn, harmless, raw

NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("pico", "shown"),
    [
        (None, "–"),
        (0, "$ 0.00"),
        (418_204_999_999_999, "$ 418.20"),
        (-1_234_567_890_000_000, "−$ 1,234.57"),
        (123_456_000_000, "$ 0.1235"),
        (150_000_000_000, "$ 0.15"),
        (150_000, "$ 0.00000015"),
        (1, "$ 0.000000000001"),
    ],
)
def test_money_shows_what_counts_of_it(pico: int | None, shown: str) -> None:
    assert formats.usd(pico).replace("\u00a0", " ") == shown


def test_money_is_exact_where_it_is_asked_for() -> None:
    assert formats.exact_usd(418_204_999_999_999).replace("\u00a0", " ") == "$ 418.204999999999"
    assert formats.exact_usd(None) == "–"


def test_a_value_that_is_not_known_is_a_gap_in_a_small_line() -> None:
    line, below = formats.spark([1, 2, None, 0])
    assert line == "M0.0,16.5 80.0,4.0M240.0,29.0h3"
    assert below == "M0.0,32L0.0,16.5 80.0,4.0 80.0,32ZM240.0,32L240.0,29.0 240.0,32Z"
    assert formats.spark([]) == formats.spark([None]) == ("", "")


@pytest.mark.parametrize(
    ("number", "shown"),
    [(None, "–"), (0, "0"), (99_999, "99,999"), (41_240_000, "41.2 M"), (1_500_000, "1.5 M")],
)
def test_counts_are_short_where_they_are_large(number: int | None, shown: str) -> None:
    assert formats.count(number).replace("\u00a0", " ") == shown


def test_other_figures_have_their_unit() -> None:
    shown = [
        formats.percent(0.7143),
        formats.percent(None),
        formats.ms(3.21),
        formats.ms(641.4),
        formats.ms(12_345),
        formats.size(512),
        formats.size(3 * 1024**2),
        formats.size(5 * 1024**4),
        formats.duration(42),
        formats.duration(timedelta(minutes=5)),
        formats.duration(7_200),
        formats.duration(3 * 86_400),
    ]
    assert [each.replace("\u00a0", " ") for each in shown] == [
        *("71.4 %", "–", "3.2 ms", "641 ms", "12.3 s"),
        *("512 B", "3.0 MiB", "5.0 TiB", "42 s", "5 min", "2 h", "3 days"),
    ]


def test_a_moment_is_relative_and_its_title_absolute_in_the_viewers_zone() -> None:
    shown = str(formats.time_tag(NOW - timedelta(minutes=4), NOW, ZoneInfo("Europe/Vienna")))
    assert "4\u00a0min ago" in shown and 'title="2026-11-28 12:56:00 CET"' in shown
    assert formats.relative(NOW + timedelta(hours=3), NOW) == "in 3\u00a0h"
    assert formats.relative(NOW.timestamp(), NOW) == "now"
    assert (formats.moment(None), str(formats.time_tag(None, NOW))) == ("–", "–")


def test_an_id_keeps_its_kind_and_its_end() -> None:
    assert formats.short_id("key_01a221f1aabbccddeeff001122334455") == "key_01a…334455"
    assert formats.short_id("short") == "short"


@pytest.mark.parametrize("cell", ["=1+1", "+cmd|' /C", "-2+3", "@SUM(A1)", "\tx", "\rx"])
def test_no_cell_is_computed_by_a_spreadsheet(cell: str) -> None:
    assert harmless(cell) == f"'{cell}"
    for plain in ("-1.5", "1", "a=b", ""):
        assert harmless(plain) == plain


def test_a_csv_is_exact_and_in_utc() -> None:
    rows = [
        {"name": "=x", "cost": 150_000, "at": NOW, "tag": ("ok", "ok"), "models": ["a", "b"]},
        {"name": None, "cost": None, "at": 0.0, "tag": "plain", "models": []},
    ]
    table = Table(
        "T",
        rows,
        TableColumn("Name", "name"),
        TableColumn("Cost", "cost", kind="usd"),
        TableColumn("When", "at", kind="time"),
        TableColumn("State", "tag", kind="tag"),
        TableColumn("Models", "models"),
        TableColumn("Hidden", "name", in_csv=False),
        None,
    )
    found = list(csv.reader(io.StringIO(table.to_csv().decode("utf-8-sig"))))
    assert found == [
        ["Name", "Cost", "When", "State", "Models"],
        ["'=x", "0.00000015", "2026-11-28T12:00:00+00:00", "ok", "a, b"],
        ["", "", "1970-01-01T00:00:00+00:00", "plain", ""],
    ]
    assert [raw(each) for each in (NOW, 3, 0.5, True, "x", None)] == [
        *(f"{NOW.timestamp():.0f}", "3", "0.5", "", "", "")
    ]


def test_a_range_is_read_as_people_say_it() -> None:
    day = read_range({}, NOW)
    assert (day.length, day.end, day.label) == (timedelta(days=1), NOW, "Last 24 h")
    assert day.before.end == day.start and day.before.length == day.length
    assert day.query == {"range": "24h"} and not day.is_long
    month = read_range({"range": "2026-11"}, NOW)
    assert (month.start.day, month.is_long) == (1, True)
    given = read_range({"from": "1000", "to": "5000"}, NOW)
    assert given.length == timedelta(seconds=4000)
    assert given.query == {"from": "1000", "to": "5000"}
    assert read_range({"from": "2026-11-27"}, NOW).end == NOW
    assert read_range({"range": "3h"}, NOW).label == "Last 3 h"
    for wrong in (
        {"range": "soon"},
        {"from": "5000", "to": "1000"},
        {"from": "x"},
        {"range": "9999w"},
        {"from": "99999999999"},
    ):
        with pytest.raises(ValueError, match=r"."):
            read_range(wrong, NOW)


def test_a_login_leads_below_the_console_alone() -> None:
    for good in ("/console", "/console/keys?a=b&c=%20", "/console?x"):
        assert is_place(good)
    for bad in ("/", "/consoles", "//console", "/console/\\x", "/console/ x", "/console/\n", "é"):
        assert not is_place(bad)


def test_files_are_named_by_their_content() -> None:
    names = {assets.address_of(name) for name in assets.FILES}
    assert len(names) == len(assets.FILES)
    assert {name.rpartition("/")[2] for name in names} == set(assets.by_address())
    used = "".join(
        (templates().loader.get_source(templates(), name)[0])  # type: ignore[union-attr]
        for name in templates().list_templates()
    )
    for forbidden in ("onclick=", ' style="', "javascript:", "hx-on", "| safe", "http://"):
        assert forbidden not in used, forbidden


def test_all_files_of_the_pages_are_in_the_wheel() -> None:
    """A page whose file is missing is an error for everybody who installed it."""
    project = tomllib.loads(Path("pyproject.toml").read_text())
    packed = {each.lstrip("*") for each in project["tool"]["setuptools"]["package-data"]["*"]}
    files = [each for each in assets.FOLDER.parent.rglob("*") if each.is_file()]
    kinds = {each.suffix for each in files if "__pycache__" not in each.parts} - {".py"}
    assert kinds <= packed
