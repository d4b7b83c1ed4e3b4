"""The text side of a model without a model; and what all applications have in common, made once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import tokenizers
from sqlalchemy.ext.asyncio import AsyncEngine
from tokenizers import decoders, models, pre_tokenizers

from billing.ledger import spend_totals
from billing.spool.spool import Spool
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from foundation.tasks import TaskSet
from gateway.app import create as product
from gateway.auth import cors_origins
from gateway.auth.bearer import access_tokens, key_reader, revocations
from gateway.auth.federation import issuer_directory
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.limits import counters, funding
from gateway.limits.redis import pipeline
from gateway.mcp import known
from gateway.tenancy import changes
from tests.gateway.routes import one_routing
from tests.gateway.rsa_keys import few_keys

PATIENCE_S = 30.0


@pytest.fixture(scope="session", autouse=True)
def made_once() -> Iterator[None]:
    with few_keys(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "with_routes", one_routing.with_routes)
        yield


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Let what is known stay known while this process, both ends of all, is kept from running: for
    tests of anything but how long that is."""
    for module in (changes, revocations):
        patch.setattr(module, "MAX_STALENESS_S", PATIENCE_S)
    for module in (access_tokens, key_reader, cors_origins, issuer_directory, revocations):
        patch.setattr(module, "READ_TIMEOUT_S", PATIENCE_S)
    patch.setattr(changes, "SILENCE_S", PATIENCE_S)
    patch.setattr(product, "REDIS_TIMEOUT_S", PATIENCE_S)
    be_patient_with_stores(patch)


def be_patient_with_stores(patch: pytest.MonkeyPatch) -> None:
    """Wait for Redis and Postgres where limits would go on without them, and changes be announced
    to nobody."""
    for module in (changes, known, revocations):
        patch.setattr(module, "ANNOUNCE_TIMEOUT_S", PATIENCE_S)
    patch.setattr(pipeline, "BATCH_TIMEOUT_S", PATIENCE_S)
    patch.setattr(funding, "TOP_UP_TIMEOUT_S", PATIENCE_S)
    patch.setattr(counters, "BUILD_TIMEOUT_S", PATIENCE_S)
    patch.setattr(spend_totals, "EVER_USED_TIMEOUT_S", PATIENCE_S)


@pytest.fixture(scope="module", autouse=True)
def patient_with_stores() -> Iterator[None]:
    """Redis is waited for in this process, in tests of anything but how long it is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        be_patient_with_stores(patch)
        yield


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
async def tenant_db(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    """A worker's pool on this test's database, for one tenant at a time."""
    engine = create_engine(postgres_url, role=ROLE_TENANT)
    yield engine
    await engine.dispose()


@pytest.fixture
async def system_db(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    """As `tenant_db`, for what serves all tenants."""
    engine = create_engine(postgres_url, role=ROLE_SYSTEM)
    yield engine
    await engine.dispose()


@pytest.fixture
def threads() -> Iterator[PrepareThreads]:
    threads = PrepareThreads()
    yield threads
    threads.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of one token per byte, and a template that shows everything it is given."""
    folder = tmp_path_factory.mktemp("model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["</s>", "<user>", "<assistant>", "<system>", *letters]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={name: id_ for id_, name in enumerate(names)}, merges=[])
    )
    backend.add_special_tokens(names[:4])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "chat_template.jinja").write_text(
        "{%- for m in messages %}"
        "{%- if m.content == 'refuse me' %}{{ raise_exception('no') }}{% endif -%}"
        "<{{ m.role }}>{{ m.content }}</s>"
        "{%- endfor %}<assistant>"
    )
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture(scope="session")
def template(model_folder: Path) -> ChatTemplate:
    return ChatTemplate.load(model_folder)


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    spool = await Spool.open(tmp_path / "spool")
    yield spool
    await spool.shutdown()


@pytest.fixture
async def tasks() -> AsyncIterator[TaskSet]:
    tasks = TaskSet()
    yield tasks
    await tasks.close()
