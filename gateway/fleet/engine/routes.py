"""An in-repo model as routes: its engines, its tokenizer and its chat template."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from engine.text.chat_template import ChatTemplate
from engine.text.output_parser.output_format import OutputFormat
from engine.text.tokenizer import Tokenizer
from engine.transport.client import Engine
from gateway.fleet.drain_marks import NEVER_DRAINED, DrainMark, DrainMarks
from gateway.fleet.engine.folder_options import read_folder_options
from gateway.fleet.engine.kept_prefixes import OnAsked
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.engine_view import EngineView
from gateway.fleet.joining.round_trips import RoundTrips
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.router import Route
from gateway.home import engine_number
from gateway.settings.models import ModelConfig

log = logging.getLogger(__name__)


def engine_routes(
    model: ModelConfig,
    clients: Sequence[Engine],
    threads: PrepareThreads,
    on_asked: OnAsked,
    marks: DrainMarks,
    index: KvIndex,
    views: Sequence[EngineView | None] = (),
    *,
    round_trips: RoundTrips | None = None,
) -> Iterator[Route]:
    """Yield the model as it is, then its adapters: all of the same engines, one tokenizer, one
    template. `clients`: of the model's engines, in their order; `views`: of the same, where
    somebody hears them. `index`: of which engine has what cached. `round_trips`: to engines that
    other cells lend, if any may."""
    assert model.path is not None
    tokenizer = Tokenizer.load(model.path)
    template = ChatTemplate.find(model.path, file=model.chat_template)
    if template is None:
        log.warning("%s has no chat template: it takes no conversations", model.name)
    output_format = OutputFormat(
        tokenizer,
        "" if template is None else template.source,
        family=model.tool_call_parser,
        reasoning=model.reasoning_parser,
    )
    options = read_folder_options(model.path)
    views = views or [None] * len(clients)
    for adapter in ("", *(each.name for each in model.adapters)):
        name = adapter or model.name
        replicas = tuple(
            EngineReplica(
                name=model.replica_name(address, name),
                model=name,
                client=client,
                tokenizer=tokenizer,
                template=template,
                threads=threads,
                adapter=adapter,
                cache_contract=model.cache_contract,
                on_asked=on_asked,
                output_format=output_format,
                options=options,
                drain_mark=drain_mark_of(marks, model, address),
                index=index if len(model.engines) > 1 else None,
                joins=address in model.joined or model.cell_of(address) is not None,
                cell=model.cell_of(address),
                round_trip=round_trip_to(model, address, round_trips),
                view=view,
                is_prefill=model.role_of(address) == "prefill",
            )
            for address, client, view in zip(model.asked_engines, clients, views, strict=True)
        )
        yield Route(
            model=name,
            kind="engine",
            replicas=replicas,
            cache_contract=model.cache_contract,
            parent=model.name if adapter else None,
            has_roles=bool(model.prefill),
            has_borrowed=bool(model.borrowed),
        )


def round_trip_to(
    model: ModelConfig, address: str, round_trips: RoundTrips | None
) -> Callable[[], float]:
    """Return what tells the seconds to an engine and back, which count where it is another
    cell's."""
    if round_trips is None or model.cell_of(address) is None:
        return lambda: 0.0
    return partial(round_trips.of, engine_number(address))


def drain_mark_of(marks: DrainMarks, model: ModelConfig, address: str) -> DrainMark:
    """Return what tells whether an engine is drained. The only one of its model never is."""
    return NEVER_DRAINED if len(model.asked_engines) == 1 else marks.of(engine_number(address))
