"""What the structs of a surface cannot say by themselves: which fields are ignored, by what they
are specified to be, and what else is to be known of one.

Above: `field_table`, which writes it down for people. Below: the structs. Paths are those of
refusals, without indices: `messages[].content[].type`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.wire.openai import NOT_YET, ChatCompletionRequest
from gateway.wire.openai_forward import BILLED_OTHERWISE


class Surface(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    body: type[msgspec.Struct]
    ignored: Mapping[str, str]
    """Path to why."""
    notes: Mapping[str, str]
    """Path to what is to be known."""
    refused_values: Mapping[str, frozenset[str]]
    """Of honoured fields: values that a vendor knows and that are refused by name."""


CHAT = Surface(
    title="POST /v1/chat/completions, of our engine's models",
    body=ChatCompletionRequest,
    ignored={
        "user": "a label for abuse checks",
        "safety_identifier": "a label for abuse checks",
        "prompt_cache_key": "a hint where to find a cached prefix; every gateway finds it anyway",
        "metadata": "kept with stored completions, and none is stored",
        "response_format.json_schema.name": "a name for the schema",
        "response_format.json_schema.description": "a name for the schema, in more words",
        "response_format.json_schema.strict": "the answer is kept to the schema in any case",
        "messages[].parsed": "what a client's library read in the content",
        "messages[].tool_calls[].index": "a stream's",
        "messages[].tool_calls[].function.parsed_arguments": "what a client's library read in them",
        "messages[].annotations": "of an earlier answer, which has none",
    },
    notes={
        "store": "true is refused: nothing is stored",
        "stream_options.include_obfuscation": "true is refused: chunks are not padded",
        "max_completion_tokens": "both may be given if they are equal",
        "reasoning_effort": "as the model's chat template takes it; one that knows on and off alone"
        " thinks for all but `none`; one that knows neither takes what it does anyway",
        "response_format.json_schema.schema": "the answer is of it, by a grammar; what cannot be"
        " compiled is refused",
        "tools[].cache_control": "up to the end of its tool, and of the system's message where a"
        " template puts tools into that; as in a part of content",
        "messages[].cache_control": "up to the end of its message; as in a part of content",
        "messages[].content[].cache_control": "the prompt up to the end of its part is kept for"
        " `ttl` (`5m`, `1h`), from 1,024 tokens on; at most 4, those of 1h first; of a model with"
        " another cache contract than `explicit` it means nothing",
        "seed": "the same seed draws the same, whatever else runs",
        "min_tokens": "not beside `stop`, nor beside a form of the answer",
        "ignore_eos": "not beside a form of the answer",
        "tools": "of a model whose chat template knows tools; a call is told apart from the text by"
        " the form of the model's family",
        "tools[].function.strict": "true: its calls are valid by `parameters`, by a grammar; a call"
        " that is forced is so in any case",
        "tool_choice": "a function that is named, or allowed and required, is called, by a grammar",
        "parallel_tool_calls": "false: the answer is over with its first call",
        "messages[].reasoning_content": "not OpenAI's: as it stood in an answer",
        "service_tier": "`fast` is `priority`; what was served stands in the answer",
        "guided_json": "vLLM's older name of `structured_outputs.json`",
        "guided_regex": "vLLM's older name of `structured_outputs.regex`",
        "guided_choice": "vLLM's older name of `structured_outputs.choice`",
        "guided_grammar": "vLLM's older name of `structured_outputs.grammar`",
        "structured_outputs": "vLLM's; exactly one of its fields, and not beside another form",
        "structured_outputs.grammar": "EBNF in llguidance's dialect of Lark",
        "structured_outputs.regex": "of the whole answer",
        "moderation": "no answer is moderated here",
        "prediction": "no answer is predicted here",
        "functions": "`tools` took their place",
        "function_call": "`tool_choice` took its place",
    },
    refused_values=NOT_YET,
)
SURFACES = (CHAT,)
FORWARDED = BILLED_OTHERWISE
"""Of an upstream's model: refused, and why."""
