"""Checks what a refused credential is called, and that its words hold no more than its end."""

from __future__ import annotations

from base64 import urlsafe_b64encode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.auth.sent_credential import KEY_FORM, describe, refuse_in_words
from gateway.tenancy.keys import keys
from tests.budget import examples

RANDOM = "K3y" + "x" * 36 + "abcd"
JWT = urlsafe_b64encode(b'{"alg":"ES256"}').decode().rstrip("=") + ".e30.c2lnbmF0dXJlwxyz"
UNKNOWN = "that is unknown, expired or revoked"
NEITHER = "that is neither an API key ('sk-tg-...') nor an access token (a JWT)"
SENT = {
    f"sk-tg-{RANDOM}": f"Incorrect API key provided: an API key ending in 'abcd' {UNKNOWN}.",
    f"sk-tg-admin-{RANDOM}": (
        f"Incorrect API key provided: an admin key ending in 'abcd' {UNKNOWN}."
    ),
    f"sk-tg-{RANDOM}x1": (
        "Incorrect API key provided: an API key ending in 'cdx1' that does not have the form of one"
        " ('sk-tg-' and 43 letters and digits)."
    ),
    "sk-tg-short": (
        "Incorrect API key provided: an API key that does not have the form of one"
        " ('sk-tg-' and 43 letters and digits)."
    ),
    "sk-proj-0123456789abcdefghijWXYZ": (
        "Incorrect API key provided: a key ending in 'WXYZ' that is not one of this gateway's,"
        " which begin with 'sk-tg-'."
    ),
    JWT: "The access token ending in 'wxyz' is invalid, expired or revoked.",
    f"tg-refresh-{RANDOM}": (
        "A refresh token ending in 'abcd' opens nothing here: send an API key or an access token."
    ),
    f"tg-secret-{RANDOM}": (
        "A client secret ending in 'abcd' opens nothing here: send an API key or an access token."
    ),
    "0123456789012345678901234abcd": (
        f"Incorrect credential provided: an opaque token ending in 'abcd' {NEITHER}."
    ),
    "hunter2": f"Incorrect credential provided: a text {NEITHER}.",
    "pass word": f"Incorrect credential provided: a text {NEITHER}.",
    "x" * 30 + '"\r\n<': f"Incorrect credential provided: a text {NEITHER}.",
}


@pytest.mark.parametrize("credential", SENT)
def test_every_kind_is_told_apart(credential: str) -> None:
    assert refuse_in_words(describe(credential)) == SENT[credential]


def test_where_it_came_from_is_told() -> None:
    said = refuse_in_words(describe(f"sk-tg-{RANDOM}", as_api_key=True))
    assert "an API key ending in 'abcd' (sent as X-Api-Key) that" in said


def test_the_form_of_a_key_is_that_of_those_that_are_made() -> None:
    assert KEY_FORM.pattern.replace("(admin-)?", "(?:admin-)?") == keys.KEY_FORM.pattern


@settings(max_examples=examples(400))
@given(
    st.sampled_from(
        ["", "sk-", "sk-tg-", "sk-tg-admin-", "tg-refresh-", "whsec_", "eyJhbGciOiJ9."]
    ),
    st.one_of(st.text(max_size=80), st.text("0123456789ABCDEF", min_size=1, max_size=80)),
)
def test_no_more_than_its_end_is_repeated(prefix: str, rest: str) -> None:
    credential = prefix + rest
    said = refuse_in_words(describe(credential))
    found = describe(credential)
    words = "".join(refuse_in_words(describe(prefix + "?" * len(rest))).split("'abcd'"))
    if found.ending is not None:
        assert len(credential) >= 24 and said.count(f"'{found.ending}'") == 1
        said = said.replace(f"'{found.ending}'", "")
    told = {said[i : i + 5] for i in range(len(said) - 4)}
    secret = {rest[i : i + 5] for i in range(len(rest) - 4)}
    assert not told & secret or all(each in words for each in told & secret)
