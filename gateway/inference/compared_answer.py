"""Reads how an answer ends, while a rollout compares two versions of its model.

An answer of a model that no rollout is about costs a look at a table. Of one that is compared the
beginning is read, and why it ended; nothing of it is kept.
"""

from __future__ import annotations

import re
import time

from gateway.fleet.errors import FleetError, UpstreamRefused
from gateway.fleet.upstream.meter import BrokenAnswer
from gateway.fleet.upstream.text import UpstreamText
from gateway.generation_events import (
    FinishReason,
    MeteredUsage,
    RawBody,
    RawChunk,
    RawRun,
    ReplicaEvent,
    TextDelta,
)
from gateway.inference.calls import GenerationCall
from gateway.inference.delivery import Delivery
from gateway.lanes import ServedRequest, judge
from gateway.registry.comparison import Outcomes
from gateway.registry.version_table import ComparedRequest

HEAD_CHARS = 160
"""An answer is taken for a refusal by so much of its beginning."""
MAX_HEAD_BYTES = 64 * 1024
"""An upstream's answer that says nothing in so much is read no further."""
REFUSING = re.compile(
    r"""\W*
    (?:(?:i'?m|i\ am|we're|we\ are)\ (?:\w+\ )?sorry|sorry|i\ apologi[sz]e|unfortunately
      |as\ an\ ai\b[^,.]*)?
    \W*(?:but|that)?\W*
    (?:i\ (?:can(?:'t|not|\ not)|won't|will\ not|must\ decline|have\ to\ decline|refuse|decline)
      |(?:i'm|i\ am)\ (?:not\ able|unable|not\ allowed|not\ permitted|not\ going)\ to
      |(?:i'm|i\ am)\ not\ comfortable)\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""How models of English decline."""
REFUSAL_FIELD = re.compile(rb'"refusal"\s*:\s*"')
"""OpenAI's field of a message that declines."""
FINISH_FIELD = re.compile(rb'"finish_reason"\s*:\s*"(\w+)"')
LATE = ("late_first_token", "slow_tokens")


def is_refusal(head: str) -> bool:
    """Tell whether an answer that begins so declines. Some that do not begin so as well: they are
    noise, of both versions alike."""
    return REFUSING.match(head.replace("\u2019", "'")) is not None


class ComparedAnswer:
    """One generation that is compared. `compared`: where it is counted, and in which group."""

    def __init__(self, compared: ComparedRequest, call: GenerationCall) -> None:
        self._compared, self._call = compared, call
        self._text = UpstreamText()
        request = call.request
        self._is_read = request.plain is None and request.embedding is None
        """It is a chat's or a completion's, whose text can be read."""
        self._head = ""
        self._num_bytes = 0
        self._speaks = False
        """Something was said, or a tool called."""
        self._refuses = False
        self._finish: FinishReason | str | None = None
        self._first_at: float | None = None
        self._usage = MeteredUsage()
        self._is_whole = False
        """An upstream gave it in one piece: no token was seen coming."""

    def received(self, event: ReplicaEvent) -> None:
        """Read what a replica's step brought."""
        if event.usage is not None:
            self._usage = event.usage
        if event.items and self._first_at is None:
            self._first_at = time.perf_counter()
        for item in event.items:
            if isinstance(item, TextDelta):
                self._read_delta(item)
            elif isinstance(item, (RawChunk, RawRun, RawBody)):
                self._read_raw(item)

    def end(self, failure: Exception | None, delivery: Delivery) -> None:
        """Count how it ended. What is neither the version's doing nor an answer is not counted: a
        refusal by limits, a request that cannot be served, and one whose client left before."""
        tally, group, version = self._compared
        if delivery.version not in (None, version):
            return  # another version served it, since its own did not wake up
        if failure is not None:
            if isinstance(failure, FleetError) and not isinstance(failure, UpstreamRefused):
                tally.add(Outcomes(requests=1, failed=1), group)
        elif self._first_at is not None or not delivery.abandoned:
            tally.add(self._answered(was_left=delivery.abandoned), group)

    def _answered(self, *, was_left: bool) -> Outcomes:
        refused = self._refuses or self._finish == "content_filter"
        refused = refused or is_refusal(self._head)
        is_empty = self._is_read and not self._speaks and not refused and not was_left
        return Outcomes(
            requests=1,
            refused=refused,
            empty=is_empty,
            cut_off=self._finish == "length",
            late=self._is_late(),
        )

    def _is_late(self) -> bool:
        meter, now = self._call.meter, time.perf_counter()
        if meter.slo is None:
            return False
        ttft_s = None
        if not self._is_whole and self._first_at is not None:
            ttft_s = self._first_at - meter.received_at
        served = ServedRequest(
            status=200,
            duration_s=now - meter.received_at,
            ttft_s=ttft_s,
            tpot_s=meter.tpot_s,
            output_tokens=self._usage.output + self._usage.wasted_output,
            idle_prefill_s=meter.idle_prefill_s,
        )
        return judge(meter.slo, served) in LATE

    def _read_delta(self, delta: TextDelta) -> None:
        """Read a piece; of several choices the first one speaks for all."""
        if delta.index:
            return
        self._speaks = self._speaks or bool(delta.calls) or bool(delta.text.strip())
        if len(self._head) < HEAD_CHARS:
            self._head += delta.text[:HEAD_CHARS]
        self._finish = delta.finish_reason or self._finish

    def _read_raw(self, item: RawChunk | RawRun | RawBody) -> None:
        """Read what an upstream said, until it is known how that begins; then why it ends."""
        self._is_whole = self._is_whole or isinstance(item, RawBody)
        if not self._is_read:
            return
        payload = item.last if isinstance(item, RawRun) else item.payload
        if len(self._head) < HEAD_CHARS and self._num_bytes < MAX_HEAD_BYTES:
            self._num_bytes += len(payload)
            self._refuses = self._refuses or REFUSAL_FIELD.search(payload) is not None
            try:
                for delta in self._text.read((item,)):
                    self._read_delta(delta)
            except BrokenAnswer:
                self._num_bytes = MAX_HEAD_BYTES  # its attempt hears of it by itself
        elif not self._speaks:
            self._speaks = True  # so long an answer is not empty
        if (found := FINISH_FIELD.search(payload)) is not None:
            self._finish = found[1].decode()
