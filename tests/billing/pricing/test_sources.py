"""Prices of others, exact or refused by name; drafts of them, seen before they are applied."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from billing.errors import PriceBookError
from billing.pricing.drafts import book_prices, changes_of, differences, digest_of, draft_of
from billing.pricing.price_book import PriceBook
from billing.pricing.sources import PriceSource, Source

TODAY = date(2026, 11, 22)
NEXT = datetime(2026, 11, 23, tzinfo=UTC)
LITELLM = """{
  "sample_spec": {"max_tokens": "a text", "mode": "one of"},
  "gpt-x": {
    "input_cost_per_token": 1.25e-06, "input_cost_per_token_batches": 6.25e-07,
    "input_cost_per_token_above_200k_tokens": 2.5e-06, "cache_read_input_token_cost": 1.25e-07,
    "cache_creation_input_token_cost_above_1hr": 6e-06, "output_cost_per_token": 1e-05,
    "output_cost_per_token_priority": 2e-05, "output_cost_per_reasoning_token": 1.2e-05,
    "cache_creation_input_token_cost_above_200k_tokens": 1e-06,
    "input_cost_per_audio_token": 1e-04, "max_input_tokens": 272000
  },
  "opus": {"litellm_provider": "one", "input_cost_per_token": 5e-06},
  "two/one/opus": {"input_cost_per_token": 6e-06},
  "near/gpt-x": {"input_cost_per_token": 1e-06},
  "near/same": {"input_cost_per_token": 1e-06}, "far/same": {"input_cost_per_token": 2e-06},
  "tiny": {"input_cost_per_token": 1.5e-13}, "free": {"input_cost_per_token": -1e-06},
  "text": {"input_cost_per_token": true}
}"""
GENAI: list[dict[str, Any]] = [
    {
        "id": "one",
        "models": [
            {
                "id": "gpt-x",
                "prices": {
                    "input_mtok": {"base": 1.25, "tiers": [{"start": 200_000, "price": 2.5}]},
                    "cache_read_mtok": 0.125,
                    "cache_write_1h_mtok": 6,
                    "output_mtok": 10,
                    "web_searches_kcount": 10,
                },
                "price_variants": [
                    {"when": {"processing": "batch"}, "prices": {"output_mtok": 7}},
                    {
                        "when": {"processing": "batch"},
                        "prices": {"input_mtok": 0.625},
                        "constraint": {"type": "start_date", "start_date": "2026-11-01"},
                    },
                    {"when": {"service_tier": "default"}, "prices": {}},
                    {"when": {"speed": "fast"}, "prices": {"input_mtok": 9}},
                    {
                        "when": {"service_tier": "flex"},
                        "prices": {"input_mtok": 1},
                        "constraint": {"start_date": "2027-01-01"},
                    },
                ],
            },
            {
                "id": "dated",
                "prices": [
                    {"prices": {"input_mtok": 3}},
                    {"constraint": {"start_date": "2026-11-22"}, "prices": {"input_mtok": 2}},
                    {"constraint": {"start_date": "2026-11-23"}, "prices": {"input_mtok": 1}},
                ],
            },
            {
                "id": "nightly",
                "prices": [
                    {"prices": {"input_mtok": 3}},
                    {
                        "constraint": {"start_time": "01:00:00Z", "end_time": "04:00:00Z"},
                        "prices": {"input_mtok": 1},
                    },
                ],
            },
            {
                "id": "soon",
                "prices": [
                    {"constraint": {"start_date": "2027-01-01"}, "prices": {"input_mtok": 1}}
                ],
            },
            {"id": "odd", "prices": {"input_mtok": 0.0000001}},
        ],
    }
]


def litellm() -> PriceSource:
    return PriceSource("litellm", LITELLM, TODAY)


def genai(document: object = GENAI) -> PriceSource:
    return PriceSource("genai-prices", json.dumps(document), TODAY)


def test_litellm_is_read_by_tier_and_band() -> None:
    found = litellm().of("gpt-x")
    assert found is not None
    assert found.prices == {
        ("default", 0): {
            "uncached_input": 1_250_000,
            "cache_read": 125_000,
            "cache_write_1h": 6_000_000,
            "output": 10_000_000,
            "reasoning_output": 12_000_000,
        },
        ("default", 200_001): {"uncached_input": 2_500_000},
        ("batch", 0): {"uncached_input": 625_000},
        ("priority", 0): {"output": 20_000_000},
    }
    assert found.left_out == (
        "input_cost_per_audio_token",
        "cache_write_5m of default from 200001 tokens, not below",
    )


def test_a_model_is_found_by_the_name_that_its_provider_has_for_it() -> None:
    for name in ("opus", "one/opus"):
        found = litellm().of(name)
        assert found is not None and found.prices["default", 0] == {"uncached_input": 5_000_000}
    assert litellm().of("three/opus") is None


@pytest.mark.parametrize("document", [GENAI, {"units": {}, "providers": GENAI}])
def test_genai_prices_are_read_by_variant_tier_and_day(document: object) -> None:
    found = genai(document).of("gpt-x")
    assert found is not None
    assert found.prices == {
        ("default", 0): {
            "uncached_input": 1_250_000,
            "cache_read": 125_000,
            "cache_write_1h": 6_000_000,
            "output": 10_000_000,
        },
        ("default", 200_001): {"uncached_input": 2_500_000},
        ("batch", 0): {"uncached_input": 625_000},
    }
    assert found.left_out == ("speed=fast", "web_searches_kcount")
    dated = genai(document).of("one/dated")
    assert dated is not None and dated.prices == {("default", 0): {"uncached_input": 2_000_000}}
    assert genai(document).of("nobody") is None


@pytest.mark.parametrize(
    ("source", "model", "message"),
    [
        (litellm(), "tiny", "litellm: tiny: input_cost_per_token: 1.5E-13 is not a whole number"),
        (litellm(), "free", "litellm: free: input_cost_per_token: -0.000001 is negative"),
        (litellm(), "text", "text: input_cost_per_token: must be a decimal"),
        (litellm(), "same", "same is ambiguous: far/same, near/same"),
        (genai(), "odd", "genai-prices: one/odd: input_mtok: 1E-7 is not a whole number of pico"),
        (genai(), "soon", "one/soon: it has no price yet on 2026-11-22"),
        (genai(), "nightly", "one/nightly: unknown constraint of a price"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(
    source: PriceSource, model: str, message: str
) -> None:
    with pytest.raises(PriceBookError, match=message):
        source.of(model)


@pytest.mark.parametrize(
    ("source", "text"),
    [("litellm", "[]"), ("litellm", "{"), ("genai-prices", "[1]"), ("genai-prices", '{"a": 1}')],
)
def test_what_is_in_no_format_is_refused(source: Source, text: str) -> None:
    with pytest.raises(PriceBookError, match=f"{source}: not in its format"):
        PriceSource(source, text, TODAY)


def test_a_draft_is_a_book_of_what_differs_whose_digest_knows_both(tmp_path: Path) -> None:
    known = tmp_path / "book.toml"
    known.write_text(
        '[[price]]\nmodel = "x"\nvalid_from = 2026-11-01\nuncached_input = 1\n'
        'output = 10\ncache_write = 2\ntool_call = "0.01"\n'
    )
    book = PriceBook.load([known])
    published = litellm().of("gpt-x")
    assert published is not None
    draft = tmp_path / "draft.toml"
    draft.write_text(draft_of({"x": published}, book, NEXT, "litellm"))
    assert "# x: litellm also prices input_cost_per_audio_token" in draft.read_text()
    changes = changes_of(PriceBook.load([draft]), book)
    shown = [str(each) for each in changes if each.tier == "default"]
    assert shown == [
        "x default cache_read: none -> 0.125, from 2026-11-23",
        "x default cache_write_1h: none -> 6, from 2026-11-23",
        "x default reasoning_output: none -> 12, from 2026-11-23",
        "x default uncached_input: 1 -> 1.25 (+25.0 %), from 2026-11-23",
        "x default from 200001 tokens uncached_input: none -> 2.5, from 2026-11-23",
    ]
    after = PriceBook.load([known, draft])
    found = after.at("x", NEXT.timestamp())
    assert found["cache_write_5m"].pico_per_token == 2_000_000, "what it leaves out stays"
    assert found["tool_call"].pico_per_token == 10**10
    batch = after.at("x", NEXT.timestamp(), "batch")
    assert (batch["uncached_input"].pico_per_token, batch["output"].pico_per_token) == (
        625_000, 10_000_000,
    )  # fmt: skip
    assert draft_of({"x": published}, after, NEXT, "litellm") == ""
    digest = digest_of(draft.read_bytes(), changes)
    assert digest != digest_of(draft.read_bytes() + b"#", changes)
    assert digest != digest_of(draft.read_bytes(), changes[1:])


def test_two_sources_are_compared_with_each_other_and_with_the_book(tmp_path: Path) -> None:
    theirs, others = litellm().of("gpt-x"), genai().of("gpt-x")
    assert theirs is not None and others is not None
    found = differences("x", theirs.prices, others.prices)
    assert [str(each) for each in found] == [
        "x default reasoning_output: 12 -> none",
        "x priority output: 20 -> none",
    ]
    assert book_prices(PriceBook.load([tmp_path]), "x", NEXT.timestamp()) == {}
