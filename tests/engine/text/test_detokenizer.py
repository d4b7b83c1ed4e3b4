"""engine.text.detokenizer: for any ids, cut any way, the pieces make the text, cut by the stop."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from engine.text.detokenizer import MAX_HELD_TOKENS, UNDECODED, Detokenizer
from engine.text.tokenizer import Tokenizer

# Letters that merge, characters of 2, 3 and 4 bytes, spaces, and what joins them.
TEXTS = st.text("ab the\n é日本中文😀👍🏽\u200d�", max_size=40)
LITERAL_RUN = "�" * (MAX_HELD_TOKENS // 3)
"""U+FFFD that the model wrote itself. Byte fallback shows it as it shows bytes that are no text, so
a run that fills the window is given up as such: three for each, see `Detokenizer`."""
STOPS = st.lists(st.text("ab the日😀", min_size=1, max_size=5), max_size=4)


@st.composite
def chunkings(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    bounds = [0, *cuts, len(ids)]
    return [ids[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def run(detokenizer: Detokenizer, chunks: list[list[int]]) -> tuple[str, int]:
    """All text, and how many ids were used."""
    text, num_used = "", 0
    for chunk in chunks:
        piece = detokenizer.push(chunk)
        text += piece.text
        num_used += piece.num_tokens_used
        if piece.stopped:
            break
        assert piece.num_tokens_used == len(chunk)
    return text + detokenizer.flush(), num_used


def cut_at_stop(text: str, stop: list[str], include: bool) -> str:
    """Compute what the docstring promises, said slowly: the stop that ends first, of those the
    longest.
    """
    found = [(text.find(s) + len(s), -len(s)) for s in stop if s in text]
    if not found:
        return text
    end, minus_length = min(found)
    return text[: end if include else end + minus_length]


@given(text=TEXTS, data=st.data())
@example(text="�", data=None)
@example(text=" " * 40, data=None)
def test_pieces_of_a_text_are_the_text(
    tokenizer: Tokenizer, text: str, data: st.DataObject | None
) -> None:
    assume(LITERAL_RUN not in text)
    ids = tokenizer.encode(text)
    chunks = data.draw(chunkings(ids)) if data else [[id_] for id_ in ids]
    detokenizer = Detokenizer(tokenizer)
    assert run(detokenizer, chunks) == (tokenizer.decode(ids), len(ids))


@given(text=TEXTS, data=st.data())
@example(text="the end the end", data=None)
def test_what_goes_on_with_a_text_is_the_rest_of_it(
    tokenizer: Tokenizer, text: str, data: st.DataObject | None
) -> None:
    assume(UNDECODED not in text)
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids))) if data else len(ids) // 2
    chunks = data.draw(chunkings(ids[cut:])) if data else [ids[cut:]]
    before = tokenizer.decode(ids[:cut])
    assume(UNDECODED not in before)  # no half a character
    rest, _ = run(Detokenizer(tokenizer, before=ids[:cut]), chunks)
    assert before + rest == tokenizer.decode(ids)


@given(data=st.data())
def test_pieces_of_any_ids_of_a_byte_level_tokenizer_are_their_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    if tokenizer.token_to_id("<0x00>") is not None:
        return  # byte fallback decodes a run of bytes as one: half a run has another text
    lead_or_tail = [id_ for c in "ðŁĺĢçŃÂ" if (id_ := tokenizer.token_to_id(c)) is not None]
    any_id = st.sampled_from(lead_or_tail) | st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(any_id, max_size=80))
    chunks = data.draw(chunkings(ids))
    assert run(Detokenizer(tokenizer), chunks) == (tokenizer.decode(ids), len(ids))
    with_special = Detokenizer(tokenizer, skip_special_tokens=False)
    assert run(with_special, chunks)[0] == tokenizer.decode(ids, skip_special_tokens=False)


@given(text=TEXTS, stop=STOPS, include=st.booleans(), data=st.data())
def test_a_stop_string_cuts_the_text_and_the_count(
    tokenizer: Tokenizer, text: str, stop: list[str], include: bool, data: st.DataObject
) -> None:
    assume(LITERAL_RUN not in text)
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    detokenizer = Detokenizer(tokenizer, stop, include_stop=include)
    got, num_used = run(detokenizer, data.draw(chunkings(ids)))
    assert got == cut_at_stop(whole, stop, include)
    assert detokenizer.stopped == any(s in whole for s in stop)
    if len(stop) == 1 and not include:
        assert got == whole.split(stop[0])[0]
    # The ids used are exactly those without which no stop string is complete. (An id that only
    # makes an earlier character certain counts too, so this is checked where none is pending.)
    if detokenizer.stopped and "�" not in whole:
        assert any(s in tokenizer.decode(ids[:num_used]) for s in stop)
        assert not any(s in tokenizer.decode(ids[: num_used - 1]).rstrip("�") for s in stop)


@given(text=TEXTS, stop=STOPS)
def test_nothing_emitted_is_taken_back(tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    """Held back is the longest suffix that may begin a stop string, and no more."""
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, stop)
    emitted = ""
    for position, id_ in enumerate(ids, start=1):
        piece = detokenizer.push([id_])
        emitted += piece.text
        if piece.stopped:
            return
        seen = tokenizer.decode(ids[:position]).rstrip("�")
        if "�" in seen or len(seen) < len(emitted):
            return  # characters whose bytes are still coming: covered by the tests above
        possible = max((n for s in stop for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert emitted == seen[: len(seen) - possible]


def test_half_a_character_is_never_seen(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("𓀀🙂𓀀")  # not in the corpus: most bytes are a token
    assert len(ids) >= 9
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.push([id_]).text for id_ in ids]
    assert [text for text in texts if text.strip()] == ["𓀀", "🙂", "𓀀"]


def test_an_unfinished_character_comes_out_as_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a𓀀")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids).text == "a"
    assert set(detokenizer.flush()) == {"�"}
    assert detokenizer.flush() == ""


def test_a_stop_string_over_three_tokens(tokenizer: Tokenizer) -> None:
    before, ids = tokenizer.encode("hello "), tokenizer.encode("hello STOP rest")
    detokenizer = Detokenizer(tokenizer, ["STOP"])
    text, num_used = run(detokenizer, [ids])
    assert text == "hello "
    assert tokenizer.decode(ids[:num_used]) == "hello STOP"
    assert num_used >= len(before) + 2
    assert detokenizer.push([5, 6]) == ("", True, 0)
    assert detokenizer.flush() == ""


def test_a_beginning_that_leads_nowhere_is_given_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("xabcabcabcabdabcabe")
    detokenizer = Detokenizer(tokenizer, ["abcabcabd"])
    assert "".join(detokenizer.push([id_]).text for id_ in ids) == "xabc"
    assert detokenizer.stopped
    detokenizer = Detokenizer(tokenizer, ["abcabcabd"])
    assert detokenizer.push(tokenizer.encode("xabcabcab")).text == "x"
    assert detokenizer.flush() == "abcabcab"


def test_special_tokens_are_left_out_unless_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi<|im_end|>")
    assert run(Detokenizer(tokenizer), [ids])[0] == "hi"
    shown = Detokenizer(tokenizer, ["<|im_end|>"], skip_special_tokens=False)
    assert run(shown, [ids]) == ("hi", len(ids))
    assert shown.stopped


def test_bytes_that_are_no_text_are_bounded(tokenizer: Tokenizer) -> None:
    byte = tokenizer.token_to_id("<0xFF>") or tokenizer.token_to_id("ÿ")
    assert byte is not None
    detokenizer = Detokenizer(tokenizer)
    emitted = ""
    for count in range(1, 500):
        emitted += detokenizer.push([byte]).text
        assert count - len(emitted) <= MAX_HELD_TOKENS
    assert emitted + detokenizer.flush() == "�" * 499


def test_the_cost_per_token_does_not_grow(tokenizer: Tokenizer) -> None:
    """Counts decoded ids, not time: 3,000 tokens at the price of a few dozen each at most."""
    ids = tokenizer.encode("the 日本 dog 𓀀 " * 300)
    decoded = 0

    def counting(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(self, ids, skip_special_tokens)

    decode = Tokenizer.decode
    with patch.object(Tokenizer, "decode", counting):
        detokenizer = Detokenizer(tokenizer)
        for id_ in ids:
            detokenizer.push([id_])
    assert decoded / len(ids) < 12


def test_an_empty_stop_string_is_a_bug_of_the_caller(tokenizer: Tokenizer) -> None:
    with pytest.raises(AssertionError):
        Detokenizer(tokenizer, [""])
