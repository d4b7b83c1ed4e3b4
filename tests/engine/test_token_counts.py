"""Tests that counts of a text that grows are those of counting it anew."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineRequest, SamplingParams
from engine.sequence import Sequence
from engine.token_counts import Counted, TokenCounts
from tests.budget import examples
from tests.engine import checkpoints

TOKENS = st.lists(st.integers(0, 40), max_size=30)


def plain(prompt: list[int], said: list[int]) -> dict[int, int]:
    times = Counter(said)
    return {token_id: times[token_id] for token_id in prompt + said}


def as_dict(counted: Counted) -> dict[int, int]:
    ids, counts = counted
    assert len(set(ids.tolist())) == len(ids), "a token counted in two places"
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


@given(prompt=TOKENS, steps=st.lists(st.tuples(TOKENS, TOKENS), max_size=6))
@settings(max_examples=examples(400), deadline=None)
def test_counts_are_those_of_the_whole_text(
    prompt: list[int], steps: list[tuple[list[int], list[int]]]
) -> None:
    """Drafts count for one answer, whether or not they are said afterwards."""
    counts, output = TokenCounts(prompt), list[int]()
    for said, drafts in steps:
        output += said
        for ahead in range(len(drafts) + 1):
            found = as_dict(counts.count(output, drafts[:ahead]))
            assert found == plain(prompt, output + drafts[:ahead])
        output += drafts[: len(drafts) // 2]
    assert as_dict(counts.count(output)) == plain(prompt, output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save("llama3", tmp_path_factory.mktemp("llama3"))


@pytest.mark.parametrize(
    "changes",
    [{"num_blocks": 9}, {"num_blocks": 9, "speculative": "ngram"}],
    ids=["preempted", "preempted, speculative"],
)
def test_each_step_penalises_the_text_as_it_is(
    folder: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preemption, wrong guesses and a pause lose no token and count none twice."""
    torch.set_num_threads(1)
    core = EngineCore(EngineConfig(model=folder, dtype="float32", **changes))
    num_checked, count = 0, Sequence.token_counts

    def checked(seq: Sequence, drafts: list[int]) -> Counted:
        nonlocal num_checked
        counted = count(seq, drafts)
        assert as_dict(counted) == plain(seq.prompt_token_ids, seq.output_token_ids + drafts)
        num_checked += 1
        return counted

    monkeypatch.setattr(Sequence, "token_counts", checked)
    sampling = SamplingParams(
        max_tokens=40, temperature=0.0, ignore_eos=True, repetition_penalty=1.1
    )
    for i in range(4):
        prompt = [i + 3, 7, 7, 5, i + 3, 7, 7] * 3
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
    num_steps = 0
    while core.has_work():
        core.step()
        num_steps += 1
        if num_steps == 5:
            core.pause("1")
        elif num_steps == 15:
            core.resume("1")
    assert num_checked >= 4 * 40
    assert core.status().num_preemptions > 0
    assert (core.status().num_draft_tokens > 0) == ("speculative" in changes)
