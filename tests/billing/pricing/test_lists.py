"""Tenants who have terms of their own pay by them: discounts at admission, the rest by the
period."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import PriceBookError
from billing.events import Band, Price
from billing.pricing.adjustments import Commitment, FreeAllowance, Scope, Step, TieredPrice
from billing.pricing.entries import PriceEntry
from billing.pricing.lists import Discount, PriceLists
from billing.pricing.price_book import PriceBook


def at(day: int, month: int = 11) -> float:
    return datetime(2026, month, day, tzinfo=UTC).timestamp()


def book(folder: Path, text: str) -> PriceBook:
    (folder / "book.toml").write_text(text)
    return PriceBook.load([folder])


PRICES = """
[[price]]
model = "m"
valid_from = 2026-11-01
uncached_input = 1
output = 2
[[price]]
model = "m"
min_total_input = 200_001
valid_from = 2026-11-01
output = 3
[[price]]
model = "m"
tier = "priority"
valid_from = 2026-11-01
output = 4
[[price]]
model = "other"
valid_from = 2026-11-01
output = 5
"""


def discount(percent: str, start: str, *lines: str, price_list: str = "acme") -> str:
    head = f'[[discount]]\nprice_list = "{price_list}"\npercent = "{percent}"\n'
    return head + f'valid_from = "{start}"\n' + "".join(f"{line}\n" for line in lines)


def test_a_discount_is_a_price_of_its_own_in_every_band_and_tier(tmp_path: Path) -> None:
    text = PRICES + discount("12.5", "2026-11-10", 'component = "output"', 'model = "m"')
    prices = book(tmp_path, text)
    assert prices.lists.names == {"default", "acme"}
    assert prices.at("m", at(9), price_list="acme") == prices.at("m", at(9))
    found = prices.at("m", at(10), price_list="acme")
    begun = "2026-11-10T00:00:00Z"
    assert found["output"] == Price(
        f"m:output:2026-11-01T00:00:00Z@acme:{begun}",
        1_750_000,
        (Band(200_001, f"m:output:2026-11-01T00:00:00Z:200001@acme:{begun}", 2_625_000),),
    )
    assert found["uncached_input"] == prices.at("m", at(10))["uncached_input"]
    priority = prices.at("m", at(10), "priority", "acme")
    assert priority["output"].pico_per_token == 3_500_000
    assert prices.at("m", at(10), "flex", "acme") is found, "not sold there: the default tier's"
    assert prices.at("other", at(10), price_list="acme") == prices.at("other", at(10))
    assert prices.at("m", at(10), price_list="none") == prices.at("m", at(10))
    assert prices.at("m", at(10))["output"].pico_per_token == 2_000_000
    own = [entry for entry in prices if entry.price_list == "acme"]
    assert [list(entry.prices) for entry in own] == [["output"]] * 3


def test_the_most_specific_discount_counts_for_as_long_as_it_lasts(tmp_path: Path) -> None:
    text = PRICES + discount("10", "2026-11-01") + discount("5", "2026-11-20")
    text += discount("50", "2026-11-10", 'model = "m"', 'valid_to = "2026-11-12"')
    text += discount("20", "2026-11-10", 'component = "output"')
    prices = book(tmp_path, text)

    def output(day: int) -> int:
        return prices.at("m", at(day), price_list="acme")["output"].pico_per_token

    assert [output(day) for day in (9, 10, 11, 12, 30)] == [
        1_800_000, 1_000_000, 1_000_000, 1_600_000, 1_600_000,
    ]  # fmt: skip
    inputs = [
        prices.at("m", at(day), price_list="acme")["uncached_input"].pico_per_token
        for day in (9, 10, 12, 20)
    ]
    assert inputs == [900_000, 500_000, 900_000, 950_000]
    ids = [price.price_id for entry in prices for price in entry.prices.values()]
    assert len(ids) == len(set(ids))


days = st.integers(1, 28)


@given(
    st.lists(
        st.tuples(st.sampled_from(["m", None]), st.sampled_from(["output", None]), days, days),
        max_size=6,
    )
)
def test_at_every_moment_the_price_is_that_of_the_best_discount(
    written: list[tuple[str | None, str | None, int, int]],
) -> None:
    """This holds for any discounts; ranges of one component's prices do not overlap."""
    discounts: list[Discount] = []
    for number, (model, component, begin, length) in enumerate(written):
        scope = Scope(model=model, component=component)  # type: ignore[arg-type]
        start = datetime(2026, 11, begin, tzinfo=UTC)
        end = datetime(2026, 12, length, tzinfo=UTC)
        if any(each.scope == scope for each in discounts):
            continue
        discounts.append(
            Discount(
                id=str(number), slot=str(number), price_list="acme", scope=scope,
                bps=100 * (number + 1), valid_from=start, valid_to=end, where="",
            )
        )  # fmt: skip
    entry = PriceEntry(
        model="m",
        prices={"output": Price("o", 1_000_000)},
        valid_from=datetime(2026, 11, 5, tzinfo=UTC),
        valid_to=datetime(2026, 12, 20, tzinfo=UTC),
        where="",
    )
    derived = list(PriceLists(discounts).discounted([entry]))
    for month in (11, 12):
        for day in range(1, 29):
            moment = at(day, month)
            in_force = [each for each in discounts if each.covers(moment)]
            best = max(in_force, key=lambda each: each.rank, default=None)
            found = [
                each.prices["output"].pico_per_token for each in derived if each.covers(moment)
            ]
            expected = best is not None and entry.covers(moment)
            assert found == ([best.apply_to(entry.prices["output"])] if best and expected else [])


TERMS = """
[[free_allowance]]
price_list = "acme"
component = "output"
quantity = 1_000_000
valid_from = "2026-11-01"
[[free_allowance]]
price_list = "acme"
component = "output"
quantity = 2_000_000
valid_from = "2026-12-01"
[[tiered_price]]
price_list = "acme"
kind = "graduated"
component = "tool_call"
steps = [{ up_to = 100, price = "0.01" }, { price = 0.005 }]
valid_from = "2026-11-01"
[[commitment]]
price_list = "acme"
amount = "1000.00"
percent = 20
valid_from = "2026-12-01"
[[free_allowance]]
price_list = "default"
model = "other"
quantity = 5
valid_from = "2026-11-01"
"""


def test_the_terms_of_a_period_are_those_of_the_moment_at_which_it_begins(tmp_path: Path) -> None:
    prices = book(tmp_path, PRICES + TERMS)
    first = prices.lists.terms_of("acme", at(1))
    output, calls = Scope(component="output"), Scope(component="tool_call")
    assert first.allowances == (
        FreeAllowance(
            id="acme:free_allowance:*:*:output:2026-11-01T00:00:00Z",
            scope=output,
            quantity=1_000_000,
        ),
    )
    assert first.tiered == (
        TieredPrice(
            id="acme:tiered_price:*:*:tool_call:2026-11-01T00:00:00Z",
            scope=calls,
            kind="graduated",
            steps=(Step(100, 10**10), Step(None, 5 * 10**9)),
        ),
    )
    assert first.commitments == ()
    second = prices.lists.terms_of("acme", at(1, 12))
    assert [each.quantity for each in second.allowances] == [2_000_000]
    assert second.commitments == (
        Commitment(
            id="acme:commitment:*:*:*:2026-12-01T00:00:00Z", scope=Scope(), amount_pico=10**15
        ),
    )
    assert prices.at("m", at(1, 12), price_list="acme")["output"].pico_per_token == 1_600_000
    assert [each.quantity for each in prices.lists.terms_of("default", at(1)).allowances] == [5]


BEGUN = 'valid_from = "2026-11-01"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (discount("0", "2026-11-01"), "percent: must be more than 0"),
        (discount("100.01", "2026-11-01"), "percent: must be more than 0 and at most 100"),
        (discount("1.001", "2026-11-01"), "not a percentage of at most two places"),
        (discount("ten", "2026-11-01"), "percent: 'ten' is not a decimal number"),
        (discount("10", "2026-11-01", price_list="a b"), "price_list"),
        (discount("10", "2026-11-01", price_list="default"), "the default list has no discounts"),
        (discount("10", "2026-11-01", 'component = "x"'), r"component"),
        (discount("10", "2026-11-01", "off = 1"), "off"),
        (discount("10", "soon"), "valid_from must be a date"),
        (discount("10", "2026-11-01") * 2, "acme:discount.* overlaps the entry at"),
        ('[[discount]]\nprice_list = "a"\npercent = true\n' + BEGUN, "must be a decimal"),
        (
            '[[price]]\nmodel = "x"\noutput = "0.000001"\n' + BEGUN + discount("10", "2026-11-01"),
            "x:output:.* less 10 percent is not a whole number of pico-USD",
        ),
        ('[[free_allowance]]\nprice_list = "a"\nquantity = 0\n' + BEGUN, "quantity"),
        ('[[commitment]]\nprice_list = "a"\namount = "0"\n' + BEGUN, "amount: must be more"),
        ('[[commitment]]\nprice_list = "a"\namount = "x"\n' + BEGUN, "not a decimal number"),
        (
            '[[tiered_price]]\nprice_list = "a"\nkind = "volume"\ncomponent = "output"\n'
            "steps = [{ up_to = 5, price = 1 }]\n" + BEGUN,
            "the last one without up_to",
        ),
        (
            '[[tiered_price]]\nprice_list = "a"\nkind = "volume"\ncomponent = "output"\n'
            "steps = [{ price = 0.0000001 }]\n" + BEGUN,
            "steps: price: .* whole number of pico",
        ),
        (
            TERMS.replace('"acme"\nkind', '"acme"\nmodel = "m"\nkind')
            + '[[commitment]]\nprice_list = "acme"\namount = 1\ncomponent = "tool_call"\n'
            'tier = "flex"\n' + BEGUN,
            "counts a part of",
        ),
    ],
)
def test_terms_that_mean_nothing_are_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(PriceBookError, match=message):
        book(tmp_path, text)
