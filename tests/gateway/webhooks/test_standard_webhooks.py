"""Signatures, against the reference implementation and its published vector."""

from __future__ import annotations

import base64
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from gateway.credential_forms import CREDENTIAL
from gateway.webhooks.standard_webhooks import SECRET_BYTES, headers, new_secret, sign

PUBLISHED = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = b'{"test": 2432232314}'


def test_the_published_vector() -> None:
    signature = sign(PUBLISHED, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, BODY)
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@given(st.text(st.characters(codec="utf-8")), st.integers(1, 3))
def test_the_reference_implementation_takes_each_secret_and_no_other(text: str, num: int) -> None:
    secrets, body = [new_secret() for _ in range(num)], text.encode()
    sent = headers(secrets, "alert_1", int(time.time()), body)
    for secret in secrets:
        Webhook(secret).verify(body, sent, json_parse=False)
    for other in (body + b" ", body):
        with pytest.raises(WebhookVerificationError):
            secret = new_secret() if other == body else secrets[0]
            Webhook(secret).verify(other, sent, json_parse=False)


def test_a_secret_is_random_and_is_known_for_one() -> None:
    drawn = {new_secret() for _ in range(50)}
    assert len(drawn) == 50
    for secret in drawn:
        assert len(base64.b64decode(secret.removeprefix("whsec_"))) == SECRET_BYTES >= 24
        found = CREDENTIAL.search(f"https://x.example/?s={secret}&t=1")
        assert found is not None and found[0] == secret


def test_an_id_cannot_be_read_as_two() -> None:
    with pytest.raises(AssertionError):
        sign(PUBLISHED, "a.1", 2, b"")
