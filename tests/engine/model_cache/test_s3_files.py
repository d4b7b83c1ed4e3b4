"""Models of an S3-compatible store: a real server of S3, and a line to it that is cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import obstore
import pytest

from engine.errors import ConfigError
from engine.model_cache import s3_files
from engine.model_cache.cache import Access, ModelCache
from engine.model_cache.s3_files import S3Access, open_store
from engine.model_cache.sources import parse_source
from engine.text import hub_weights
from tests.engine.model_cache.remote import FILES, tell
from tests.gateway.batches.object_store import ACCESS_KEY, SECRET_KEY, HeldRoad, ObjectStore

SUMS = "".join(f"{hashlib.sha256(each).hexdigest()} *{name}\n" for name, each in FILES.items())


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    started = ObjectStore()
    yield started
    started.close()


@pytest.fixture
def bucket(store: ObjectStore) -> str:
    return store.bucket()


def put(store: ObjectStore, bucket: str, files: Mapping[str, bytes], prefix: str = "m/8b/") -> None:
    for name, content in files.items():
        access = S3Access(endpoint=store.url, access_key=ACCESS_KEY, secret_key=SECRET_KEY)
        obstore.put(open_store(parse_source(f"s3://{bucket}"), access), f"{prefix}{name}", content)


def cache_of(root: Path, port: int) -> ModelCache:
    s3 = S3Access(
        endpoint=f"http://127.0.0.1:{port}",
        access_key=ACCESS_KEY,
        secret_key=SECRET_KEY,
        timeout_s=2.0,
    )
    return ModelCache(root, 1 << 30, Access(s3=s3))


def test_objects_are_verified_by_the_sums_beside_them(
    store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    cache, source = cache_of(tmp_path, store.port), parse_source(f"s3://{bucket}/m/8b")
    with pytest.raises(ConfigError, match="the store has no object there"):
        cache.fetch(source, tell)
    put(store, bucket, FILES)
    put(store, bucket, {"config.json": b"[]"}, prefix="m/8b-other/")
    with pytest.raises(ConfigError, match="nothing says what config.json has to be"):
        cache.fetch(source, tell)
    put(store, bucket, {"SHA256SUMS": SUMS.encode()})
    found = cache.fetch(source, tell)
    assert {each.name: each.read_bytes() for each in found.folder.iterdir()} == FILES
    put(store, bucket, {"model.safetensors": b"another one of the same name"})
    with pytest.raises(ConfigError, match="model.safetensors is not what its checksum says"):
        cache.fetch(source, tell)
    put(store, bucket, {"SHA256SUMS": b"nonsense\n"})
    with pytest.raises(ConfigError, match="SHA256SUMS: line 1 is none"):
        cache.fetch(source, tell)
    assert cache.fetch(source, tell, version=found.version).folder == found.folder


def test_a_line_that_is_cut_is_taken_up_again(
    store: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_weights, "RETRY_AFTER_S", 0.0)
    monkeypatch.setattr(hub_weights, "AT_ONCE", 1)
    monkeypatch.setattr(s3_files, "RANGE_BYTES", 1000)
    monkeypatch.setattr(s3_files, "MAX_RETRIES", 0)
    put(store, bucket, {**FILES, "SHA256SUMS": SUMS.encode()})
    source = parse_source(f"s3://{bucket}/m/8b")
    with HeldRoad(store.port) as line:
        cache = cache_of(tmp_path, line.road.port)

        def cut(now: hub_weights.Transfer) -> None:
            if now.done > 5000 and not tmp_path.joinpath("cut").exists():
                tmp_path.joinpath("cut").touch()
                line.cut_now()

        with pytest.raises(ConfigError, match=r"cannot be fetched: s3://"):
            monkeypatch.setattr(hub_weights, "TELL_EVERY_S", 0.0)
            cache.fetch(source, cut)
        came = sum(each.stat().st_size for each in (tmp_path / "partial").rglob("*.safetensors"))
        assert came >= 5000
        line.mend()
        assert (cache.fetch(source, tell).folder / "model.safetensors").read_bytes() == FILES[
            "model.safetensors"
        ]
        line.cut_now()
        with pytest.raises(ConfigError, match="cannot be fetched") as refused:
            cache.fetch(source, tell)
        assert SECRET_KEY not in str(refused.value) and "\n" not in refused.value.message


def test_a_bucket_that_is_not_there_is_one_line(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the store answers 404 Not Found"):
        cache_of(tmp_path, store.port).fetch(parse_source("s3://no-such-bucket/m"), tell)


def test_access_shows_no_secret() -> None:
    assert SECRET_KEY not in f"{Access(s3=S3Access(access_key=ACCESS_KEY, secret_key=SECRET_KEY))}"
