"""Tables that fit the terminal; JSON and CSV that lose nothing."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from gateway.cli.shared.tables import (
    Column,
    Output,
    lay_out,
    print_table,
    printable,
    shorten_ids,
    show,
    to_csv,
    to_money,
)
from gateway.cli.shared.times import to_day

IDS = ["key_01a220b1b0c971b5a0513b4a82b8a86b", "key_01a220b1b0c971b5a0513b4a82b8ffff"]
ROWS = [
    {"id": IDS[0], "name": "the key of the web shop in Hamburg", "n": 1234567, "plan": None},
    {"id": IDS[1], "name": "ci", "n": 8, "plan": "team"},
]
COLUMNS = (
    Column("ID", "id", "id"),
    Column("REQUESTS", "n", "number"),
    Column("NAME", "name"),
    Column("PLAN", "plan", gives_way=True),
)


def drawn(width: int | None) -> tuple[list[str], list[str]]:
    file = io.StringIO()
    table, left_out = lay_out(ROWS, COLUMNS, width)
    print_table(table, Console(file=file, width=width or 1000, soft_wrap=True))
    return file.getvalue().splitlines(), left_out


def test_a_wide_terminal_shows_everything() -> None:
    lines, left_out = drawn(120)
    assert lines == [
        "ID                                    REQUESTS  NAME                                PLAN",
        f"{IDS[0]}   1234567  the key of the web shop in Hamburg  -",
        f"{IDS[1]}         8  ci                                  team",
    ]
    assert left_out == []
    assert drawn(None) == (lines, [])


def test_ids_are_shortened_first() -> None:
    lines, left_out = drawn(80)
    assert lines == [
        "ID           REQUESTS  NAME                                PLAN",
        "key_…b8a86b   1234567  the key of the web shop in Hamburg  -",
        "key_…b8ffff         8  ci                                  team",
    ]
    assert left_out == []


def test_then_columns_are_left_out_and_texts_cut() -> None:
    lines, left_out = drawn(60)
    assert lines == [
        "ID           REQUESTS  NAME",
        "key_…b8a86b   1234567  the key of the web shop in Hamburg",
        "key_…b8ffff         8  ci",
    ]
    assert left_out == ["PLAN"]
    assert drawn(40)[0] == [
        "ID           REQUESTS  NAME",
        "key_…b8a86b   1234567  the key of the w…",
        "key_…b8ffff         8  ci",
    ]


def test_a_number_is_never_cut() -> None:
    assert all("1234567" in "".join(drawn(width)[0]) for width in range(10, 100, 7))


@given(
    st.lists(
        st.fixed_dictionaries(
            {"id": st.sampled_from(IDS), "n": st.integers(0, 10**9), "name": st.text(max_size=50)}
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(45, 120),
)
def test_a_table_fits_whatever_is_in_it(rows: Sequence[dict[str, object]], width: int) -> None:
    table, _ = lay_out(rows, COLUMNS, width)
    assert sum(each[2] for each in table.columns) + 2 * (len(table.columns) - 1) <= width
    for _, _, cells, texts in table.columns:
        assert all(cell_len(each) <= cells and each.isprintable() for each in texts)


@given(st.lists(st.integers(0, 2**128 - 1), min_size=1, max_size=20, unique=True))
def test_short_ids_stay_different(numbers: list[int]) -> None:
    ids = [f"key_{number:032x}" for number in numbers]
    short = shorten_ids(ids)
    assert len(set(short)) == len(ids)
    for whole, cut in zip(ids, short, strict=True):
        assert whole.endswith(cut.rpartition("…")[2])


def test_nothing_in_a_name_moves_the_cursor_or_is_markup() -> None:
    assert printable("a\x1b[2Jb\nc\u202e") == "a\\u001b[2Jb c\\u202e"
    file = io.StringIO()
    table, _ = lay_out([{"name": "[red]x[/red] :smile:"}], [Column("NAME", "name")], 80)
    print_table(table, Console(file=file, width=80))
    assert file.getvalue().splitlines()[1] == "[red]x[/red] :smile:"


def test_csv_and_json_have_every_digit_and_whole_ids() -> None:
    rows = [{"id": IDS[0], "n": Decimal("0.000000000001"), "name": 'a "b", c', "plan": None}]
    head, row = csv.reader(io.StringIO(to_csv(rows, COLUMNS)))
    assert head == ["id", "n", "name", "plan"]
    assert row == [IDS[0], "0.000000000001", 'a "b", c', ""]
    shown = (
        Column("CREATED", "created_at", "time", show=lambda row: to_day(row["created_at"])),
        Column("USD", "usd", "number", show=lambda row: to_money(row["usd"])),
    )
    for moment in (3661, datetime(1970, 1, 1, 1, 1, 1, tzinfo=UTC)):
        _, line = to_csv([{"created_at": moment, "usd": "0.0000000001"}], shown).splitlines()
        assert line == "1970-01-01T01:01:01+00:00,0.0000000001"
    assert to_csv([{"created_at": None, "usd": None}], shown).splitlines()[1] == ","


def test_csv_has_no_name_that_a_spreadsheet_computes() -> None:
    rows = [{"id": "-5", "n": -5, "name": "=cmd|' /C calc'!A0", "plan": "@x"}]
    _, row = csv.reader(io.StringIO(to_csv(rows, COLUMNS)))
    assert row == ["-5", "-5", "'=cmd|' /C calc'!A0", "'@x"]


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with CliRunner().isolation() as (out, *_):
        show(ROWS, COLUMNS, Output("json"))
        lines = out.getvalue().decode().splitlines()
    assert [json.loads(line) for line in lines] == ROWS


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        ("12", "12.00"),
        ("12.5", "12.50"),
        ("0.000125", "0.000125"),
        ("0.0000001", "<0.000001"),
        ("-0.0000001", ">-0.000001"),
        ("0", "0.00"),
        ("1.0000004", "1.00"),
        (None, "-"),
    ],
)
def test_money_has_two_places_or_as_many_as_it_needs(amount: str | None, shown: str) -> None:
    assert to_money(amount) == shown
