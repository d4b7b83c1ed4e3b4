"""bench.engine.grammar measures what it says: texts fit their schemas, and masks let them
through."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest

from bench.engine.grammar import claims, first_mask_ms, mask_us, new_mask, schema_and_text
from bench.engine.grammar_libraries import PENNY, Grammars, LLGuidance, grown_vocabulary
from engine.protocol import Grammar
from engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def library() -> LLGuidance:
    return LLGuidance(PENNY / "tokenizer.json")


def test_a_text_fits_its_schema_token_by_token(library: LLGuidance) -> None:
    schema, text = schema_and_text(50, 1)
    assert schema != schema_and_text(50, 2)[0]
    jsonschema_rs.validate(json.loads(schema), json.loads(text))
    tokenizer = Tokenizer.load(PENNY)
    constraint, said = library.compile(schema), list[int]()
    for token_id in tokenizer.encode(text):
        mask = new_mask(tokenizer.vocab_size)
        constraint.allow(said, [], mask)
        assert np.unpackbits(mask.view(np.uint8), bitorder="little")[token_id]
        said.append(token_id)
    assert constraint.is_over(said)
    assert 0.1 < library.num_forced(schema, text) / len(text) < 0.9


def test_each_request_has_a_constraint_of_its_own(library: LLGuidance) -> None:
    grammars = Grammars(library)
    grammar = Grammar(kind="json_schema", text=schema_and_text(5, 1)[0])
    for name in ("a", "b"):
        grammars.prepare(name, grammar)
    assert grammars.constraint("a", grammar, ()) is not grammars.constraint("b", grammar, ())


def test_a_grown_vocabulary_reads_what_it_writes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(grown_vocabulary(tmp_path, 6000).parent)
    assert tokenizer.vocab_size == 6000
    ids = tokenizer.encode('{"name": "Zürich"}')
    assert tokenizer.decode(ids, skip_special_tokens=False) == '{"name": "Zürich"}'


def test_what_is_claimed_is_of_the_engines_library(library: LLGuidance) -> None:
    times = first_mask_ms(library, 4096, 5)
    assert 0 < times["median"] <= times["max"]
    assert mask_us(library, Tokenizer.load(PENNY))["batch_of_32_ms"] > 0
    found = claims(
        {
            "batch_32": {"m": {"cost": {"xgrammar 1": 0.5, "llguidance 1": 0.08}}},
            "libraries": [{"vocabulary": 9, "prepare_ms_50_fields": {"max": 51.0}}],
        }
    )
    assert found["cost_holds"] == {"m": True}
    assert found["first_token_holds"] == {9: False}
