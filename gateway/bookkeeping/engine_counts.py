"""Reads what the engines that `tollgate up` starts have counted, for
`billing.reconciliation.agreement`.

An engine that somebody else runs, or that joined, keeps its own: models with such are left out.
Where cells share the books, what an engine counts may be booked by the gateways of another one, and
the books have what the engines of another one generated: requests are compared, and no totals.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.reconciliation.agreement import EngineCount, Tokens
from billing.reconciliation.daily import DailyAgreement
from engine.protocol import Usage
from engine.transport import usage_record
from gateway.home import Home
from gateway.settings.load import Settings
from gateway.settings.models import ModelConfig


def engine_counts(
    home: Home, models: Sequence[ModelConfig], *, shares_books: bool = False
) -> list[EngineCount]:
    """Return the counts of the models that have an engine here, and of those that had one and are
    not served any more. `shares_books`: this home is one of several cells. Raises: OSError,
    ValueError for a file that is no record."""
    configured = {model.name: model for model in models}
    sold: list[_SoldTogether] = []
    for name, records in home.usage_records().items():
        model = configured.get(name)
        if model is None or (model.starts_engine and not model.joined):
            adapters = () if model is None else model.adapters
            names = home.names_sold(name) | {adapter.name for adapter in adapters}
            _add(sold, _SoldTogether((name,), names, tuple(records)))
    return [
        msgspec.structs.replace(count, shares_books=shares_books)
        for each in sold
        for count in _counts(", ".join(each.engines), each.models, each.records)
    ]


class _SoldTogether(NamedTuple):
    """Models whose engines are sold by names that they share, such as the versions of one."""

    engines: tuple[str, ...]
    models: frozenset[str]
    records: tuple[Path, ...]


def _add(sold: list[_SoldTogether], model: _SoldTogether) -> None:
    """Add a model, together with those that share a name with it."""
    for each in [each for each in sold if each.models & model.models]:
        sold.remove(each)
        model = _SoldTogether(
            (*each.engines, *model.engines),
            each.models | model.models,
            (*each.records, *model.records),
        )
    sold.append(model)


def start_daily_agreement(
    stack: AsyncExitStack,
    settings: Settings,
    models: Callable[[], Sequence[ModelConfig]],
    db: AsyncEngine,
) -> None:
    """Start the daily agreement of this host. `models`: those that are served now. `db`: of a role
    that sees every org's rows."""
    home, shares_books = Home(settings.home), settings.cell is not None

    def counts() -> list[EngineCount]:
        return engine_counts(home, models(), shares_books=shares_books)

    daily = DailyAgreement(db, home.spool, counts, host=socket.gethostname())
    stack.push_async_callback(daily.stop)
    daily.start()


def _counts(name: str, names: frozenset[str], records: Sequence[Path]) -> Iterator[EngineCount]:
    """Yield the counts of models that are sold together, one after the other in time. Engines that
    ran side by side have one together: the books do not say which of them a request was at."""
    readings = [
        usage_record.read(path) for record in records for path in usage_record.records_of(record)
    ]
    if not readings:
        return
    spans = [readings] if len(records) > 1 else [[reading] for reading in readings]
    for span, successor in pairwise([*spans, None]):
        assert span is not None
        total = Tokens()
        for reading in span:
            counted = reading.acknowledged
            total = total.plus(Tokens(counted.prompt_tokens, counted.generated_tokens))
        yield EngineCount(
            name=name,
            models=names,
            since=min(reading.since for reading in span),
            until=None if successor is None else successor[0].since,
            is_lost=any(reading.is_lost for reading in span),
            acknowledged=total,
            open=_all_tokens(reading.open for reading in span),
            recent=_all_tokens(reading.recent for reading in span),
        )


def _all_tokens(each: Iterable[Mapping[str, Usage]]) -> dict[str, Tokens]:
    return {request_id: it for usages in each for request_id, it in _tokens(usages).items()}


def _tokens(usages: Mapping[str, Usage]) -> dict[str, Tokens]:
    return {name: Tokens(it.prompt_tokens, it.generated_tokens) for name, it in usages.items()}
