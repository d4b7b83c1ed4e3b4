"""Defines `GenerateRequest`, which every wire format becomes before it meets the fleet.

Knows no HTTP and no vendor.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from billing.cache_contracts import Ttl
from billing.events import Tier
from engine.protocol import Grammar
from gateway.request_errors import BadField

ModelKind = Literal["engine", "upstream"]
"""Our own engine, which is strict; or an OpenAI-compatible upstream, to which unknown fields are
forwarded.
"""
Dialect = Literal["engine", "vllm", "upstream"]
"""The way a body is read: for our own engine, for it as vLLM reads what OpenAI refuses, or for an
upstream.
"""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ServiceTier = Literal["auto", "default", "priority", "fast", "flex"]
"""As a client names what it wants. `fast` is another name of `priority`."""
MaxTokensField = Literal["max_tokens", "max_completion_tokens"]
"""The same, of old and of late: some upstreams know one of them alone."""


class OutputForm(msgspec.Struct, frozen=True):
    """The form that an answer must have."""

    grammar: Grammar
    param: str
    """The field that the client asked for it in."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    shown: dict[str, Any]
    """Template-ready, in OpenAI's form."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments, an object; None: it takes none."""
    strict: bool = False
    """Arguments are kept to it even where the model need not call."""
    param: str = "tools"
    """The field that holds the schema, or the grammar of its text."""
    text_form: Grammar | None = None
    """The grammar of its text, `input`, of a tool that takes nothing else; None: any."""


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    tools: tuple[Tool, ...]
    """Shown to the model, which may call each of them."""
    forced: tuple[str, ...] = ()
    """Names, one of which must be called; none: as the model likes."""
    parallel: bool = True
    """True if one answer may hold more than one call."""
    num_chars: int = 0
    """The approximate size of the prompt's visible text."""

    @property
    def is_kept_to(self) -> bool:
        """By a grammar."""
        return bool(self.forced) or any(tool.strict for tool in self.tools)


class PromptPlace(msgspec.Struct, frozen=True):
    """A place in a conversation: behind so many of its messages, or, where it is none, of its
    tools."""

    num_messages: int = 0
    num_chars: int | None = None
    """The place within the last message's content; None: after the whole message."""
    num_tools: int = 0
    num_calls: int | None = None
    """How many of the last message's calls, which come after its content, are included; None:
    all."""


class CacheBreakpoint(msgspec.Struct, frozen=True):
    """A mark that what is before `end` is to be cached."""

    end: PromptPlace
    ttl: Ttl
    since: PromptPlace | None = None
    """Count an earlier cache write only if it reaches at least this place. None: count any."""


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The request for our own engine to write, whatever the prompt is: every field is understood
    and will be honoured."""

    max_tokens: int | None = None
    """Per choice. None: what is left of the context."""
    fits_window: bool = False
    """`max_tokens` may be more than is left of the context: then it is that."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    """Say the log-probabilities of these, in the place of the likeliest."""
    prompt_logprobs: int | None = None
    """Say those of the prompt's tokens with so many of the likeliest; of a whole answer."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    """False: special tokens are text of the answer, but for the one that ends it."""
    return_token_ids: bool | None = None
    """None: not said, so the answer has no place for them."""
    return_tokens_as_token_ids: bool = False
    """Name the tokens of log-probabilities `token_id:5`."""
    form: OutputForm | None = None
    """None: whatever the model says."""
    priority: int = 0
    """The requests of one organization that wait in a lane run in this order, the smallest first.
    """


class ChatPrompt(OutputOptions, frozen=True, kw_only=True):
    """A conversation."""

    messages: list[dict[str, Any]]
    """Template-ready: role and content (text parts already joined), name, calls and what they
    answer where given."""
    num_other_chars: int = 0
    """The approximate size of the tool calls in the messages."""
    message_paths: tuple[str, ...] = ()
    """The path of the client's message that each message came from. Empty: one from each, in
    order."""
    continues: bool = False
    """The last message is the beginning of the answer."""
    add_generation_prompt: bool = True
    """False: the model says itself whose turn it is."""
    echo: bool = False
    """Say the beginning of the answer again, where the last message is that."""
    template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, by its own names."""
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    """At most `MAX_BREAKPOINTS`, in order; for a model whose cache contract is explicit."""
    reasoning_effort: ReasoningEffort | None = None
    """None: as the model does."""
    effort_param: str = "reasoning_effort"
    """The field that the client asked for it in."""
    effort_is_hint: bool = False
    """A model that cannot be told does as it always does, and nothing is refused."""
    tools: ToolUse | None = None
    """None: the model is shown none."""

    def path_of(self, index: int) -> str:
        """Return the path of a message in the request, for a refusal."""
        return self.message_paths[index] if self.message_paths else f"messages[{index}]"


PART_BYTES = 64 * 1024
"""Read at once: a third of a millisecond."""
MAX_IDS = 2**32
"""Token ids below this fit the array; without a vocabulary that is all that is asked of them."""
MAX_SHOWN_CHARS = 40
KINDS = {b'"': "a string", b"t": "a boolean", b"f": "a boolean", b"n": "null", b"[": "an array"}


class WrittenIds(msgspec.Struct, frozen=True):
    """An array of JSON that should hold token ids, which may fill a context of a million tokens:
    counted at once, so that what no context takes is refused unread, and read where that holds up
    nobody else, in parts, into four bytes each (a list of them takes 36). `text`: what is between
    its brackets, known to be JSON; `param`: the field that it is."""

    text: bytes
    param: str

    def __len__(self) -> int:
        return self.text.count(b",") + 1 if self.text else 0

    def read(self, vocab_size: int = MAX_IDS) -> array[int]:
        """Raises BadField, which names the first place that has no token id of the vocabulary."""
        found: array[int] = array("I")
        start, end, decoder = 0, len(self.text), decoder_of(vocab_size)
        while start < end:
            stop = self._end_of_part(start, end)
            part = self.text[start:stop]
            try:
                found.extend(decoder.decode(b"[%b]" % part))
            except (msgspec.DecodeError, RecursionError):
                raise self._fault(part, len(found), vocab_size) from None
            start = stop + 1
        return found

    def check(self) -> None:
        """Read the ids, keeping none. Raises BadField."""
        self.read()

    def beginning(self, num_ids: int) -> str:
        """Return the text of the first ids, such as `1, 2`, unread."""
        return b",".join(self.text.split(b",", num_ids)[:num_ids]).decode()

    def _end_of_part(self, start: int, end: int) -> int:
        if end - start <= PART_BYTES:
            return end
        stop = self.text.rfind(b",", start, start + PART_BYTES)
        return stop if stop > start else end  # one element so long is no id: the part is refused

    def _fault(self, part: bytes, num_before: int, vocab_size: int) -> BadField:
        """Everything before the fault is numbers, and so their commas are all there are."""
        decoder = decoder_of(vocab_size)
        for index, written in enumerate(part.split(b",")):
            try:
                decoder.decode(b"[%b]" % written)
            except (msgspec.DecodeError, RecursionError):
                return to_bad_id(written.strip(), f"{self.param}[{num_before + index}]", vocab_size)
        raise AssertionError("each of the ids is good, and all of them are not")


@lru_cache(64)
def decoder_of(vocab_size: int) -> msgspec.json.Decoder[list[int]]:
    token_id = Annotated[int, Meta(ge=0, lt=min(vocab_size, MAX_IDS))]
    return msgspec.json.Decoder(list[token_id])


def to_bad_id(written: bytes, param: str, vocab_size: int) -> BadField:
    kind = KINDS.get(written[:1], "an object")
    if written[:1] in b"-0123456789":
        shown = written[:MAX_SHOWN_CHARS].decode()
        if written.lstrip(b"-").isdigit():
            return out_of_vocabulary(shown, param, vocab_size)
        kind = "a decimal number"
    return BadField(
        f"Invalid type for '{param}': expected an integer, but got {kind} instead.",
        param=param,
        detail=f"This must be an integer, and is {kind}.",
    )


def out_of_vocabulary(token_id: int | str, param: str, vocab_size: int) -> BadField:
    has = f": this model has {vocab_size}" if vocab_size < MAX_IDS else ""
    return BadField(
        f"Invalid value for '{param}': token id {token_id} is out of vocabulary{has}.",
        param=param,
        detail="This is no token id of the model.",
    )


PlainPrompt: TypeAlias = str | WrittenIds
"""Text or token ids."""


class CompletionPrompt(OutputOptions, frozen=True, kw_only=True):
    """Texts to go on with, each by itself; `logprobs` are of the prompt, too, where that is said
    again."""

    prompts: tuple[PlainPrompt, ...]
    """Choice i of prompt p has the index p * n + i."""
    echo: bool = False
    """Say the prompt again before what follows it."""


class EmbeddingPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to be embedded, each by itself."""

    prompts: tuple[PlainPrompt, ...]
    dimensions: int | None = None
    """None: as many as the model's have."""
    as_base64: bool = False


class PlainForward(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the gateway needs of a forwarded body that is no chat's."""

    path: Literal["completions", "embeddings"]
    """Behind the upstream's base URL."""
    prompts: tuple[PlainPrompt, ...]
    max_tokens: int = 0
    """Per choice, as it is told."""


class ToTokenize(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that is only to be tokenized; exactly one of `text` and `chat`."""

    text: str | None = None
    chat: ChatPrompt | None = None
    add_special_tokens: bool
    """Add the special tokens that the tokenizer puts around a text by default."""
    with_texts: bool = False
    """Return the text of each token, too."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation as the gateway sees it. Exactly one of `prompt`, `completion`, `embedding` and
    `forward` is set."""

    model: str
    stream: bool
    include_usage: bool
    """The client asked for the usage chunk of a stream."""
    continuous_usage: bool = False
    """The client also asked for the usage so far in every chunk."""
    n: int = 1
    service_tier: ServiceTier | None = None
    cache_key: str | None = None
    """The client's hint (`prompt_cache_key`) that requests with it share the beginning of their
    prompts."""
    has_tools: bool = False
    """True if the request offers tools to the model."""
    calls_function: bool = False
    """A call is told in the older form of chat completions, `function_call`."""
    speaks_vllm: bool = False
    """The answer is told as vLLM tells it where that differs from OpenAI's."""
    prompt: ChatPrompt | None = None
    """For our engine, as the next two."""
    completion: CompletionPrompt | None = None
    embedding: EmbeddingPrompt | None = None
    forward: dict[str, Any] | None = None
    """For an OpenAI-compatible upstream: the client's body as decoded, unknown fields and all."""
    plain: PlainForward | None = None
    """The forwarded body of a completion or an embedding; None: a chat completion. `n` counts all
    prompts together."""
    is_capped: bool = False
    """A hard cap on spending binds it: no more may be read or written than was held for."""
    max_output_tokens: int | None = None
    """Per choice, of one for an upstream that did not say; the replica knows what it is called
    there."""


class AnswerHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that an answer states of itself before its first content."""

    id: str
    created: int
    """Unix seconds."""
    service_tier: Tier = "default"
    """The tier that the request is served and billed as."""


def under_a_cap(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(request, is_capped=True)


def bounded_to(request: GenerateRequest, max_output_tokens: int) -> GenerateRequest:
    """Cap the output of a request that names no maximum, over all choices."""
    per_choice = max_output_tokens // request.n
    if request.prompt is not None:
        prompt = msgspec.structs.replace(request.prompt, max_tokens=per_choice)
        return msgspec.structs.replace(request, prompt=prompt)
    return msgspec.structs.replace(request, max_output_tokens=per_choice)
