"""A price book is exact, dated, append-only, and refuses what it cannot mean."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from billing.errors import PriceBookError
from billing.events import Band, Price, Tier
from billing.pricing.price_book import MAX_BOOK_BYTES, PriceBook

FIRST = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
SECOND = datetime(2026, 12, 1, tzinfo=UTC).timestamp()


def book(folder: Path, *texts: str) -> PriceBook:
    for number, text in enumerate(texts):
        (folder / f"{number}.toml").write_text(text)
    return PriceBook.load([folder])


def test_the_shipped_book_prices_penny() -> None:
    prices = PriceBook.load().at("penny", FIRST)
    assert prices == {
        "uncached_input": Price("penny:uncached_input:2026-11-01T00:00:00Z", 100_000),
        "cache_read": Price("penny:cache_read:2026-11-01T00:00:00Z", 10_000),
        "cache_write_5m": Price("penny:cache_write_5m:2026-11-01T00:00:00Z", 0),
        "output": Price("penny:output:2026-11-01T00:00:00Z", 400_000),
    }


def test_prices_follow_the_moment_and_the_next_entry_ends_the_one_before(tmp_path: Path) -> None:
    prices = book(
        tmp_path,
        '[[price]]\nmodel = "m"\nvalid_from = 2026-11-01\noutput = 0.15\n',
        '[[price]]\nmodel = "m"\nvalid_from = "2026-12-01T01:00:00+01:00"\n'
        'valid_to = "2027-01-01"\noutput = 2\ncache_write_1h = "3"\n',
    )
    assert prices.at("m", FIRST - 0.001) == {}
    assert prices.at("m", FIRST)["output"].pico_per_token == 150_000
    assert prices.at("m", SECOND - 0.001)["output"].pico_per_token == 150_000
    assert prices.at("m", SECOND)["output"].pico_per_token == 2_000_000
    assert prices.at("m", SECOND)["cache_write_1h"].pico_per_token == 3_000_000
    assert prices.at("m", datetime(2027, 1, 1, tzinfo=UTC).timestamp()) == {}
    assert prices.at("another", SECOND) == {}
    assert [entry.model for entry in prices] == ["m", "m"]


TIERED = """
[[price]]
model = "m"
valid_from = 2026-11-01
output = 1
[[price]]
model = "m"
tier = "priority"
valid_from = 2026-12-01
valid_to = "2027-01-01"
output = 2
"""


def test_a_tier_has_prices_of_its_own_or_those_of_the_default(tmp_path: Path) -> None:
    prices = book(tmp_path, TIERED)
    dear = prices.at("m", SECOND, "priority")
    assert dear == {"output": Price("m:output:2026-12-01T00:00:00Z:priority", 2_000_000)}
    assert prices.at("m", SECOND) == prices.at("m", SECOND, "flex") != dear
    assert prices.sells("m", SECOND, "priority")
    over = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    unsold: list[tuple[float, Tier]] = [(FIRST, "priority"), (over, "priority"), (SECOND, "flex")]
    for moment, tier in unsold:
        assert prices.at("m", moment, tier) == prices.at("m", moment)
        assert not prices.sells("m", moment, tier)
    assert prices.at("another", SECOND, "priority") == {}
    assert not prices.sells("another", SECOND, "priority")


def test_what_is_based_on_a_model_is_sold_in_its_tiers_until_it_has_a_price_of_its_own(
    tmp_path: Path,
) -> None:
    own = '[[price]]\nmodel = "legal"\nvalid_from = 2026-12-15\noutput = 3\n'
    (tmp_path / "0.toml").write_text(TIERED + own)
    prices = PriceBook.load([tmp_path], bases={"legal": "m"})
    assert prices.at("legal", SECOND, "priority") == prices.at("m", SECOND, "priority")
    assert prices.sells("legal", SECOND, "priority")
    later = datetime(2026, 12, 20, tzinfo=UTC).timestamp()
    assert prices.sells("m", later, "priority") and not prices.sells("legal", later, "priority")
    assert prices.at("legal", later, "priority") == prices.at("legal", later)


def test_what_is_based_on_a_model_costs_the_same_until_it_has_a_price_of_its_own(
    tmp_path: Path,
) -> None:
    text = '[[price]]\nmodel = "base"\nvalid_from = 2026-11-01\noutput = 1\nuncached_input = 2\n'
    text += '[[price]]\nmodel = "legal"\nvalid_from = 2026-12-01\noutput = 3\n'
    (tmp_path / "0.toml").write_text(text)
    prices = PriceBook.load([tmp_path], bases={"legal": "base", "terse": "base", "odd": "none"})
    assert prices.at("legal", FIRST) == prices.at("base", FIRST) != {}
    assert set(prices.at("legal", SECOND)) == {"output"}, "nothing of the base is mixed in"
    assert prices.at("legal", SECOND)["output"].pico_per_token == 3_000_000
    assert prices.at("terse", SECOND) == prices.at("base", SECOND)
    assert prices.at("odd", SECOND) == {} == prices.at("another", SECOND)
    assert [entry.model for entry in prices] == ["base", "legal"]


def test_a_file_may_be_named_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text('[[price]]\nmodel = "m"\nvalid_from = "2026-11-01"\noutput = "1"\n')
    assert PriceBook.load([str(file)]).at("m", FIRST)["output"].pico_per_token == 1_000_000


BANDED = """
[[price]]
model = "m"
valid_from = 2026-11-01
uncached_input = 1
output = 2
[[price]]
model = "m"
min_total_input = 200_001
valid_from = 2026-11-15
output = 3
[[price]]
model = "m"
min_total_input = 500_001
valid_from = 2026-11-15
valid_to = 2026-12-01
output = 4
tool_call = "0.01"
"""


def test_bands_of_size_stand_over_the_price_below_them(tmp_path: Path) -> None:
    middle = datetime(2026, 11, 15, tzinfo=UTC).timestamp()
    with pytest.raises(PriceBookError, match="tool_call of m .default. has no price below 500001"):
        book(tmp_path, BANDED)
    prices = book(tmp_path, BANDED.replace('tool_call = "0.01"', ""))
    assert prices.at("m", middle - 1)["output"].bands == ()
    output = prices.at("m", middle)["output"]
    assert output == Price(
        "m:output:2026-11-01T00:00:00Z",
        2_000_000,
        (
            Band(200_001, "m:output:2026-11-15T00:00:00Z:200001", 3_000_000),
            Band(500_001, "m:output:2026-11-15T00:00:00Z:500001", 4_000_000),
        ),
    )
    assert prices.at("m", middle)["uncached_input"].bands == ()
    found = [output.of(size).pico_per_token for size in (200_000, 200_001, 500_000, 500_001)]
    assert found == [2_000_000, 3_000_000, 3_000_000, 4_000_000]
    assert len(prices.at("m", SECOND)["output"].bands) == 1
    assert prices.at("m", middle, "priority") is prices.at("m", middle)
    assert [entry.min_total_input for entry in prices] == [0, 200_001, 500_001]


def test_a_band_without_a_price_below_it_is_refused(tmp_path: Path) -> None:
    ended = BANDED.split("[[price]]")[1].replace("uncached", 'valid_to = "2026-12-01"\nuncached')
    band = BANDED.split("[[price]]")[2]
    with pytest.raises(PriceBookError, match="output of m .default. has no price below 200001"):
        book(tmp_path, f"[[price]]{ended}[[price]]{band}")


def test_explicit_cache_prices_are_parts_of_the_input(tmp_path: Path) -> None:
    text = HEAD + 'valid_from = 2026-11-01\nuncached_input = 3\ncache_prices = "explicit"\n'
    prices = book(tmp_path, text + "cache_write = 4\n").at("m", FIRST)
    found = [prices[c].pico_per_token for c in ("cache_read", "cache_write_5m", "cache_write_1h")]
    assert found == [300_000, 4_000_000, 6_000_000]


def test_calls_are_priced_by_the_call(tmp_path: Path) -> None:
    text = HEAD + 'valid_from = 2026-11-01\noutput = 1\ntool_call = "0.01"\nbatch_queue = 0.002\n'
    prices = book(tmp_path, text).at("m", FIRST)
    assert prices["tool_call"].pico_per_token == 10_000_000_000
    assert prices["batch_queue"].pico_per_token == 2_000_000_000


HEAD = '[[price]]\nmodel = "m"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[price]]\n", "price 1: model must be a name"),
        ('[[price]]\nmodel = "m"\ntier = "gold"', "tier must be default, priority, flex or batch"),
        (HEAD, "valid_from must be a date"),
        (HEAD + "valid_from = '2026-13-01'\noutput = 1", "valid_from must be a date"),
        (HEAD + "valid_from = '2026-11-01T05:00:00'\noutput = 1", "needs a time zone"),
        (HEAD + "valid_from = '2026-11-01T00:00:00.5Z'\noutput = 1", "whole second"),
        (HEAD + "valid_from = 2026-11-01\nvalid_to = 2026-11-01\noutput = 1", "valid_to must be"),
        (HEAD + "valid_from = 2026-11-01", "m has no price at all"),
        (HEAD + "valid_from = 2026-11-01\noutptu = 1", "price 1: unknown key outptu"),
        (HEAD + "valid_from = 2026-11-01\noutput = 0.0000001", "output: .*whole number of pico"),
        (HEAD + "valid_from = 2026-11-01\noutput = true", "output: must be a decimal"),
        (HEAD + "valid_from = 2026-11-01\noutput = [1]", "output: must be a decimal"),
        (HEAD + "valid_from = 2026-11-01\noutput = '٣'", "output: '٣' is not a decimal number"),
        (HEAD + "valid_from = 2026-11-01\noutput = '1_0'", "output: '1_0' is not a decimal number"),
        (HEAD + "valid_from = 2026-11-01\noutput = ' 1 '", "output: ' 1 ' is not a decimal number"),
        (
            HEAD + "valid_from = '9999-12-31T23:59:59-14:00'\noutput = 1",
            "valid_from must be a date",
        ),
        (HEAD + "valid_from = 2026-11-01\noutput = -1", "output: -1 is negative"),
        (HEAD + "valid_from = 2026-11-01\noutput = 1e20", "is too large"),
        (HEAD + "min_total_input = -1\nvalid_from = 2026-11-01", "must be a count of tokens"),
        (HEAD + "min_total_input = true\nvalid_from = 2026-11-01", "must be a count of tokens"),
        (HEAD + "valid_from = 2026-11-01\ntool_call = 1e-13", "tool_call: .*whole number of pico"),
        (
            HEAD + 'valid_from = 2026-11-01\noutput = 1\ncache_prices = "explicit"',
            "beside uncached",
        ),
        (
            HEAD + 'valid_from = 2026-11-01\nuncached_input = 1e-6\ncache_prices = "explicit"',
            "cache_read is not whole pico-USD",
        ),
        ("[prices]\n", "must only have"),
        ("price = 1\n", "must only have"),
        ("[[price]\n", "toml"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PriceBookError, match=message):
        book(tmp_path, text)


def test_a_missing_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PriceBookError, match="No such file"):
        PriceBook.load([tmp_path / "none.toml"])
    huge = tmp_path / "huge.toml"
    huge.write_text("#" * (MAX_BOOK_BYTES + 1))
    with pytest.raises(PriceBookError, match="larger than"):
        PriceBook.load([huge])


@pytest.mark.parametrize(
    "first_ends", ["", "valid_to = 2026-12-02\n"], ids=["same start", "explicit end"]
)
def test_overlaps_are_refused_across_files(tmp_path: Path, first_ends: str) -> None:
    start = "2026-11-30" if first_ends else "2026-12-01"
    with pytest.raises(
        PriceBookError, match=r"1\.toml: price 1: m \(default\) from 2026-12-01 overlaps"
    ):
        book(
            tmp_path,
            HEAD + f"valid_from = {start}\n{first_ends}output = 1",
            HEAD + "valid_from = 2026-12-01\noutput = 1",
        )
