"""engine.text.tokenizer against the library it wraps, and against broken folders."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import ConfigError, InvalidRequest
from engine.text.tokenizer import Tokenizer


def test_special_tokens_are_read_from_both_spellings(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.bos_token_id == tokenizer.token_to_id("<s>") == 1
    assert tokenizer.eos_token_id == tokenizer.token_to_id("</s>") == 2
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}


def test_special_tokens_in_text_are_parsed(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhello<|im_end|>")
    assert ids[0] == tokenizer.token_to_id("<|im_start|>")
    assert ids[-1] == tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.decode(ids).strip() == "user\nhello"
    assert "<|im_end|>" in tokenizer.decode(ids, skip_special_tokens=False)


def test_bos_is_added_only_when_asked(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("the dog")
    framed = tokenizer.encode("the dog", add_special_tokens=True)
    assert tokenizer.bos_token_id not in plain
    has_post_processor = framed != plain
    assert framed == ([tokenizer.bos_token_id, *plain] if has_post_processor else plain)


@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    # SentencePiece's vocabularies put a space before every text.
    assert joined in (text.encode(), b" " + text.encode())


@pytest.mark.parametrize("with_ends", [False, True])
def test_others_run_while_a_long_text_is_encoded(tokenizer: Tokenizer, with_ends: bool) -> None:
    text = "hello <|im_end|> of tokens, wörld " * 10_000
    turns, encoded = [0], threading.Event()

    def take_turns() -> None:
        while not encoded.is_set():
            turns[0] += 1
            time.sleep(0.001)

    other = threading.Thread(target=take_turns)
    other.start()
    before = turns[0]
    ids = tokenizer.encode_with_ends(text)[0] if with_ends else tokenizer.encode(text)
    taken = turns[0] - before
    encoded.set()
    other.join()
    assert taken > 3, "the interpreter's lock is held"
    assert ids == tokenizer._backend.encode(text, add_special_tokens=False).ids
    with pytest.raises(InvalidRequest):
        tokenizer.encode("\ud800" + text)


def test_special_tokens_have_bytes_and_unknown_ids_have_none(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(3) == b"<|im_start|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_vocab_size_counts_added_tokens(tokenizer: Tokenizer, tokenizer_folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert tokenizer.vocab_size == len(backend.get_vocab(with_added_tokens=True))


def test_truncation_and_padding_of_the_training_are_switched_off(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.special_tokens == {}
    assert tokenizer.eos_token_id is None
    assert len(tokenizer.encode("dog " * 100)) >= 100
    assert len(tokenizer.encode("x")) < 8


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("a\ud800")


def test_a_folder_without_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: No such file"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}'])
def test_a_broken_tokenizer_is_one_clear_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: "):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", json.dumps(["a list"])])
def test_a_broken_tokenizer_config_is_one_clear_line(
    tokenizer_folder: Path, tmp_path: Path, content: str
) -> None:
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: "):
        Tokenizer.load(tmp_path)


penny = Tokenizer.load(Path(__file__).resolve().parents[3] / "models" / "penny")


@given(st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_its_length_allows(text: str) -> None:
    assert penny.fewest_tokens(len(text)) <= len(penny.encode(text))
    assert penny.fewest_tokens(10_000_000) > 4096


SPELLINGS = st.text(max_size=200) | st.text("e\u0301 \u0300a\n.=<>/-", max_size=200)


def composing() -> Tokenizer:
    """Return a tokenizer like Qwen's: each byte of what NFC makes of a text, and a longer token
    that takes the space beside it."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True, rstrip=True)])
    return Tokenizer(backend, {})


ENCODERS = {"penny": penny, "composing": composing()}


@pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS)
@given(SPELLINGS)
@example("e\u0301" * 100)
@example(" " * 200 + "<mask>" + "\n" * 200)
def test_no_text_has_fewer_tokens_than_its_characters_allow(encoder: Tokenizer, text: str) -> None:
    assert encoder.fewest_tokens_in(text) <= len(encoder.encode(text))


def test_what_is_in_no_long_token_has_a_token_each() -> None:
    digits = "0123456789" * 100
    assert penny.fewest_tokens_in(digits) == 1000 == len(penny.encode(digits))
    assert penny.fewest_tokens(len(digits)) < 100
