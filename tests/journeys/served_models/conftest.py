"""One Tollgate that serves models of every kind, for all modules of this folder: penny, three other
checkpoints, adapters, and those of five scripted upstreams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.journeys.served_models.configuration import BIG_KEY, BOOK, CANARY, CONFIG
from tests.journeys.served_models.zoo import Zoo, make_zoo
from tests.journeys.upstreams import LiveUpstream, live_upstreams
from tests.stack import Stack, running

UPSTREAMS = ("big", "wide", "other", "narrow", "limited")


@pytest.fixture(scope="session")
def upstreams() -> Iterator[dict[str, LiveUpstream]]:
    with live_upstreams(len(UPSTREAMS)) as opened:
        yield dict(zip(UPSTREAMS, opened, strict=True))


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return make_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def stack(
    upstreams: dict[str, LiveUpstream], zoo: Zoo, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    book = tmp_path_factory.mktemp("prices") / "big.toml"
    book.write_text(BOOK)
    urls = {name: upstream.base_url for name, upstream in upstreams.items()}
    config = CONFIG.format(books=f'"{book}", "{zoo.book}"', zoo=zoo.config, **urls)
    env = {"BIG_KEY": BIG_KEY, "SOMEBODYS_TOKEN": CANARY}
    with running(config=config, workers=2, env=env) as started:
        yield started
