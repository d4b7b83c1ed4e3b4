"""Find out what damaged records of a spool have lost. Pure.

    examination = Examination()
    examination.read(number, data); ...           # segments, in their order
    examination.finish(carried)                   # `carried`: open at the start of the next segment
    examination.findings, examination.closes, examination.ended

What is examined lies between two whole SegmentStarts, or ends where a process died. An attempt that
was open and is not carried on has ended in a record that cannot be read: it is billed at its last
checkpoint, and waits for a person where it has none. What damaged bytes still say is a `Claim`: it
tells which attempt they are about, and is never billed by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Literal, NamedTuple

import msgspec

from billing.events import UsageEvent
from billing.spool.format import (
    HEADER,
    MAGIC,
    Checkpoint,
    CloseRecord,
    OpenAttempt,
    Record,
    VoidRecord,
    apply,
    decode_payload,
    scan,
)
from billing.spool.quarantine import Outcome

Kind = Literal["start", "open", "checkpoint", "close", "void", "unknown"]
_TAGS: dict[str, Kind] = {name: name for name in ("start", "open", "checkpoint", "close", "void")}
_SIGNS: tuple[tuple[str, Kind], ...] = (
    ("version", "start"),
    ("event", "close"),
    ("occurred_at", "close"),
    ("quantities", "checkpoint"),
    ("estimated", "checkpoint"),
    ("prices", "open"),
)
"""Keys that a record of one kind alone has, for one whose tag is damaged."""
MAX_TEXT = 256
MAX_DAMAGED_CHARACTERS = 4
"""An id with so many is recognized all the same."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what one damaged record seems to say; nothing of it is verified."""

    kind: Kind
    ids: frozenset[str]
    """Attempts."""
    requests: frozenset[str]
    org: str | None = None
    project: str | None = None
    model: str | None = None
    record: Record | None = None
    """The whole record, if it can be read in spite of its checksum."""
    is_one: bool = True
    """False if the bytes may be several records."""

    @property
    def event(self) -> UsageEvent | None:
        return self.record.event if isinstance(self.record, CloseRecord) else None


class Span(NamedTuple):
    """Damaged bytes of a segment; without any: the segment is missing."""

    segment: int
    start: int
    data: bytes

    @property
    def where(self) -> str:
        return f"{self.segment:08d}-{self.start}"


class Finding(msgspec.Struct, kw_only=True):
    span: Span
    outcome: Outcome = "unresolved"
    attempt: OpenAttempt | None = None
    checkpoint: Checkpoint | None = None
    candidates: tuple[str, ...] = ()


class Examination:
    """Reads segments in their order, and says what damage in them has lost."""

    def __init__(self) -> None:
        self._open: dict[str, OpenAttempt] = {}
        self._ended: dict[str, bool] = {}
        """Attempts with a whole end, and whether recovery made it."""
        self._orphans: dict[str, Checkpoint] = {}
        """The last whole checkpoints of attempts without a whole OPEN."""
        self._shipped: set[str] = set()
        self._settled: dict[str, OpenAttempt | None] = {}
        self._unmatched: dict[str, OpenAttempt] = {}
        """Attempts that are open at the end and not carried on."""
        self._handled: set[str] = set()
        """Attempts that a finding tells of."""
        self._is_sealed = True
        self.spans: list[Span] = []
        """Damage; a missing segment may be added."""
        self.findings: list[Finding] = []
        self.closes: list[UsageEvent] = []
        """The events of attempts that have ended in a record that is lost."""
        self.ended: set[str] = set()
        """Attempts that have ended and are not billed, or not without a person."""

    def read(self, number: int, data: bytes) -> None:
        for placed in scan(data):
            record = placed.record
            if record is None:
                self.spans.append(Span(number, placed.start, data[placed.start : placed.end]))
                continue
            match record:
                case CloseRecord(event=event):
                    self._ended[event.id] = event.finish == "recovered"
                case VoidRecord(attempt_id=attempt_id):
                    self._ended[attempt_id] = False
                case Checkpoint(attempt_id=attempt_id) if attempt_id not in self._open:
                    self._orphans[attempt_id] = record
                case _:
                    pass
            apply(self._open, record)

    def mark_shipped(self, span: Span) -> None:
        """Note that a span was damaged after its events were shipped."""
        self._shipped.add(span.where)

    def settle(self, span: Span, attempt: OpenAttempt | None) -> None:
        """Note that a person has to decide on a span, or has done so; `attempt`: what it ended."""
        self._settled[span.where] = attempt

    def finish(self, carried: Set[str] | None) -> None:
        """Find out what was lost. None: the process died in the last segment, and what is open is
        recovered by who reads it next."""
        self._is_sealed = carried is not None
        self._unmatched = {
            id_: it for id_, it in self._open.items() if carried is None or id_ not in carried
        }
        left: list[tuple[Finding, list[Claim]]] = []
        read = [(Finding(span=span), read_claims(span.data)) for span in self.spans]
        # An end is matched before other records of its attempt.
        for finding, claims in sorted(read, key=lambda it: not _may_end(it[1])):
            span = finding.span
            if span.where in self._settled:
                self._leave_settled(self._settled[span.where])
                continue
            self.findings.append(finding)
            matches = self._matches(span, claims)
            if matches:
                self._end(finding, claims, matches)
            elif not self._is_explained(finding, claims, carried or frozenset()):
                left.append((finding, claims))
        self._end_the_rest(left)

    def _leave_settled(self, attempt: OpenAttempt | None) -> None:
        """Leave an attempt to the person who decides on it, unless it is billed anyway."""
        if attempt is not None and not attempt.has_usage:
            self._handled.add(attempt.attempt.id)
            if self._unmatched.pop(attempt.attempt.id, None):
                self.ended.add(attempt.attempt.id)

    def _matches(self, span: Span, claims: list[Claim]) -> list[OpenAttempt]:
        """Return the open attempts that a span names: by their ids, else by their requests."""
        named = {id_ for claim in claims for id_ in claim.ids}
        found = [
            it
            for id_, it in self._unmatched.items()
            if id_.encode() in span.data or any(_is_near(id_, each) for each in named)
        ]
        if found or named:
            return found
        requests = {request for claim in claims for request in claim.requests}
        asked = [it for it in self._unmatched.values() if it.attempt.request_id in requests]
        return asked if len(asked) == 1 else []

    def _end(self, finding: Finding, claims: list[Claim], matches: list[OpenAttempt]) -> None:
        """Tell how attempts ended that a span names."""
        for each in matches:
            del self._unmatched[each.attempt.id]
            self._handled.add(each.attempt.id)
        finding.attempt = matches[0]
        kinds = {claim.kind for claim in claims}
        has_shipped = finding.span.where in self._shipped and kinds == {"close"}
        if kinds == {"void"} or has_shipped:
            self.ended |= {it.attempt.id for it in matches}
            finding.outcome = "nothing_lost"
            return
        finding.outcome = "billed" if all(claim.is_one for claim in claims) else "unresolved"
        for each in matches:
            if not each.has_usage:
                self.ended.add(each.attempt.id)
                finding.outcome, finding.attempt = "unresolved", each
            elif self._is_sealed:
                self.closes.append(each.recovered())
        if len(matches) > 1:
            finding.candidates = tuple(sorted({it.attempt.request_id for it in matches}))

    def _is_explained(self, finding: Finding, claims: list[Claim], carried: Set[str]) -> bool:
        """True if whole records say all that the span may have said."""
        known = {*self._ended, *carried, *self._handled, *self._orphans}
        named = {
            next((it for it in known if _is_near(it, id_)), id_)
            for claim in claims
            for id_ in claim.ids
        }
        if finding.span.where in self._shipped and _may_end(claims):
            finding.outcome = "nothing_lost"
            return True
        complete = bool(claims) and all(claim.ids and claim.is_one for claim in claims)
        if not complete or not named <= self._ended.keys() | carried | self._handled:
            of_lost = self._orphans.keys() & (named - self._ended.keys() - carried)
            finding.checkpoint = next((self._orphans[it] for it in sorted(of_lost)), None)
            return False
        was_billed = any(self._ended.get(id_) for id_ in named)
        finding.outcome = "billed" if was_billed else "nothing_lost"
        return True

    def _end_the_rest(self, left: list[tuple[Finding, list[Claim]]]) -> None:
        """End the attempts that no span names. A lost end is in one of the spans that are left."""
        rest = list(self._unmatched.values())
        if len(left) == len(rest) == 1:
            ((finding, claims),) = left
            is_void = {claim.kind for claim in claims} == {"void"}
            if is_void or (self._is_sealed and finding.span.data):
                self._end(finding, claims, rest)
                return
        if self._is_sealed:
            self.closes += [it.recovered() for it in rest if it.has_usage]
            rest = [it for it in rest if not it.has_usage]
        for finding, claims in left:
            requests = {it.attempt.request_id for it in rest}
            requests |= {request for claim in claims for request in claim.requests}
            finding.candidates = tuple(sorted(requests))
            if self._is_sealed and len(rest) == 1:
                finding.attempt = rest[0]


def _may_end(claims: list[Claim]) -> bool:
    return all(claim.kind in ("close", "void", "unknown") for claim in claims)


def read_claims(data: bytes) -> list[Claim]:
    """Return what damaged bytes seem to say, by record."""
    return [_claim(piece) for piece in _pieces(data)]


def _pieces(data: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        end = data.find(MAGIC, start + 1)
        end = len(data) if end < 0 else end
        yield data[start:end]
        start = end


def _claim(piece: bytes) -> Claim:
    payload = piece[HEADER.size :]
    record = decode_payload(payload)
    kind = _kind(payload, record)
    names = ("attempt_id",) if kind in ("checkpoint", "void") else ("attempt_id", "id")
    length = HEADER.unpack(piece[: HEADER.size])[1] if len(piece) >= HEADER.size else -1
    return Claim(
        kind=kind,
        ids=frozenset(text for name in names for text in _texts(payload, name)),
        requests=frozenset(_texts(payload, "request_id")),
        org=next(_texts(payload, "org"), None),
        project=next(_texts(payload, "project"), None),
        model=next(_texts(payload, "model"), None),
        record=record,
        is_one=length == len(payload) or record is not None,
    )


def _kind(payload: bytes, record: Record | None) -> Kind:
    if record is not None:
        return _TAGS[record.__struct_config__.tag]  # type: ignore[index]
    for tag in _texts(payload[:MAX_TEXT], "t"):
        if tag in _TAGS:
            return _TAGS[tag]
    for key, kind in _SIGNS:
        if msgspec.msgpack.encode(key) in payload:
            return kind
    return "void" if msgspec.msgpack.encode("attempt_id") in payload else "unknown"


def _texts(payload: bytes, name: str) -> Iterator[str]:
    """Yield the texts that stand behind a key, as msgpack writes both."""
    key, position = msgspec.msgpack.encode(name), -1
    while (position := payload.find(key, position + 1)) >= 0:
        start = position + len(key)
        head = payload[start : start + 2]
        if head and 0xA0 <= head[0] <= 0xBF:
            length, start = head[0] & 0x1F, start + 1
        elif len(head) == 2 and head[0] == 0xD9:
            length, start = head[1], start + 2
        else:
            continue
        text = payload[start : start + length]
        if len(text) == length <= MAX_TEXT:
            yield text.decode(errors="replace")


def _is_near(one: str, other: str) -> bool:
    """True if ids are the same but for damage: two others differ in about twenty characters."""
    if len(one) != len(other):
        return False
    return sum(a != b for a, b in zip(one, other, strict=True)) <= MAX_DAMAGED_CHARACTERS
