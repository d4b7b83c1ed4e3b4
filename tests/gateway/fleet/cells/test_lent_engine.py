"""An engine of another cell is believed up to what its request can use."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine.protocol import EngineOutput, EngineRequest, SamplingParams, Usage
from gateway.fleet.cells.lent_engine import believed, most_of

ASKED = EngineRequest(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    more_prompts=([4],),
    sampling=SamplingParams(max_tokens=5),
    n=2,
    said=([7, 8], []),
)


def output(**used: Any) -> EngineOutput:
    return EngineOutput(request_id="r", index=0, token_ids=[9], usage=Usage(**used))


def test_the_most_is_what_was_sent_and_what_was_asked_for() -> None:
    assert most_of(ASKED) == Usage(prompt_tokens=4, generated_tokens=20, resumed_tokens=2)


def test_what_can_be_true_is_passed_on_as_it_is() -> None:
    told = output(prompt_tokens=4, cached_tokens=4, generated_tokens=20, resumed_tokens=2)
    assert believed(told, most_of(ASKED)) is told


@pytest.mark.parametrize(
    ("claimed", "counted"),
    [
        ({"prompt_tokens": 5}, {"prompt_tokens": 4}),
        ({"prompt_tokens": 9, "cached_tokens": 8}, {"prompt_tokens": 4, "cached_tokens": 4}),
        ({"prompt_tokens": 3, "cached_tokens": 4}, {"prompt_tokens": 3, "cached_tokens": 3}),
        (
            {"prompt_tokens": 4, "generated_tokens": 21},
            {"prompt_tokens": 4, "generated_tokens": 20},
        ),
        ({"prompt_tokens": 4, "resumed_tokens": 3}, {"prompt_tokens": 4, "resumed_tokens": 2}),
    ],
)
def test_a_claim_beyond_it_is_cut_and_told(
    claimed: dict[str, int], counted: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        found = believed(output(**claimed), most_of(ASKED))
    assert found.usage == Usage(**counted) and found.token_ids == [9]
    assert "another cell's engine counts" in caplog.text
