"""Reads what the engines that `tollgate up` starts have counted, for
`billing.reconciliation.agreement`.

An engine that somebody else runs keeps its own.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise

from sqlalchemy.ext.asyncio import AsyncEngine

from billing.reconciliation.agreement import EngineCount, Tokens
from billing.reconciliation.daily import DailyAgreement
from engine.protocol import Usage
from engine.transport import usage_record
from gateway.home import Home
from gateway.settings.models import ModelConfig


def engine_counts(home: Home, models: Sequence[ModelConfig]) -> list[EngineCount]:
    """Raises: OSError, ValueError for a file that is no record."""
    return [count for model in models if model.starts_engine for count in _counts(home, model)]


def start_daily_agreement(
    stack: AsyncExitStack, home: Home, models: Sequence[ModelConfig], db: AsyncEngine
) -> None:
    """Start the daily agreement of this host. `db`: of a role that sees every org's rows."""
    counts = partial(engine_counts, home, models)
    daily = DailyAgreement(db, home.spool, counts, host=socket.gethostname())
    stack.push_async_callback(daily.stop)
    daily.start()


def _counts(home: Home, model: ModelConfig) -> Iterator[EngineCount]:
    names = frozenset({model.name, *(adapter.name for adapter in model.adapters)})
    paths = usage_record.records_of(home.usage_record(model.name))
    readings = [usage_record.read(path) for path in paths]
    for reading, successor in pairwise([*readings, None]):
        assert reading is not None
        total = reading.acknowledged
        yield EngineCount(
            name=model.name,
            models=names,
            since=reading.since,
            until=None if successor is None else successor.since,
            is_lost=reading.is_lost,
            acknowledged=Tokens(total.prompt_tokens, total.generated_tokens),
            open=_tokens(reading.open),
            recent=_tokens(reading.recent),
        )


def _tokens(usages: Mapping[str, Usage]) -> dict[str, Tokens]:
    return {name: Tokens(it.prompt_tokens, it.generated_tokens) for name, it in usages.items()}
