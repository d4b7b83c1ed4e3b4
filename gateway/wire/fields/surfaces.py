"""Lists what the structs of a surface cannot say: which fields are ignored by their specification,
and notes on single fields.

Paths are those of refusals, without indices: `messages[].content[].type`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from gateway.wire.anthropic import messages as anthropic
from gateway.wire.anthropic.messages import CountTokensRequest, MessagesRequest
from gateway.wire.fields.batch_surfaces import BATCH_SURFACES
from gateway.wire.fields.kept_surfaces import KEPT_SURFACES, MODELS
from gateway.wire.fields.surface import SurfaceFields
from gateway.wire.openai.chat import ChatCompletionRequest
from gateway.wire.openai.completions import CompletionRequest
from gateway.wire.openai.embeddings import EmbeddingRequest
from gateway.wire.openai.forward import BILLED_OTHERWISE
from gateway.wire.openai.tokenizing import DetokenizeRequest, TokenizeRequest
from gateway.wire.openai_responses import request as responses
from gateway.wire.openai_responses.request import ResponseRequest
from gateway.wire.shared.refusals import NOT_YET

T = TypeVar("T")


def counted(of_messages: Mapping[str, T]) -> dict[str, T]:
    """Return the notes, those of counted fields included."""
    names = CountTokensRequest.__struct_fields__
    return {path: said for path, said in of_messages.items() if re.split(r"\W", path)[0] in names}


CHAT = SurfaceFields(
    title="POST /v1/chat/completions, of our engine's models",
    body=ChatCompletionRequest,
    ignored={
        "user": "a label for abuse checks",
        "safety_identifier": "a label for abuse checks",
        "metadata": "kept with stored completions, and none is stored",
        "response_format.json_schema.name": "a name for the schema",
        "response_format.json_schema.description": "a name for the schema, in more words",
        "response_format.json_schema.strict": "the answer is kept to the schema in any case",
        "messages[].parsed": "what a client's library read in the content",
        "messages[].provider_specific_fields": "what litellm read beside the message's own fields",
        "messages[].tool_calls[].index": "a stream's",
        "messages[].tool_calls[].function.parsed_arguments": "what a client's library read in them",
        "messages[].annotations": "of an earlier answer, which has none",
    },
    notes={
        "prompt_cache_key": "where several serve a model, the requests of an organization that name"
        " the same go to the same, as long as that is no busier than others; the cache report names"
        " a prefix by it",
        "store": "true is refused: nothing is stored",
        "stream_options.include_obfuscation": "true is refused: chunks are not padded",
        "max_completion_tokens": "both may be given if they are equal",
        "reasoning_effort": "as the model's chat template takes it; one that knows on and off alone"
        " thinks for all but `none`; of one that knows neither, one that never thinks (penny) takes"
        " `none` and one that always thinks all others: what it would not do is refused",
        "reasoning": "OpenRouter's",
        "reasoning.effort": "as `reasoning_effort`; both may be given if they are equal",
        "verbosity": "what every answer has; others are refused",
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
        "messages[].tool_call_id": "a `tool` message stands behind the one that called; each call"
        " has one",
        "tools[].function.name": "of letters, digits, `_` and `-`",
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
        "structured_outputs.grammar": "EBNF: GBNF with a rule `root`, as xgrammar and llama.cpp"
        " read it (up to 32 KiB, 500 rules, 64 brackets deep), or llguidance's dialect of Lark",
        "structured_outputs.regex": "of the whole answer",
        "moderation": "no answer is moderated here",
        "prediction": "no answer is predicted here",
        "functions": "`tools` took their place",
        "function_call": "`tool_choice` took its place",
    },
    refused_values=NOT_YET,
)
MESSAGES = SurfaceFields(
    title="POST /v1/messages",
    body=MessagesRequest,
    ignored={
        "metadata.user_id": "a label for abuse checks",
        "speed": "every answer comes as fast as it can",
        "tools[].eager_input_streaming": "how finely a call is streamed; what it adds up to is the"
        " same",
        "messages[].content[].signature": "opaque; what a client says that its model thought is"
        " taken as it is",
        "messages[].content[].data": "sealed, and readable where it was made alone",
        "messages[].content[].citations": "of an earlier answer, which has none",
    },
    notes={
        "max_tokens": "more than is left of the context is taken as that, and the answer says"
        " `model_context_window_exceeded` where it ends there; 0 is refused: nothing is kept"
        " without an answer",
        "messages": "turns of one role in a row are one; the results of a turn's calls come first"
        " in the next one, all of them; a last turn of the assistant is what the answer begins"
        " with, where the chat template has a place for that",
        "messages[].content[].type": "results go to the model in the order of their calls",
        "messages[].content[].is_error": "true: `Error: ` stands before the result",
        "messages[].content[].cache_control": "the prompt up to the end of its block is kept for"
        " `ttl` (`5m`, `1h`), from 1,024 tokens on; at most 4, those of 1h first; of a model with"
        " another cache contract than `explicit`, and of an upstream's, it means nothing",
        "cache_control": "on the last block, unless that has one",
        "temperature": "an upstream is told unless it is 1",
        "top_k": "not for an upstream's model",
        "stop_sequences": "which one it was an upstream says where it is vLLM; else the answer says"
        " `end_turn`",
        "tools[].strict": "true: its calls are valid by `input_schema`, by a grammar; a call that"
        " is forced is so in any case",
        "tool_choice": "a tool that is named, or any, is called, by a grammar",
        "tool_choice.disable_parallel_tool_use": "true: the answer is over with its first call",
        "thinking": "as the model's chat template takes it; `adaptive`: as the model does",
        "thinking.budget_tokens": "a target: below 4,096 `low`, below 16,384 `medium`, else `high`",
        "output_config.effort": "as `reasoning_effort` of chat completions",
        "output_config.format.schema": "the answer is of it, by a grammar; what cannot be compiled"
        " is refused",
        "service_tier": "`auto` costs no more than `standard_only`; what was served stands in the"
        " answer",
        "context_management.edits[].keep": "all of it: nothing is taken out of a conversation here",
        "inference_geo": "an upstream's is its operator's choice",
        "diagnostics": "no earlier answer is kept to compare with",
        "thread": "no conversation is kept; the official SDK's loop of tools goes on without",
        "output_format": "`output_config.format` took its place",
    },
    refused_values=anthropic.NOT_YET,
)
RESPONSES = SurfaceFields(
    title="POST /v1/responses, and POST /v1/responses/input_tokens",
    body=ResponseRequest,
    ignored={
        "input[].parsed_arguments": "what a client's library read in them",
        "input[].content[].annotations": "of an earlier answer, which has none",
        "input[].content[].logprobs": "of an earlier answer",
        "input[].content[].parsed": "what a client's library read in the text",
        "text.format.name": "a name for the schema",
        "text.format.description": "a name for the schema, in more words",
        "text.format.strict": "the answer is kept to the schema in any case",
    },
    notes={
        "input": "a text is a message of the user; with what it continues it has an output for each"
        " function_call",
        "input[].id": "kept as it came; who sends none is given one",
        "input[].name": "of a call; its output is shown to the model under that name, too",
        "input[].type": "absent: a message, or a reference where there is nothing but an `id`",
        "instructions": "the first message of the system; not carried over to what continues it",
        "tools": "of a model whose chat template knows tools",
        "tools[].strict": "true: its calls are valid by `parameters`, by a grammar; a call that is"
        " forced is so in any case",
        "tool_choice": "a function that is named, or allowed and required, is called, by a grammar",
        "tool_choice.server_label": "of a server in `tools`, one of whose tools is called in the"
        " first round",
        "tool_choice.name": "of a server: as it names its tool; absent: any that is allowed",
        "parallel_tool_calls": "false: the answer is over with its first call",
        "text.format.schema": "the answer is of it, by a grammar; what cannot be compiled is"
        " refused",
        "reasoning.effort": "as of chat completions",
        "reasoning.summary": "`auto`: as there is one; what was thought stands in the item itself",
        "tools[].server_label": "of a server that is registered here; docs/mcp-tools.md says"
        " what is done with its tools",
        "tools[].require_approval": "always, unless it is said; of the filter all that `never` does"
        " not name",
        "tools[].server_description": "for whoever reads it; no model is shown it",
        "max_tool_calls": "of tools of MCP servers; others are refused, and the model told so",
        "include": "all but the first are of items that no answer here has",
        "top_logprobs": "beside `include` of the logprobs",
        "stream_options.include_obfuscation": "true is refused: events are not padded",
        "previous_response_id": "one that was answered and is kept, of the same project, and so is"
        " each that it continues: who deletes one takes it from those behind it, too, and the error"
        " names it",
        "conversation": "its items come before `input`; both and the answer are added to it,"
        " stored or not",
        "background": "true: it runs by itself, is found by its id, streamed from any event on, and"
        " can be cancelled; not where nothing is stored",
        "store": "kept, sealed, for the time that the operator sets, unless it is false or the"
        " project keeps nothing (`zero_retention`)",
        "service_tier": "`fast` is `priority`; what was served stands in the answer",
        "metadata": "the answer repeats it",
        "user": "the answer repeats it",
        "safety_identifier": "the answer repeats it",
        "prompt_cache_key": "as of chat completions; the answer repeats it",
        "seed": "not OpenAI's: the same seed draws the same, whatever else runs",
        "stop": "not OpenAI's: as of chat completions",
        "top_k": "not OpenAI's: as of chat completions",
        "min_p": "not OpenAI's: as of chat completions",
    },
    refused_values=responses.NOT_YET,
)
COMPLETIONS = SurfaceFields(
    title="POST /v1/completions, of our engine's models",
    body=CompletionRequest,
    ignored={"user": "a label for abuse checks"},
    notes={
        "prompt": "a text, several, token ids, or several lists of them; choice i of prompt p has"
        " the index p * n + i; of a text the tokenizer makes what it makes of plain text, with its"
        " own tokens around it",
        "max_tokens": "16 if it is left out; 0 with `echo` says what is there",
        "n": "with several prompts at most 128 choices in all",
        "best_of": "`n` or nothing: every choice that is made is returned",
        "echo": "with `logprobs` those of the prompt, too, of which the first token has none",
        "logprobs": "of the token that ends a choice, too",
        "seed": "the same seed draws the same, whatever else runs or stands beside a prompt",
        "stream_options.include_obfuscation": "true is refused: chunks are not padded",
        "min_tokens": "not beside `stop`",
        "suffix": "nothing is written before a text",
    },
    refused_values={},
)
EMBEDDINGS = SurfaceFields(
    title="POST /v1/embeddings, of our engine's models",
    body=EmbeddingRequest,
    ignored={"user": "a label for abuse checks"},
    notes={
        "input": "a text, several, token ids, or several lists of them: at most 2048, and 300,000"
        " tokens together",
        "encoding_format": "`base64` is of float32, little-endian",
        "dimensions": "so many of the first numbers, brought to unit length if the model's are",
    },
    refused_values={},
)
TOKENIZE = SurfaceFields(
    title="POST /v1/tokenize, of our engine's models",
    body=TokenizeRequest,
    ignored={path: why for path, why in CHAT.ignored.items() if path.startswith("messages")},
    notes={
        "prompt": "this or `messages`",
        "add_special_tokens": "what the tokenizer puts around a text; unless said, of a `prompt`",
        "add_generation_prompt": "true unless said; beside `messages`",
        "return_token_strs": "the text of each token, too",
    },
    refused_values={path: CHAT.refused_values[path] for path in ("messages[].role",)},
)
DETOKENIZE = SurfaceFields(
    title="POST /v1/detokenize, of our engine's models",
    body=DetokenizeRequest,
    ignored={},
    notes={},
    refused_values={},
)
COUNT_TOKENS = SurfaceFields(
    title="POST /v1/messages/count_tokens",
    body=CountTokensRequest,
    ignored=counted(MESSAGES.ignored),
    notes=counted(MESSAGES.notes),
    refused_values=counted(MESSAGES.refused_values),
)
SURFACES = (
    *(CHAT, COMPLETIONS, RESPONSES, *KEPT_SURFACES, EMBEDDINGS, TOKENIZE, DETOKENIZE),
    *(MESSAGES, COUNT_TOKENS, MODELS, *BATCH_SURFACES),
)
FORWARDED = BILLED_OTHERWISE
"""Fields that are refused for an upstream's model, with the reason."""
