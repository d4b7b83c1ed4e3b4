"""Secrets in the database: hashed under a key that Postgres never sees."""

from __future__ import annotations

from gateway.secret import Peppers, random_secret
from tests.gateway.a_secret import a_secret


def test_a_hash_is_of_its_value_its_purpose_and_its_secret() -> None:
    peppers, value = Peppers(a_secret("a"), "code"), random_secret("p-")
    assert value.startswith("p-") and len(value) > 43 and value != random_secret("p-")
    stored = peppers.hash(value)
    assert stored.startswith("a:") and value not in stored
    assert peppers.matches(value, stored) and not peppers.matches(value + "x", stored)
    assert stored != Peppers(a_secret("a"), "session").hash(value)
    assert stored.partition(":")[2] != Peppers(a_secret("b"), "code").hash(value).partition(":")[2]


def test_what_was_made_before_a_rotation_stays_good() -> None:
    value = random_secret()
    before, after = Peppers(a_secret("a"), "code"), Peppers(a_secret("b", "a"), "code")
    assert after.matches(value, before.hash(value))
    assert before.hash(value) in after.hashes(value)
    assert after.hash(value).startswith("b:")
    assert not before.matches(value, after.hash(value))
