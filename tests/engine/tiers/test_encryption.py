"""The disk tier, encrypted: nobody reads its files without the key, and no nonce comes twice."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine.errors import ConfigError
from engine.tiers import encryption
from engine.tiers.disk import DiskTier
from engine.tiers.encryption import KEY_BYTES, TierKey
from engine.tiers.segment_store import REWRITTEN_PART, SegmentStore
from engine.tiers.segments import SegmentFormat
from tests.engine.tiers.records import (
    ENCRYPTED,
    FORM,
    SECRET,
    digest_of,
    payload_of,
    records_of,
)
from tests.engine.tiers.test_disk import put, read, settle
from tests.engine.tiers.test_segment_store import (
    MAX_SEGMENTS,
    abandon,
    open_store,
    payload_in,
)

Opens = Callable[[TierKey | None], DiskTier]


@pytest.mark.parametrize("form", [FORM, ENCRYPTED], ids=["plain", "encrypted"])
def test_what_is_encrypted_stands_in_no_file(tmp_path: Path, form: SegmentFormat) -> None:
    store = open_store(tmp_path, form)
    store.append(records_of([1, 1]), [digest_of(1), digest_of(2)])
    store.close()
    text = (tmp_path / "0000000001.kv").read_bytes()
    start, end = (form.offset_of(slot) for slot in (0, 1))
    assert (payload_of(1)[:16] in text[start + 128 : end]) == (form is FORM)
    same = text[start + 128 : start + 3000] == text[end + 128 : end + 3000]
    assert same == (form is FORM), "equal blocks look alike to nobody"


def test_no_nonce_comes_twice_under_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over kills, restarts and records that are written anew."""
    used: list[tuple[bytes, bytes]] = []

    class Recording:
        def __init__(self, key: bytes) -> None:
            self._key, self._aead = key, AESGCM(key)
            self.decrypt_into = self._aead.decrypt_into

        def encrypt_into(self, nonce: bytes, *rest: Any) -> None:
            used.append((self._key, nonce))
            self._aead.encrypt_into(nonce, *rest)

    def reopen() -> SegmentStore:
        max_bytes = MAX_SEGMENTS * FORM.sealed_bytes(2 * REWRITTEN_PART)
        return open_store(tmp_path, ENCRYPTED, capacity=2 * REWRITTEN_PART, max_bytes=max_bytes)

    monkeypatch.setattr(encryption, "AESGCM", Recording)
    store, num_appended = reopen(), 200
    for number in range(num_appended):
        store.append(records_of([number]), [digest_of(number)])
        assert payload_in(store, number) == payload_of(number)  # which is worth writing anew
        if number % 75 == 0:
            if number % 2:
                store.close()
            else:
                abandon(store)
            store = reopen()
    store.close()
    assert len(used) > num_appended and len({*used}) == len(used)


def test_under_another_key_nothing_is_found(tmp_path: Path) -> None:
    """Though the file says that it is of the same layout."""
    store = open_store(tmp_path, ENCRYPTED)
    store.append(records_of(range(3)), [digest_of(n) for n in range(3)])
    store.close()
    other = SegmentFormat(FORM.layout, FORM.payload_bytes, TierKey(bytes(KEY_BYTES)))
    for form in (other, FORM):
        store = open_store(tmp_path, form)
        assert [payload_in(store, number) for number in range(3)] == [None] * 3
        abandon(store)
    store = open_store(tmp_path, ENCRYPTED)
    assert [payload_in(store, number) for number in range(3)] == [payload_of(n) for n in range(3)]
    store.close()


def test_a_record_in_the_place_of_another_is_not_read(tmp_path: Path) -> None:
    """Nor one of another segment, though the footer names it."""
    store = open_store(tmp_path, ENCRYPTED)
    store.append(records_of(range(8)), [digest_of(n) for n in range(8)])
    store.close()
    first, second = (bytearray((tmp_path / f"000000000{n}.kv").read_bytes()) for n in (1, 2))
    places = [slice(ENCRYPTED.offset_of(n), ENCRYPTED.offset_of(n + 1)) for n in range(4)]
    first[places[0]], first[places[1]] = first[places[1]], first[places[0]]
    first[places[2]] = second[places[2]]
    footer = ENCRYPTED.footer([digest_of(n) for n in (1, 0, 6, 3)])
    first[ENCRYPTED.offset_of(4) :] = footer
    (tmp_path / "0000000001.kv").write_bytes(first)
    (tmp_path / "0000000002.kv").unlink()
    store = open_store(tmp_path, ENCRYPTED)
    found = {number: payload_in(store, number) for number in range(8)}
    assert {number for number, payload in found.items() if payload is not None} == {3}
    store.close()


@pytest.fixture
def open_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opens]:
    monkeypatch.setattr("engine.tiers.segment_files.PROBE_BYTES", 1)
    tiers: list[DiskTier] = []

    def opens(key: TierKey | None) -> DiskTier:
        asked: dict[str, Any] = {"layout": FORM.layout, "payload_bytes": FORM.payload_bytes}
        tiers.append(DiskTier(tmp_path / "kv", max_bytes=8 << 20, key=key, **asked))
        return tiers[-1]

    yield opens
    for tier in tiers:
        tier.close()


def test_what_was_written_otherwise_is_another_folders(
    open_tier: Opens, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="engine.tiers")
    wanted, folders = [digest_of(n) for n in range(10)], []
    for key in (None, TierKey(SECRET), TierKey(bytes(KEY_BYTES))):
        tier = open_tier(key)
        folders.append(tier.folder)
        assert tier.num_blocks == 0
        put(tier, range(10))
        settle(tier, lambda tier=tier: tier.num_written == 10)  # type: ignore[misc]
        tier.close()
    assert len({*folders}) == 3
    assert [each.exists() for each in folders] == [False, True, True], "what is plain is removed"
    assert f"{folders[0]}, which is not encrypted, is removed" in caplog.text
    again = open_tier(TierKey(SECRET))
    assert read(again, again.read(wanted)) == [payload_of(n) for n in range(10)]
    assert again.num_damaged == 0


def test_what_an_engine_uses_without_a_key_stays(
    open_tier: Opens, caplog: pytest.LogCaptureFixture
) -> None:
    plain = open_tier(None)
    with caplog.at_level(logging.WARNING):
        open_tier(TierKey(SECRET))
    assert plain.folder.exists() and "is not encrypted, and stays" in caplog.text


def test_the_secret_is_read_once_and_told_nobody(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, SECRET)
    os.close(writing)
    try:
        key = TierKey.read(Path(f"/dev/fd/{reading}"))
        assert key.name == TierKey(SECRET).name != TierKey(bytes(KEY_BYTES)).name
        assert SECRET.hex() not in repr(key) and os.read(reading, 1) == b""
    finally:
        os.close(reading)
    (tmp_path / "short").write_bytes(SECRET[:31])
    with pytest.raises(ConfigError, match=r"kv_key_file .*short has 31 bytes; a key takes 32"):
        TierKey.read(tmp_path / "short")
    with pytest.raises(ConfigError, match=r"kv_key_file .*none: No such file"):
        TierKey.read(tmp_path / "none")
