"""Times one request's tokens, counts them, and judges it when it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from billing.events import Tags, UsageEvent
from engine.protocol import Lane
from foundation.request_context import current_stages
from foundation.stages import Stage
from gateway.generate_request import GenerateRequest
from gateway.generation_events import CacheOutcome, MeteredUsage, RawBody, ReplicaEvent
from gateway.lanes import ServedRequest, Slo, SloOutcome, judge
from gateway.telemetry.captured_content import CapturedContent
from gateway.telemetry.engine_gauges import ResumeOutcome
from gateway.telemetry.fleet_metrics import HedgeOutcome, MoveOutcome
from gateway.telemetry.histograms import HistogramChild
from gateway.telemetry.latency_counts import TokenGaps
from gateway.telemetry.metrics import Telemetry


class RequestMeter:
    """Times one request's tokens and counts them. `received_at`: when its first byte was read, in
    seconds of `time.perf_counter`; None: now."""

    def __init__(
        self, telemetry: Telemetry, model: str, *, received_at: float | None = None
    ) -> None:
        self._telemetry = telemetry
        self._model = telemetry.label(model)
        self.received_at = time.perf_counter() if received_at is None else received_at
        self.awaits_write = False
        """True from a stream's first token on, until it is queued to be written."""
        self._last_at: float | None = None
        self._itl: HistogramChild | None = None
        self._num_tokens = 0
        self.ttft_s: float | None = None
        self.lane: Lane | None = None
        self.slo: Slo | None = None
        """None, as its lane: it was refused before anybody understood it."""
        self.idle_prefill_s: float | None = None
        """Seconds that its prompt would take an idle replica; None: nobody knows."""
        self.on_first_token: Callable[[float], float | None] | None = None
        """Hears how long the first token of the next attempt took, and returns by how much that
        was predicted wrongly."""
        self.on_event: Callable[[ReplicaEvent], None] | None = None
        """Hears what each step of a replica brought."""
        self.version: int | None = None
        """The version of the model that serves it; None: the model has none."""
        self.slo_outcome: SloOutcome | None = None
        self.gaps = TokenGaps()
        self.queue_time_s: float | None = None
        self.cache: CacheOutcome | None = None
        """Why no more of its prompt was cached, of its first generation."""
        self.tags: Tags = {}
        """The tags that the client has it counted by."""
        self.content: CapturedContent | None = None
        """Holds what is asked and answered. None: its project does not store that."""
        self.billed: list[UsageEvent] = []
        """The bills of all generations of the request."""
        self.stages = current_stages()
        """The stages of the request, over all its generations."""
        self.is_handed_over = False
        """The request is answered before its work has begun, and who does that notes its end."""
        self._attempt: Stage | None = None
        self._begun_at = 0.0
        """When the replica began to work on it, after its queue."""
        self._decode: Stage | None = None

    def again(self) -> RequestMeter:
        """Return a meter for another generation of the same request."""
        meter = RequestMeter(self._telemetry, self._model)
        meter.billed, meter.gaps, meter.content = self.billed, self.gaps, self.content
        meter.stages = self.stages
        return meter

    def capture(self, request: GenerateRequest) -> None:
        """Hold what a generation of the request asks and is answered from now on."""
        if self.content is None:
            self.content = CapturedContent()
        self.content.begin(request)

    def begin_attempt(self, replica: str, ref: str = "", *, is_upstream: bool = False) -> Stage:
        """Begin the stage of a try on a replica, which `received` divides further. `ref`: the id of
        its usage."""
        attempt = self._attempt = self.stages.begin("attempt", replica)
        attempt.ref, attempt.is_upstream = ref, is_upstream
        self._begun_at, self._decode = attempt.began_at, None
        return attempt

    def received(self, event: ReplicaEvent, *, streams: bool) -> None:
        """Count what a replica's step brought, whether or not the client is shown it yet. streams:
        the client is shown it before the answer is whole, and `wrote_first` tells when."""
        if self.content is not None:
            self.content.add(event.items)
        if self.on_event is not None:
            self.on_event(event)
        if event.queue_time_s is not None and self.queue_time_s is None:
            self.queue_time_s = event.queue_time_s
            self._add_queue(event.queue_time_s)
            self._telemetry.queue_time_of(self._model).observe(event.queue_time_s)
        usage = event.usage
        if usage is None or is_told_at_once(event):
            return
        num_tokens = usage.output + usage.wasted_output
        if num_tokens == self._num_tokens:
            return
        more, self._num_tokens = num_tokens - self._num_tokens, num_tokens
        now = time.perf_counter()
        if self._last_at is None:
            self.awaits_write = streams
            if not streams:
                self.wrote_first()
        else:
            step_s = now - self._last_at
            self.gaps.add(step_s, more)
            if more > 0:
                if self._itl is None:
                    self._itl = self._telemetry.itl_of(self._model)
                self._itl.observe(step_s if more == 1 else step_s / more, more)
        self._last_at = now
        if self._decode is not None:
            self._decode.ended_at = now
        else:
            self._add_prefill(now)

    def _add_queue(self, queue_time_s: float) -> None:
        """Note how long the attempt waited before it was begun."""
        attempt = self._attempt
        if attempt is not None:
            self._begun_at = attempt.began_at + queue_time_s
            self.stages.add(Stage("queue", attempt.began_at, self._begun_at, within=attempt))

    def _add_prefill(self, now: float) -> None:
        """Note that the attempt's first token came now; each one from here on is decoded."""
        attempt = self._attempt
        if attempt is not None:
            self._check_prediction(now - attempt.began_at)
            self.stages.add(Stage("prefill", min(self._begun_at, now), now, within=attempt))
            self._decode = self.stages.add(Stage("decode", now, now, within=attempt))

    def found_cached(self, attempt: Stage, outcome: CacheOutcome) -> None:
        """Note in the stages of an attempt, which has ended, what of its prompt was cached, where,
        and why no more."""
        attempt.cache_cause = outcome.cause
        for stage in self.stages:
            if stage.name == "prefill" and stage.within is attempt:
                stage.about = str(outcome.found)

    def _check_prediction(self, took_s: float) -> None:
        if self.on_first_token is None:
            return
        wrong_s = self.on_first_token(took_s)
        self.on_first_token = None
        if wrong_s is not None:
            self._telemetry.fleet.prediction_errors_of(self._model).observe(wrong_s)

    def chose(self, reason: str, status_age_s: float) -> None:
        """Count why its replica was chosen among several, and how old the oldest status was."""
        self._telemetry.fleet.routes_of(self._model, reason).inc()
        self._telemetry.fleet.status_ages_of(self._model).observe(status_age_s)

    def refused_early(self, num_tokens: int) -> None:
        """Count that it is refused for coming too late. `num_tokens`: of its prompt."""
        self._telemetry.fleet.refused_early(self._model, self.lane or "interactive", num_tokens)

    def disputed(self, upstream: str, usage: MeteredUsage) -> None:
        """Count what an upstream claims beyond what the request can have used."""
        self._telemetry.count_disputed(
            upstream,
            input_tokens=usage.disputed_input,
            output_tokens=usage.disputed_output,
        )

    def wrote_first(self) -> None:
        """Note that the first byte is written of what shows the first token."""
        self.ttft_s = time.perf_counter() - self.received_at
        self._telemetry.ttft_of(self._model).observe(self.ttft_s)

    def promise(self, lane: Lane, slo: Slo) -> None:
        """Note what the request will be judged by."""
        self.lane, self.slo = lane, slo

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, over all generations of the request."""
        return self.gaps.mean_s

    def judge(self, status: int) -> None:
        """Count whether the request, which has ended now, met its SLO."""
        if self.slo is None or self.lane is None:
            return
        tpot_s = self.tpot_s
        if tpot_s is not None:
            self._telemetry.tpot_of(self._model).observe(tpot_s)
        served = ServedRequest(
            status,
            time.perf_counter() - self.received_at,
            self.ttft_s,
            tpot_s,
            sum(each.quantities.output_total for each in self.billed),
            self.idle_prefill_s,
        )
        self.slo_outcome = judge(self.slo, served)
        if self.slo_outcome is not None:
            self._telemetry.slo_requests_of(self._model, self.lane, self.slo_outcome).inc()

    def exemplify(self, trace: str, at: float) -> None:
        """Name its trace, 32 hex digits, at the buckets that it was counted in. From any thread.
        `at`: Unix seconds."""
        telemetry = self._telemetry
        for seconds, histogram_of in (
            (self.ttft_s, telemetry.ttft_of),
            (self.tpot_s, telemetry.tpot_of),
            (self.queue_time_s, telemetry.queue_time_of),
        ):
            if seconds is not None:
                histogram_of(self._model).exemplify(seconds, trace=trace, at=at)

    def used(self, event: UsageEvent) -> None:
        """Count what was billed."""
        self.billed.append(event)
        used = event.quantities
        self._telemetry.count_tokens(
            self._model,
            uncached=used.uncached_input + used.embedding_input,
            cache_read=used.cache_read,
            cache_write=used.cache_write_5m + used.cache_write_1h,
            output=used.output_total,
        )

    def resumed(self, outcome: ResumeOutcome, gap_s: float | None = None) -> None:
        """Count that the replica of a generation was lost, and what came of that. `gap_s`: until
        another one went on."""
        resumes = self._telemetry.engine_gauges.resumes
        resumes.count.labels(self._model, outcome).inc()
        if gap_s is not None:
            resumes.gap.labels(self._model).observe(gap_s)

    def handed_over(self, gap_s: float) -> None:
        """Note how long it took until an engine went on with what another one computed."""
        self._telemetry.fleet.handovers.labels(self._model).observe(gap_s)

    def went_to_cell(self, cell: str) -> None:
        """Count that it is asked of an engine that another cell lends."""
        self._telemetry.fleet.cell_attempts.labels(self._model, cell).inc()

    def moved(self, outcome: MoveOutcome) -> None:
        """Count what came of asking its engine, at which it waited, to give it back."""
        self._telemetry.fleet.moves.labels(self._model, outcome).inc()

    def hedged(self, outcome: HedgeOutcome) -> None:
        """Count that its first token was late, and what came of asking another replica."""
        self._telemetry.fleet.hedges.labels(self._model, outcome).inc()


def is_told_at_once(event: ReplicaEvent) -> bool:
    """Tell whether an event's tokens came some time before it: an upstream's whole body, or a count
    at the end of what was not seen coming."""
    if event.finished and not event.items:
        return True
    return any(isinstance(item, RawBody) for item in event.items)
