"""An OpenAI-compatible upstream as a `Replica`: chat completions over HTTP/1.1, passed on as they
come, or read as text for a surface that is not OpenAI's.

Knows no tenant and no price.

An upstream with a `room` is asked as many requests at once as its room lets pass; the others wait
there, for as long as their deadlines say. Without one nothing waits here.

Usage is always asked for, whatever the client asked. A request that nobody waits for any more is
cut off at whatever it waits for, which closes its connection: that is how an upstream learns of
it.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from foundation.http1 import (
    Connection,
    Headers,
    HttpClientError,
    Pool,
    PoolFull,
    ReadTimeout,
    request_head,
)
from foundation.request_context import outgoing_trace
from foundation.sse import END, Event, EventParser, EventTooLarge
from foundation.stages import CURRENT_ATTEMPT
from gateway.fleet.contact import Contact
from gateway.fleet.errors import (
    FleetError,
    NoSlot,
    ReplicaLost,
    ReplicaOverloaded,
    ReplicaUnauthorised,
    ReplicaUnavailable,
    ReplicaUnreadable,
    UpstreamRefused,
)
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.replica import ANYBODYS, EventTaker, PreparedRequest, ReplicaHealth
from gateway.fleet.upstream.attempt import Clock, UpstreamAborted, UpstreamAttempt
from gateway.fleet.upstream.body import to_chat_body
from gateway.fleet.upstream.bounds import UpstreamBounds, names_bound, without_bound
from gateway.fleet.upstream.claim_breaker import ClaimBreaker
from gateway.fleet.upstream.errors import HIDDEN, to_fleet_error
from gateway.fleet.upstream.image_bound import IMAGE_TOKENS
from gateway.fleet.upstream.input_estimate import Encode
from gateway.fleet.upstream.meter import BrokenAnswer, UpstreamMeter
from gateway.fleet.upstream.stream_bound import IDLE_TIMEOUT_S, StreamBound
from gateway.fleet.waiting_room import MAX_WAIT_S, QueueTicket, WaitingRoom
from gateway.generate_request import GenerateRequest, MaxTokensField, PlainForward, bounded_to
from gateway.generation_events import MeteredUsage, RawChunk, RawRun, ReplicaEvent
from gateway.lanes import Priority

log = logging.getLogger(__name__)

CHAT_PATH = "chat/completions"
PLAIN_PATHS = ("completions", "embeddings")
"""Behind the base URL."""
CONNECT_TIMEOUT_S = 5.0
BODY_TIMEOUT_S = 600.0
"""Bounds an answer that comes in one piece; the official SDK waits as long."""
AFTER_DONE_TIMEOUT_S = 0.1
"""Bounds the wait for the response's end behind `[DONE]`: a connection that was read to the end can
be used again."""
ERROR_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 1024
MAX_IDLE_CONNECTIONS = 256
IDLE_S = 4.0
"""After that a kept connection is not trusted any more: uvicorn, which most upstreams run on,
closes its side after 5 s, and a request that crosses that on the way is lost.
"""
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
ASSUMED_TOKENS_PER_S = 50.0
"""The assumed speed of a request until one was measured."""
RATE_SMOOTHING = 0.2
"""Weight of the newest measurement in the moving average."""


class UpstreamReplica:
    """A model of an OpenAI-compatible upstream, as a replica. `upstream_model`: the model's name
    over there. `encoding`: a tokenizer to count prompts with. `max_tokens_field`: where it looks
    for the bound of an answer, if the client names none. `takes_reasoning_effort`: it is told of
    hints at how much to think."""

    def __init__(
        self,
        *,
        name: str,
        base_url: str,
        upstream_model: str,
        threads: PrepareThreads,
        api_key: str | None = None,
        weight: int = 1,
        context_window: int | None = None,
        max_output_tokens: int | None = None,
        max_image_tokens: int | None = None,
        max_tokens_field: MaxTokensField = "max_tokens",
        takes_reasoning_effort: bool = False,
        encoding: Encode | None = None,
        room: WaitingRoom | None = None,
        claims: ClaimBreaker | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = name
        self.weight = weight
        self.contact = Contact()
        self.identity = identity_of(name, base_url, upstream_model, api_key)
        self._upstream_model = upstream_model
        self._hidden = dict.fromkeys(names_of(base_url, api_key), HIDDEN)
        self._bounds = UpstreamBounds(
            context_window,
            max_output_tokens,
            max_tokens_field,
            encoding,
            max_image_tokens or IMAGE_TOKENS,
        )
        self._takes_reasoning_effort = takes_reasoning_effort
        self._room = room
        self._claims = claims or ClaimBreaker(clock=clock)
        self._threads = threads
        self._clock = clock
        self._tokens_per_s: float | None = None
        self._attempts: dict[str, UpstreamAttempt] = {}
        self._pool = Pool(
            base_url, max_connections=MAX_CONNECTIONS, max_idle=MAX_IDLE_CONNECTIONS, idle_s=IDLE_S
        )
        headers = request_headers(base_url, api_key)
        self._chat_head = begun_head(url_of(base_url, CHAT_PATH), headers)
        self._plain_heads = {
            path: begun_head(url_of(base_url, path), headers) for path in PLAIN_PATHS
        }

    async def start(self) -> None:
        """Do nothing: connections are made as they are needed."""

    async def close(self) -> None:
        """Cut open attempts off, then close. Its room is closed by whoever made it."""
        for attempt in self._attempts.values():
            attempt.abort()
        self._pool.close()

    def health(self) -> ReplicaHealth:
        num_open, room = len(self._attempts), self._room
        available = not self._claims.rests_for_s
        if room is None:
            return ReplicaHealth(name=self.name, available=available, num_running=num_open)
        num_waiting = sum(room.num_waiting.values())
        return ReplicaHealth(
            name=self.name,
            available=available,
            num_running=num_open - num_waiting,
            num_waiting=num_waiting,
            backlog=room.backlog,
        )

    async def prepare(
        self, request: GenerateRequest, priority: Priority = ANYBODYS, cache_salt: str = ""
    ) -> PreparedRequest:
        """`cache_salt` makes no difference: the upstream decides on its cache."""
        if request.plain is not None:
            return await self._prepare_plain(request, request.plain, priority)
        body = self._to_body(request)
        tells = request.is_capped and not names_bound(body)
        payload = self._to_payload(request, without_bound(body) if tells else body)
        size = await self._threads.run(
            priority, len(payload), self._bounds.input_size, body, payload, request.is_capped
        )
        per_choice, given = self._bounds.output(body, size, is_capped=request.is_capped)
        if tells:
            per_choice = min(per_choice, request.max_output_tokens or per_choice)
            payload = self._bounds.with_bound(payload, per_choice)
        return PreparedRequest(
            request=request,
            input_tokens=size.estimate,
            most_input_tokens=size.most,
            max_output_tokens=per_choice * request.n,
            max_tokens_given=given,
            payload=payload,
        )

    async def count(self, request: GenerateRequest, priority: Priority = ANYBODYS) -> int:
        body = self._to_body(request)
        payload = self._to_payload(request, body)
        size = await self._threads.run(
            priority, len(payload), self._bounds.input_size, body, payload, False
        )
        return size.estimate

    async def _prepare_plain(
        self, request: GenerateRequest, plain: PlainForward, priority: Priority
    ) -> PreparedRequest:
        payload = self._to_payload(request, self._to_body(request))
        size = await self._threads.run(
            priority,
            len(payload),
            self._bounds.plain_size,
            plain.prompts,
            payload,
            request.is_capped,
        )
        return PreparedRequest(
            request=request,
            input_tokens=size.estimate,
            most_input_tokens=size.most,
            max_output_tokens=plain.max_tokens * request.n,
            max_tokens_given=True,
            payload=payload,
        )

    def bounded(self, prepared: PreparedRequest, max_output_tokens: int) -> PreparedRequest:
        assert prepared.request.is_capped and not prepared.max_tokens_given
        request = bounded_to(prepared.request, max_output_tokens)
        per_choice = min(max_output_tokens, prepared.max_output_tokens) // request.n
        return msgspec.structs.replace(
            prepared,
            request=request,
            max_output_tokens=per_choice * request.n,
            payload=self._bounds.with_new_bound(prepared.payload, per_choice),
        )

    def predicted_ttft_s(self, prepared: PreparedRequest, priority: Priority) -> float | None:
        """Predict from what waits here, where anything does; an upstream does not say what waits
        there."""
        return None if self._room is None else self._room.predicted_ttft_s(priority)

    def stream(
        self,
        prepared: PreparedRequest,
        *,
        attempt_id: str,
        cache_salt: str,
        priority: Priority = ANYBODYS,
        taker: EventTaker | None = None,
    ) -> AsyncGenerator[ReplicaEvent, None]:
        """Run it. Neither `cache_salt` nor `priority` is sent: over there the upstream decides on
        its cache and its order, here the room decides. Who names a tier is told what we serve it
        as.
        """
        assert attempt_id not in self._attempts
        tier = None if prepared.request.service_tier is None else priority.tier
        attempt = UpstreamAttempt(
            attempt_id,
            prepared,
            self._clock,
            tier,
            most_input=self._bounds.most_input(prepared, self._to_body),
            most_output_tokens=self._bounds.most_output(prepared),
        )
        run = self._stream if prepared.request.stream else self._whole
        room = self._room
        return run(attempt) if room is None else self._in_turn(run, room, priority, attempt)

    @property
    def max_model_len(self) -> int | None:
        return self._bounds.context_window

    async def abort(self, attempt_id: str) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            attempt.abort()

    async def set_paused(self, attempt_id: str, *, paused: bool) -> None:
        """Do nothing: nobody over there can be told; what is written meanwhile becomes debt."""

    async def acknowledge(self, attempt_id: str) -> None:
        """An upstream never brings an attempt up again."""

    # ---- whose turn it is

    async def _in_turn(
        self, run: Answer, room: WaitingRoom, priority: Priority, attempt: UpstreamAttempt
    ) -> AsyncGenerator[ReplicaEvent, None]:
        """Raises NoSlot, and what `run` raises."""
        ticket = room.join(priority, attempt.prepared.input_tokens)
        self._attempts[attempt.id] = attempt
        try:
            if not ticket.served.is_set():
                await self._wait(room, ticket, attempt)
            waited_s: float | None = attempt.elapsed_s
            attempt.restart()
            async with aclosing(run(attempt)) as events:
                async for event in events:
                    if waited_s is not None:
                        event = msgspec.structs.replace(event, queue_time_s=waited_s)
                        waited_s = None
                        if not event.finished:
                            room.began(ticket)
                    if event.usage is not None:
                        room.used(ticket, event.usage)
                    yield event
        except UpstreamAborted:
            yield ReplicaEvent(finished=True)
        finally:
            self._let_go(attempt)
            room.leave(ticket)

    async def _wait(self, room: WaitingRoom, ticket: QueueTicket, attempt: UpstreamAttempt) -> None:
        deadline_s = ticket.priority.deadline_s
        longest_s = MAX_WAIT_S if deadline_s is None else min(deadline_s, MAX_WAIT_S)
        try:
            async with attempt.waiting(longest_s):
                await ticket.served.wait()
        except TimeoutError:
            if ticket.served.is_set():  # in the same moment
                return
            raise NoSlot(
                f"{self.name}: no slot came free in {longest_s:.3f} s",
                retry_after_s=room.retry_after_s(),
            ) from None

    # ---- what is sent

    def _to_body(self, request: GenerateRequest) -> dict[str, Any]:
        """Raises UnsupportedField."""
        if request.forward is not None:
            return request.forward
        return to_chat_body(request, self._bounds.field, hints_effort=self._takes_reasoning_effort)

    def _to_payload(self, request: GenerateRequest, body: dict[str, Any]) -> bytes:
        sent = {**body, "model": self._upstream_model}
        if request.stream:
            sent["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        return msgspec.json.encode(sent)

    async def _post(self, attempt: UpstreamAttempt, timeout_s: float) -> Connection:
        """The connection once the answer's head is good, to be given back with `_let_go`, whatever
        comes. Raises ReplicaUnavailable, UpstreamRefused, Aborted."""
        if rest_s := self._claims.rests_for_s:
            raise ReplicaUnavailable(
                f"{self.name} rests: it claims more than it may", retry_after_s=rest_s
            )
        self._attempts[attempt.id] = attempt
        try:
            connection = self._pool.take_idle()
            if connection is None:
                async with attempt.waiting(CONNECT_TIMEOUT_S):
                    connection = await self._pool.connect()
        except PoolFull as error:
            raise ReplicaOverloaded(f"{self.name}: {error}") from error
        except (HttpClientError, TimeoutError) as error:
            self.contact.failed("unreachable", type(error).__name__)
            raise ReplicaUnavailable(f"{self.name}: {type(error).__name__}") from error
        attempt.begin(connection)
        plain = attempt.prepared.request.plain
        head, body = self._chat_head, attempt.prepared.payload
        if plain is not None:
            head = self._plain_heads[plain.path]
        trace = trace_lines(attempt.prepared.request.model)
        connection.send(b"%b%d\r\n%b\r\n%b" % (head, len(body), trace, body))
        status, headers = await connection.head(timeout_s)
        if status != 200:
            refusal = await self._refusal(attempt, connection, status, headers)
            note_refusal(self.contact, refusal, status)
            raise refusal
        self.contact.accepted()
        for name, value in headers:
            if name == b"content-encoding" and value != b"identity":
                self.contact.failed("failing", "it compresses, unasked")
                raise ReplicaUnreadable(f"{self.name} compresses, unasked")
        return connection

    def _let_go(self, attempt: UpstreamAttempt) -> None:
        """Let go of its connection, which is the next one's from now on. Idempotent."""
        self._attempts.pop(attempt.id, None)
        if attempt.connection is not None:
            connection, attempt.connection = attempt.connection, None
            self._pool.release(connection)

    async def _refusal(
        self,
        attempt: UpstreamAttempt,
        connection: Connection,
        status: int,
        headers: Headers,
    ) -> FleetError:
        body = b""
        try:
            async with attempt.waiting(ERROR_TIMEOUT_S):
                while len(body) < MAX_ERROR_BYTES:
                    if not (data := await connection.read(ERROR_TIMEOUT_S)):
                        break
                    body += data
        except (HttpClientError, TimeoutError) as error:
            log.info("%s: its refusal broke off: %s", self.name, type(error).__name__)
        request = attempt.prepared.request
        return to_fleet_error(
            status,
            {name.decode("latin-1"): value.decode("latin-1") for name, value in headers},
            body[:MAX_ERROR_BYTES],
            replica=self.name,
            hidden={**self._hidden, self._upstream_model: request.model},
            sent=request.forward or {},
        )

    # ---- an answer in one piece

    async def _whole(self, attempt: UpstreamAttempt) -> AsyncGenerator[ReplicaEvent, None]:
        """Yield one event. Until it is there nothing is lost by trying another replica."""
        kind = ReplicaUnavailable
        try:
            connection = await self._post(attempt, BODY_TIMEOUT_S)
            kind = ReplicaUnreadable
            body = attempt.meter.read_body(await self._read_body(connection))
            items = attempt.to_items((body,))
        except UpstreamAborted:
            yield ReplicaEvent(usage=self._guess(attempt), finished=True)
            return
        except (HttpClientError, TimeoutError, BrokenAnswer) as error:
            self.contact.failed("failing", type(error).__name__)
            raise kind(f"{self.name}: {type(error).__name__}: {error}") from error
        finally:
            self._let_go(attempt)
        self.contact.served()
        self._judge(attempt)
        yield ReplicaEvent(items=items, usage=attempt.meter.usage, finished=True)

    async def _read_body(self, connection: Connection) -> bytes:
        body = await connection.read(BODY_TIMEOUT_S)
        if connection.is_read:  # it came at once, as most do
            return bounded_body(body)
        pieces, size_bytes = [body], len(body)
        expires = time.monotonic() + BODY_TIMEOUT_S
        while data := await connection.read(expires - time.monotonic()):
            pieces.append(data)
            size_bytes += len(data)
            if size_bytes > MAX_BODY_BYTES:
                break
        return bounded_body(b"".join(pieces))

    def _guess(self, attempt: UpstreamAttempt) -> MeteredUsage | None:
        """Estimate what was generated of an answer that nobody waited for. None: it was never asked
        for."""
        if not attempt.sent:
            return None
        rate = self._tokens_per_s or ASSUMED_TOKENS_PER_S
        output = max(1, round(rate * attempt.elapsed_s))
        output = min(output, attempt.most_output_tokens)
        return msgspec.structs.replace(attempt.meter.usage, output=output, estimated=True)

    def _judge(self, attempt: UpstreamAttempt) -> None:
        """Note what a whole answer tells of the upstream: its speed, and whether its word is
        good."""
        usage = attempt.meter.usage
        is_false = usage.is_disputed and self._bounds.is_surely_false(
            usage, attempt.prepared, self._to_body
        )
        if is_false == usage.is_disputed and self._claims.note(is_disputed=is_false):
            self.contact.failed("failing", "it claims more tokens than it may")
            log.error(
                "upstream %s claims more than it may, %d answers in a row: it rests for %.0f s",
                self.name,
                self._claims.num_in_a_row,
                self._claims.rests_for_s,
            )
        output = usage.output
        if output and attempt.elapsed_s > 0:
            rate = output / attempt.elapsed_s
            known = self._tokens_per_s or rate
            self._tokens_per_s = known + RATE_SMOOTHING * (rate - known)

    # ---- an answer as a stream

    async def _stream(self, attempt: UpstreamAttempt) -> AsyncGenerator[ReplicaEvent, None]:
        """Yield what each read brings, without waiting for more. Raises ReplicaUnavailable until
        something has been yielded, ReplicaLost from then on."""
        meter, parser = attempt.meter, EventParser()
        ended = False
        kind: type[ReplicaUnavailable | ReplicaLost] = ReplicaUnavailable
        try:
            connection = await self._post(attempt, IDLE_TIMEOUT_S)
            kind = ReplicaUnreadable
            bound = StreamBound(meter.most_told_tokens, self._clock)
            while not (meter.done or ended or bound.is_over):
                data = await connection.read(bound.read_s)
                ended = not data
                items, fault = read_all(meter, parser, data)
                if items:
                    kind = ReplicaLost
                    yield ReplicaEvent(items=attempt.to_items(items), usage=meter.usage)
                if fault is not None:
                    raise fault
                bound.note(len(data), meter)
            if not (ended or meter.is_over or bound.is_over):
                await self._to_the_end(connection)
            if not meter.complete:
                raise BrokenAnswer("the stream broke off")
        except UpstreamAborted:
            usage = meter.usage if attempt.sent else None
            yield ReplicaEvent(usage=usage, finished=True)
            return
        except (HttpClientError, TimeoutError, BrokenAnswer, EventTooLarge) as error:
            if not (isinstance(error, ReadTimeout) and meter.complete):
                self.contact.failed("failing", type(error).__name__)
                raise kind(f"{self.name}: {type(error).__name__}: {error}") from error
            log.info("%s: its usage did not come", self.name)
        finally:
            self._let_go(attempt)
        self.contact.served()
        self._judge(attempt)
        yield ReplicaEvent(usage=meter.usage, finished=True)

    async def _to_the_end(self, connection: Connection) -> None:
        expires = time.monotonic() + AFTER_DONE_TIMEOUT_S
        try:
            while (left_s := expires - time.monotonic()) > 0:
                if not await connection.read(left_s):
                    return
        except (TimeoutError, HttpClientError) as error:
            log.debug("%s: no clean end after [DONE]: %s", self.name, type(error).__name__)


def bounded_body(body: bytes) -> bytes:
    """Return a body that is not too large. Raises: BrokenAnswer."""
    if len(body) > MAX_BODY_BYTES:
        raise BrokenAnswer(f"a body of more than {MAX_BODY_BYTES} bytes")
    return body


def read_all(
    meter: UpstreamMeter, parser: EventParser, data: bytes
) -> tuple[tuple[RawChunk | RawRun, ...], BrokenAnswer | None]:
    """Read what came, or with no `data` what ends the stream. What is good is passed on, also where
    something broken comes right behind it. Nothing is read behind the bound of the answer."""
    items: list[RawChunk | RawRun] = []
    if not data:
        return tuple(items), read_events(meter, parser.close(), items)
    while data:
        run = meter.read_run(data) if parser.is_between_events else None
        if run is not None:
            items.append(run[0])
            data = data[run[1] :]
            continue
        end = data.find(END) if meter.compares else -1
        size = len(data) if end < 0 else end + len(END)  # one event: the next may be like it
        fault = read_events(meter, parser.feed(data[:size]), items)
        if fault is not None or meter.is_over:
            return tuple(items), fault
        data = data[size:]
    return tuple(items), None


def read_events(
    meter: UpstreamMeter, events: Sequence[Event], items: list[RawChunk | RawRun]
) -> BrokenAnswer | None:
    for event in events:
        try:
            item = meter.read_event(event.data)
        except BrokenAnswer as fault:
            return fault
        if item is not None:
            items.append(item)
        if meter.is_over and not meter.done:
            items.append(meter.cut())
    return None


Answer = Callable[[UpstreamAttempt], AsyncGenerator[ReplicaEvent, None]]


def note_refusal(contact: Contact, error: FleetError, status: int) -> None:
    """Note what a refusal says of the upstream. One of the request says that all is well."""
    said = f"answered {status}"
    if isinstance(error, UpstreamRefused):
        contact.served()
    elif isinstance(error, ReplicaOverloaded):
        contact.was_busy(said)
    else:
        refuses_us = isinstance(error, ReplicaUnauthorised)
        contact.failed("unauthorised" if refuses_us else "failing", said)


def identity_of(*parts: str | None) -> str:
    """Return a name for an upstream that tells nothing of its parts, of which one is its key."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def url_of(base_url: str, path: str) -> str:
    """Return the URL of a path. Some vendors want a query (`?api-version=...`): it stays behind the
    path."""
    parts = urlsplit(base_url)
    return parts._replace(path=f"{parts.path.rstrip('/')}/{path}").geturl()


def target_of(url: str) -> str:
    parts = urlsplit(url)
    return parts.path + (f"?{parts.query}" if parts.query else "")


def names_of(base_url: str, api_key: str | None) -> list[str]:
    """Return what tells whose the upstream is, the longest of what contain each other first; the
    key in the forms in which it is said back, too."""
    parts = urlsplit(base_url)
    netloc = parts.netloc.rpartition("@")[2]
    names = [netloc, parts.hostname]
    if api_key:
        in_base64 = base64.b64encode(api_key.encode()).decode().rstrip("=")
        names = [api_key, quote(api_key, safe=""), in_base64, *names]
    return [name for name in names if name]


def trace_lines(model: str) -> bytes:
    """Return the header lines of the trace that this task's attempt is a part of, where the
    settings tell the upstreams of a model."""
    found = outgoing_trace(CURRENT_ATTEMPT.get(), model)
    return b"".join(b"%b: %b\r\n" % (name.encode(), found[name].encode()) for name in found)


def begun_head(url: str, headers: Mapping[str, str]) -> bytes:
    """Return what a request to a URL begins with, up to the length of its body."""
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    return request_head("POST", target_of(url), sent).removesuffix(b"\r\n") + b"content-length: "


def request_headers(base_url: str, api_key: str | None) -> dict[str, str]:
    headers = {
        "host": urlsplit(base_url).netloc.rpartition("@")[2],
        "content-type": "application/json",
        "accept": "text/event-stream, application/json",
        "accept-encoding": "identity",
        "user-agent": "tollgate",
    }
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return headers
