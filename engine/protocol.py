"""The closed list of what crosses the engine's socket.

Frames are a 4-byte big-endian length followed by one msgpack map (msgspec tagged unions, tag field
`t`). A gateway sends `ClientMessage`s, the engine answers with `ServerMessage`s. Token ids cross
this socket, text does not. Counts are tokens, durations are seconds.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

PROTOCOL_VERSION = 14
MAX_FRAME_BYTES = 64 * 1024 * 1024
HEARTBEAT_INTERVAL_S = 1.0
"""How often a step loop that turns, idle or not, is heard of at least."""

MAX_CACHE_KEYS = 65_536
"""Keys of spans in one message at most: half a MiB."""
MAX_NAMED = 256
"""Requests that a line of the log names at most."""

Lane = Literal["interactive", "agentic", "batch"]
"""The lanes in which requests are served, from the highest to the lowest (`engine.fairness`)."""

EngineRole = Literal["both", "prefill", "decode"]
"""The part of requests that an engine does: all; prompts and first tokens, for others that go on;
or what is behind them."""

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: an EOS or stop token id was generated, or the embedding is there; length: max_tokens or the
context is used up; abort: the client asked; error: the engine could not go on. Text stop strings
are found by the gateway, which aborts and reports `stop` itself."""


MAX_GRAMMAR_BYTES = 128 * 1024
"""The bound on a grammar's text in UTF-8."""
MAX_PROMPT_SCORES = 2**18
"""The bound on log-probabilities told of one prompt: each of its tokens has its own and
`SamplingParams.prompt_logprobs` others."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grammar that an output must match, byte by byte. An output that nothing can follow ends
    with "stop"; while one is not complete, EOS and stop tokens are as forbidden as others that do
    not fit.
    """

    kind: Literal["json_schema", "regex", "lark", "ebnf", "choice"]
    text: str
    """The schema as JSON; the regular expression, of the whole output; the grammar in the dialect
    of Lark that llguidance reads, or as GBNF; or a JSON array of strings, one of which is to be
    said."""
    after_token_id: int | None = None
    """The end of the reasoning of a model that reasons first: output up to this token is
    unconstrained. None if the prompt closes the reasoning itself."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to turn logits into the next token. The order of application is that of vLLM:
    logit_bias, min_tokens, penalties, grammar, temperature, min_p, top_k, top_p."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Multiplicative, over prompt and output (CTRL, arXiv:1909.05858)."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    """Additive, over output tokens only (OpenAI)."""
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, beside the model's own EOS ids."""
    ignore_eos: bool = False
    seed: int | None = None
    """Same seed, same draws, whatever else is in the batch. None: `EngineRequest.drawn_seed`."""
    logprobs: int | None = None
    """None: off. k >= 0: the chosen token and the k most likely, from the raw logits'
    log-softmax."""
    logprob_token_ids: tuple[int, ...] = ()
    """Beside `logprobs`: these tokens stand in the place of the most likely ones, in this order."""
    prompt_logprobs: int | None = None
    """The same of the tokens of the prompt, each but the first, with the most likely ones."""
    grammar: Grammar | None = None

    @property
    def penalises(self) -> bool:
        """Whether what is sampled depends on all that was said before."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


NOTHING_SAMPLED = SamplingParams(max_tokens=0)


class Breakpoint(msgspec.Struct, frozen=True, array_like=True):
    """A place in a prompt: the KV of all before it is to be kept until nobody has used it for
    `ttl_s`. Whole blocks are."""

    num_tokens: int
    ttl_s: float


class KVSource(msgspec.Struct, frozen=True, kw_only=True):
    """Another engine of the model, which probably has the KV of a prompt's beginning."""

    engine_id: str
    address: str
    """The address where it lets others read: its `PeerStatus.address`."""
    num_tokens: int
    """The tokens that it has, or some more."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation of `n` choices over each of its prompts, or their embeddings. `request_id` is
    unique per attempt (the billing event id)."""

    request_id: str
    prompt_token_ids: list[int]
    log_id: str = ""
    """The id that its client knows, which the log names; several attempts may share it."""
    more_prompts: tuple[list[int], ...] = ()
    """Behind the first. Choice i of prompt p has the index p * n + i and, where a seed is named,
    says what it would say alone."""
    sampling: SamplingParams = NOTHING_SAMPLED
    """Every generation names its own; an embedding samples nothing."""
    n: int = 1
    """Choices of each prompt."""
    drawn_seed: int | None = None
    """The seed where `sampling` names none, so that another engine would draw the same. None: the
    engine draws one."""
    said: tuple[list[int], ...] = ()
    """By choice, the output that another engine generated, with nothing that ended it. The choice
    goes on behind it as if it had been generated here. Empty: all choices begin."""
    ended: tuple[int, ...] = ()
    """The choices that ended elsewhere, by index, in order; nothing is computed for them."""
    embed: bool = False
    """The answer is one output with `embedding` for each prompt, and no token. Of one choice."""
    dimensions: int | None = None
    """The length of an embedding: its first numbers (Matryoshka, arXiv:2205.13147), scaled to unit
    length after the cut if the model's are. None: all `ReplicaStatus.embedding_size`."""
    cache_salt: str = ""
    """Prefix-cache namespace; one per org, so that timing tells no tenant what another one
    asked."""
    adapter: str = ""
    """One of `EngineConfig.adapters`; empty: the model as it is."""
    lane: Lane = "interactive"
    tenant: str = ""
    """The tenant that fair sharing counts for, in each lane. It isolates nothing: `cache_salt`
    does."""
    weight: float = 1.0
    """The tenant's weight in its lane: twice the weight, twice the service when all wait."""
    priority: int = 0
    """Orders the requests of a tenant that wait in one lane: the smallest goes first, of two with
    the same the one that came first."""
    deadline_s: float | None = None
    """Seconds after its arrival here. A request not begun by then gets a `Rejection`
    (`deadline_exceeded`)."""
    fetch: KVSource | None = None
    """An engine that may be asked for the KV of the first prompt's beginning, if it is not here and
    reading it is quicker than computing it. What does not come in time is computed."""
    breakpoints: tuple[Breakpoint, ...] = ()
    """From the first on; `Usage` says what came of them. A request without any has no part in what
    others had kept. Of a single prompt."""

    @property
    def prompts(self) -> tuple[list[int], ...]:
        return (self.prompt_token_ids, *self.more_prompts)

    @property
    def cache_namespace(self) -> str:
        """Return what KV is shared within: requests of one salt and one adapter."""
        return cache_namespace(self.cache_salt, self.adapter)


def cache_namespace(cache_salt: str, adapter: str) -> str:
    """Return the salt of all digests of a request with this salt and this adapter. With an adapter
    it is the BLAKE2b-256 (RFC 7693) of salt, NUL and adapter in hex, personalised "adapter"."""
    if not adapter:
        return cache_salt
    text = f"{cache_salt}\0{adapter}".encode()
    return hashlib.blake2b(text, digest_size=32, person=b"adapter").hexdigest()


class SeenPrefix(msgspec.Struct, frozen=True, array_like=True):
    """How far a prompt was what one of the same salt had been, cached or not: why the cache missed.

    "repeated": all of it. "continued": the earlier prompt ended there, as far as is remembered.
    "broken": it went on otherwise, with another token at position `tokens`.
    """

    tokens: int
    outcome: Literal["repeated", "continued", "broken"]
    evicted_tokens: int = 0
    """The tokens of these, in whole blocks, that the cache did not have: evicted, or being
    computed."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Cumulative over the whole request (all prompts, all choices); monotone from output to output.

    `cached_tokens` (<= prompt_tokens) is frozen when the request is first scheduled; a recompute
    after preemption changes nothing here. A request that was never scheduled has prefilled=False:
    nothing to bill.
    """

    prompt_tokens: int
    """From `prefilled` on: of the prompts that are, with their `cached_tokens`."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    """Without those of `EngineRequest.said`."""
    resumed_tokens: int = 0
    """Tokens of `EngineRequest.said` that were computed again: counted with the first output of
    their choice, and in no other count."""
    kept_tokens: int = 0
    """The cached tokens, from the first on, that a lease covered, up to the last breakpoint. Frozen
    like them, as the next."""
    written_tokens: tuple[int, ...] = ()
    """By breakpoint: what comes between the one before, or what was kept, and it, in whole blocks;
    0 where the engine does not keep it. From `prefilled` on a lease is on it."""
    tier_tokens: int = 0
    """The cached tokens that a tier of the KV cache brought (`engine.tiers`)."""
    fetched_tokens: int = 0
    """The cached tokens that were read from the engine that the request named."""
    seen: SeenPrefix | None = None
    """The remembered prefix of the first prompt, frozen when it is first scheduled. None: no
    remembered prefix begins so, or its prefix is not looked up."""
    prefilled: bool = False
    """True from the step on that finished the first prefill of the prompt, or of one of several."""
    queue_time_s: float = 0.0
    prefill_time_s: float = 0.0
    first_token_time_s: float = 0.0
    """The time from arrival in the engine to the first generated token, or to the embedding."""

    @property
    def input_tokens(self) -> int:
        """Return the tokens that were computed or found in the cache before any was generated."""
        return self.prompt_tokens + self.resumed_tokens


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token and the `SamplingParams.logprobs` most likely ones, most likely first; or
    the ones that were named."""

    chosen: TokenLogprob
    top: list[TokenLogprob]
    rank: int | None = None
    """The rank of the chosen one among all tokens, from 1; None: not a prompt's."""


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens that one step added to choice `index` of a request."""

    request_id: str
    usage: Usage
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """One entry per id in `token_ids` when asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """With the first output of a prompt's first choice, when asked for: one entry per token of the
    prompt but the first, which is the chosen one of its entry."""
    finish_reason: FinishReason | None = None
    """Set once per choice. An abort or a failed step ends each choice that was still open with an
    output of its own; `usage` is the request's final one on all of these."""
    finished: bool = False
    """True on exactly one output per request, the last one."""
    error_code: str | None = None
    embedding: bytes | None = None
    """float32, little-endian, of the only output of each prompt of a request that asked to `embed`
    and went well; its usage has no generated tokens."""


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Learnt seconds of what steps are made of, each at least 0; all are 0 before any was learnt.

    A decode reads all its context once. A token of a prompt is paired with each one before it; what
    a pair takes there is a constant of its own, for a chunk reads its context once for all its
    tokens: that it does so is the last term, of which a processor, slow at pairs, has none.
    """

    step_s: float = 0.0
    decode_s: float = 0.0
    prompt_token_s: float = 0.0
    context_token_s: float = 0.0
    """For a token before the one that is decoded."""
    pair_s: float = 0.0
    chunk_context_token_s: float = 0.0
    """For a token before a chunk of a prompt."""


class LaneStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One lane of an engine, for predicting when a request's first token comes."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    """The prompt tokens, recomputed ones included, still to compute: of all waiting requests, but
    for those that were in the prefix cache when they came, and of those under way."""
    waiting_pairs: float = 0.0
    """The pairs that each of these makes with all before it (`StepCosts`)."""
    prefill_tokens_per_s: float = 0.0
    """The recent speed at which the lane's prompts were computed while some of them had to wait; 0:
    unknown, none has waited yet."""
    num_queued: int = 0
    """Requests of which nothing ever ran."""
    max_queued: int = 0
    """The bound of the lane's queue: with so many queued, one more request gets a `Rejection`."""


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an engine's KV blocks are read by others of its model (`engine.transfer`)."""

    address: str
    """The address where it lets them."""
    layout: bytes
    """The same of two engines whose blocks are: no other ones are read."""
    read_s: float
    """Learnt seconds until the first tokens that it reads of another are there."""
    read_token_s: float
    """And for each token."""
    host: str = ""
    """The machine whose processes alone reach the address; empty: others do as well."""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="status"):
    """Sent on connection and then at most every `EngineConfig.status_interval_s`, but at least
    once in `HEARTBEAT_INTERVAL_S` while the step loop turns: it comes from that loop's thread, so
    that an engine which does not say it for `step_timeout_s` is hung, whatever else it answers."""

    model: str
    protocol_version: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    num_free_blocks: int
    """Free or evictable: blocks that no running request holds."""
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """0..1, blocks held by requests over all blocks."""
    num_leased_blocks: int
    """Kept for a time, held by a request or not."""
    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int
    num_preemptions: int
    num_steps: int
    generated_tokens: int
    num_draft_tokens: int
    """Guesses that were verified."""
    num_accepted_tokens: int
    """Those that were right. Counters since the engine's start, as those above."""
    engine_id: str
    """A fresh UUID per engine process: a change means every request of before is gone."""
    step_timeout_s: float
    """Longer than any step: `EngineConfig.step_timeout_s`, or what was derived in its place."""
    embedding_size: int
    """Numbers of an embedding, and the most `EngineRequest.dimensions`."""
    generates: bool
    """False: a checkpoint without a language model's head, which only embeds."""
    lanes: dict[Lane, LaneStatus] = {}
    """All three."""
    num_cached_blocks: int = 0
    """Those whose content a later prompt may find, held by a request or not."""
    costs: StepCosts = StepCosts()
    max_step_tokens: int = 0
    """The budget of one step, prompts and decodes together."""
    context_tokens: int = 0
    """The tokens of all sequences that decode."""
    num_tier_blocks: int = 0
    max_tier_blocks: int = 0
    """Those on disk (`engine.tiers`) and their bound; 0: there is no disk tier."""
    num_host_blocks: int = 0
    max_host_blocks: int = 0
    """Those in host memory (`engine.tiers.host`) and their bound; 0: there is no host tier."""
    host_hit_tokens: int = 0
    """Prompt tokens that came from there, since the engine's start."""
    tier_hit_tokens: int = 0
    """The part of `prefix_cache_hit_tokens` that was read from disk."""
    silent_s: float = 0.0
    """On connection: how long ago the step loop said this."""
    peer: PeerStatus | None = None
    """None: it reads no other engine's KV blocks, and none reads its own."""
    num_held_blocks: int = 0
    """Those kept for other engines that read them."""
    num_expired_holds: int = 0
    """The holds of other engines that these did not release."""
    fetched_tokens: int = 0
    """The part of `prefix_cache_hit_tokens` that was read from other engines."""
    fetched_bytes: int = 0
    num_stale_fetches: int = 0
    """Reads that found a block given up amid them: nothing of it was used."""
    num_failed_fetches: int = 0
    """Reads of an engine that was away, refused or sent nonsense. Counters since the engine's
    start, as those above."""
    sliding_window: int | None = None
    """The tokens that each position attends to; None: all before it. With one, a cached block does
    not mean that those before it are cached."""
    identities: dict[str, str] = {}
    """The name of what it answers with (`engine.weights.identity`), by adapter and, under "", of
    the model as it is: of two engines with the same name each can go on with what the other
    began."""

    @property
    def largest_step_s(self) -> float:
        """Return what its largest step takes by what it has learnt: one full of the last tokens of
        a prompt as long as any. 0: it has learnt nothing yet."""
        costs, tokens = self.costs, self.max_step_tokens
        pairs_s = costs.pair_s * tokens + costs.chunk_context_token_s
        return costs.step_s + costs.prompt_token_s * tokens + pairs_s * self.max_model_len


class OrphanedUsage(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="orphan"):
    """Final usage of a request whose gateway vanished before the request's end, or after it without
    an ack. Repeated to every gateway that connects until one answers `OrphanAck`; the engine keeps
    at most `EngineConfig.max_orphans` of them."""

    request_id: str
    usage: Usage


# gateway -> engine


class Submit(msgspec.Struct, frozen=True, tag_field="t", tag="submit"):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag_field="t", tag="abort"):
    """Answered by a last EngineOutput for each open choice, with the final Usage; unknown or
    finished ids are ignored."""

    request_id: str


class TakeBack(msgspec.Struct, frozen=True, tag_field="t", tag="take_back"):
    """The end of a request none of whose choices ever ran: answered by a `Rejection`. One that has
    begun goes on, and nothing answers this; unknown and finished ids are ignored."""

    request_id: str


class Pause(msgspec.Struct, frozen=True, tag_field="t", tag="pause"):
    """From the next step on the request takes none. It keeps its blocks until somebody needs them;
    what it lost it computes again when it goes on. A step under way may still bring an output. One
    that is paused already, unknown or finished is left as it is."""

    request_id: str


class Resume(msgspec.Struct, frozen=True, tag_field="t", tag="resume"):
    """The end of a pause; one that is not paused, unknown or finished is left as it is."""

    request_id: str


class OrphanAck(msgspec.Struct, frozen=True, tag_field="t", tag="orphan_ack"):
    """The final usage of these is on this gateway's disk: orphans, and its own finished requests,
    which become orphans when the connection is lost before their ack. A request that was never
    prefilled or was `Rejection` needs none; unknown and unfinished ids are ignored."""

    request_ids: list[str]


class LeaseAck(msgspec.Struct, frozen=True, tag_field="t", tag="lease_ack"):
    """The sender confirms that what these leases' ends mean is on its disk; unknown ids are
    ignored.
    """

    lease_ids: list[str]


class WatchCache(msgspec.Struct, frozen=True, tag_field="t", tag="watch_cache"):
    """The sender is to hear from now on what is in the prefix cache, until it leaves. Answered by
    `CacheSnapshot`s, and by further ones whenever anybody says this again."""


# engine -> gateway


class Outputs(msgspec.Struct, frozen=True, tag_field="t", tag="outputs"):
    """All outputs of one step for this connection."""

    outputs: list[EngineOutput]


class LeaseGranted(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="lease"):
    """A notice that what a breakpoint asked for has been computed and is kept from now on. Told to
    the gateway that asked, before the output that says `prefilled`.
    """

    lease_id: str
    """<request_id>:<index of the breakpoint>"""
    request_id: str
    num_tokens: int
    """The tokens that the lease was written for: `Usage.written_tokens`."""
    ttl_s: float


class LeaseEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="lease_ended"):
    """It was kept for `kept_s`, which is less than `ttl_s` where the engine needed the room, and
    more where it was used. Told to all gateways; of one that was broken off, to each that connects
    too, until one answers `LeaseAck`, and `EngineConfig.max_orphans` of them at most are kept. An
    engine's end ends all of its leases, and nothing says so but another `engine_id`."""

    lease_id: str
    num_tokens: int
    ttl_s: float
    kept_s: float

    @property
    def is_broken(self) -> bool:
        return self.kept_s < self.ttl_s


class CacheSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="cache"):
    """The spans (`engine.prefix_digests`) that are in the prefix cache after change number `seq`,
    or a part of them. All parts come in a row, and what was told before them counts no more. The
    keys are of salted digests: they tell nothing of what a tenant wrote."""

    seq: int
    keys: bytes
    """Their keys of 8 bytes each, `MAX_CACHE_KEYS` at most."""
    last: bool
    """No part follows."""


class CacheChanged(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="cache_changed"):
    """The spans that the prefix cache gained and lost since change number `seq - 1`; all who watch
    are told. Whoever finds a number left out sends `WatchCache` once more."""

    seq: int
    removed: bytes = b""
    """Keys as in a snapshot, and applied before `stored`."""
    stored: bytes = b""
    since: float
    """The time of the first of them, in Unix seconds of the engine's clock."""


class Rejection(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="rejected"):
    """The request never ran; `code` is one of `engine.errors`."""

    request_id: str
    code: str
    message: str
    param: str | None = None


ClientMessage = Submit | Abort | TakeBack | Pause | Resume | OrphanAck | LeaseAck | WatchCache
ServerMessage = (
    ReplicaStatus
    | Outputs
    | Rejection
    | OrphanedUsage
    | LeaseGranted
    | LeaseEnded
    | CacheSnapshot
    | CacheChanged
)
