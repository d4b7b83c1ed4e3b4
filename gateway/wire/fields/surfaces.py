"""Lists what the structs of a surface cannot say: which fields are ignored by their specification,
notes on single fields, and which headers a request may have.

Paths are those of refusals, without indices: `messages[].content[].type`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from engine.protocol import MAX_PROMPT_SCORES
from gateway.wire.anthropic import messages as anthropic
from gateway.wire.anthropic.batches import MessageBatchesQuery, NewMessageBatch
from gateway.wire.anthropic.messages import CountTokensRequest, MessagesRequest
from gateway.wire.anthropic.models import ModelsQuery
from gateway.wire.openai.batches import BatchesQuery, NewBatch, WrittenLine
from gateway.wire.openai.chat import ChatCompletionRequest
from gateway.wire.openai.completions import CompletionRequest
from gateway.wire.openai.embeddings import EmbeddingRequest
from gateway.wire.openai.files import ANCHOR, SECONDS, FilesQuery, FileUpload
from gateway.wire.openai.forward import BILLED_OTHERWISE
from gateway.wire.openai.tokenizing import DetokenizeRequest, TokenizeRequest, TokenizerQuery
from gateway.wire.openai_responses import request as responses
from gateway.wire.openai_responses.compaction import CompactRequest
from gateway.wire.openai_responses.conversations import (
    ConversationUpdate,
    NewConversation,
    NewItems,
)
from gateway.wire.openai_responses.queries import IncludeQuery, ItemsQuery, RetrieveQuery
from gateway.wire.openai_responses.request import ResponseRequest
from gateway.wire.shared.refusals import NOT_YET

T = TypeVar("T")
SCOPE = "what is kept is an organization's own"
KEPT_PLACES = (
    *("", "system[].", "tools[].", "messages[].content[].", "messages[].content[].content[]."),
    "messages[].content[].tool.definition.",
)
"""Places of a request at which a block may be marked for the prompt cache."""
NOT_SHORTENED = "no conversation is shortened here; one that does not fit is refused"


class SurfaceFields(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    body: type[msgspec.Struct]
    ignored: Mapping[str, str] = {}
    """Path to why."""
    notes: Mapping[str, str] = {}
    """Path to what is to be known."""
    refused_values: Mapping[str, frozenset[str]] = {}
    """By honoured field, the values that a vendor knows and that are refused by name."""


def of_fields(told: Mapping[str, T], kind: type[msgspec.Struct]) -> dict[str, T]:
    """Return what is told of those fields that a body of this kind has, too."""
    names = kind.__struct_fields__
    return {path: said for path, said in told.items() if re.split(r"\W", path)[0] in names}


VLLMS = {
    "stream_options.continuous_usage_stats": "vLLM's: with `include_usage`, the usage so far stands"
    " in every chunk",
    "skip_special_tokens": "vLLM's: false: special tokens are text of the answer, but for the one"
    " that ends it",
    "prompt_logprobs": "vLLM's: of the prompt's tokens, with so many of the likeliest, not beside"
    f" `stream`; at most {MAX_PROMPT_SCORES:,} log-probabilities of one prompt",
    "logprob_token_ids": "vLLM's: beside `logprobs`: these stand in the place of the likeliest",
    "return_token_ids": "vLLM's: those of the prompt and of the answer",
    "return_tokens_as_token_ids": "vLLM's: tokens of log-probabilities are named `token_id:5`",
    "priority": "vLLM's: of what its organization has waiting in the lane the smallest goes first",
    "response_format.json_schema.schema": "the answer is of it, by a grammar; what cannot be"
    " compiled is refused",
    "response_format.schema": "llama.cpp's and vLLM's: the answer is of it, by a grammar",
    "min_tokens": "not beside `stop`, nor beside a form of the answer",
    "ignore_eos": "not beside a form of the answer",
    "guided_json": "vLLM's older name of `structured_outputs.json`",
    "guided_regex": "vLLM's older name of `structured_outputs.regex`",
    "guided_choice": "vLLM's older name of `structured_outputs.choice`",
    "guided_grammar": "vLLM's older name of `structured_outputs.grammar`",
    "structured_outputs": "vLLM's; exactly one of its fields, and not beside another form",
    "structured_outputs.grammar": "EBNF: GBNF with a rule `root`, as xgrammar and llama.cpp"
    " read it (up to 32 KiB, 500 rules, 64 brackets deep), or llguidance's dialect of Lark",
    "structured_outputs.regex": "of the whole answer",
}
"""Notes on what chats and texts have in common."""
CHAT = SurfaceFields(
    title="POST /v1/chat/completions, and POST /invocations, of our engine's models",
    body=ChatCompletionRequest,
    ignored={
        "user": "a label for abuse checks",
        "safety_identifier": "a label for abuse checks",
        "metadata": "kept with stored completions, and none is stored",
        "store": "nothing is stored, whatever it says",
        "response_format.json_schema.name": "a name for the schema",
        "response_format.json_schema.description": "a name for the schema, in more words",
        "response_format.json_schema.strict": "the answer is kept to the schema in any case",
        "messages[].parsed": "what a client's library read in the content",
        "messages[].provider_specific_fields": "what litellm read beside the message's own fields",
        "messages[].tool_calls[].index": "a stream's",
        "messages[].function_call.parsed_arguments": "what a client's library read in them",
        "messages[].tool_calls[].function.parsed_arguments": "what a client's library read in them",
        "messages[].annotations": "of an earlier answer, which has none",
    },
    notes={
        "messages[].role": "in vLLM's dialect (docs/vllm.md) any other name, too, of which the chat"
        " template makes what it does",
        "prompt_cache_key": "where several serve a model, the requests of an organization that name"
        " the same go to the same, as long as that is no busier than others; the cache report names"
        " a prefix by it",
        **VLLMS,
        "stream_options.include_obfuscation": "true is refused: chunks are not padded",
        "max_completion_tokens": "both may be given if they are equal",
        "reasoning_effort": "as the model's chat template takes it; one that knows on and off alone"
        " thinks for all but `none`; one that knows neither does as it always does",
        "reasoning": "OpenRouter's",
        "reasoning.effort": "as `reasoning_effort`; both may be given if they are equal",
        "verbosity": "what every answer has; others are refused",
        "tools[].cache_control": "up to the end of its tool, and of the system's message where a"
        " template puts tools into that; as in a part of content",
        "messages[].cache_control": "up to the end of its message; as in a part of content",
        "messages[].content[].cache_control": "the prompt up to the end of its part is kept for"
        " `ttl` (`5m`, `1h`), from 1,024 tokens on; at most 4, those of 1h first; of a model with"
        " another cache contract than `explicit` it means nothing",
        "seed": "the same seed draws the same, whatever else runs",
        "tools": "of a model whose chat template knows tools; a call is told apart from the text by"
        " the form of the model's family",
        "messages[].tool_call_id": "a `tool` message stands behind the one that called; each call"
        " has one",
        "tools[].function.name": "of letters, digits, `_` and `-`",
        "tools[].function.strict": "true: its calls are valid by `parameters`, by a grammar; a call"
        " that is forced is so in any case",
        "tool_choice": "a function that is named, or allowed and required, is called, by a grammar",
        "parallel_tool_calls": "false: the answer is over with its first call; without tools it"
        " means nothing",
        "messages[].reasoning_content": "not OpenAI's: as it stood in an answer",
        "messages[].reasoning": "vLLM's newer name of `reasoning_content`, and OpenRouter's",
        "echo": "vLLM's: an answer whose beginning is the last message says that again",
        "add_generation_prompt": "vLLM's: false: the model says itself whose turn it is",
        "continue_final_message": "vLLM's: the answer goes on with the last message, a text of the"
        " assistant",
        "chat_template_kwargs": "vLLM's: variables of the chat template, such as `enable_thinking`;"
        " one that the template does not read means nothing; they go before `reasoning_effort`",
        "service_tier": "`fast` is `priority`; what was served stands in the answer",
        "moderation": "no answer is moderated here",
        "prediction": "no answer is predicted here",
        "chat_template": "a template is the operator's: `chat_template` in the settings",
        "functions": "the older form of `tools`, of which it cannot stand beside: an answer has one"
        " call at most, in `function_call`",
        "function_call": "the older form of `tool_choice`",
        "messages[].function_call": "the older form of `tool_calls`; its result is a message of the"
        " role `function`, of the last call of that name",
    },
    refused_values=NOT_YET,
)
MESSAGES = SurfaceFields(
    title="POST /v1/messages",
    body=MessagesRequest,
    ignored={
        "metadata.user_id": "a label for abuse checks",
        "speed": "every answer comes as fast as it can",
        "thinking.display": "what was thought is shown",
        **{f"{path}cache_control.scope": SCOPE for path in KEPT_PLACES},
        "context_management": NOT_SHORTENED,
        "context_management.edits": NOT_SHORTENED,
        **{
            f"context_management.edits[].{name}": NOT_SHORTENED
            for name in (
                *("keep", "keep.value", "trigger", "trigger.value"),
                *("clear_at_least", "clear_at_least.value", "clear_tool_inputs", "exclude_tools"),
            )
        },
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
        "tools[].defer_loading": "true: the model is not shown it until a `tool_reference` or a"
        " `tool_addition` names it, or `tool_choice`; then it stands with the others",
        "messages[].content[].tool": "of `tool_addition` and `tool_removal`: what the model may"
        " call from here on",
        "thinking": "as the model's chat template takes it; `adaptive`: as the model does, whether"
        " it thinks or not",
        "thinking.budget_tokens": "a target: below 4,096 `low`, below 16,384 `medium`, else `high`",
        "output_config.effort": "a hint: as `reasoning_effort` of chat completions where the chat"
        " template takes one; an upstream is told with `takes_reasoning_effort`",
        "output_config.format.schema": "the answer is of it, by a grammar; what cannot be compiled"
        " is refused",
        "service_tier": "`auto` costs no more than `standard_only`; what was served stands in the"
        " answer",
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
        "text.verbosity": "a hint, of which no model here is told; the answer repeats it",
        "client_metadata": "what Codex says of itself",
        "reasoning.context": "which thoughts the model reads again is its chat template's affair",
        "input[].created_by": "of a summary of a conversation",
        "input[].action.env": "the model is shown the command and the folder",
        "input[].action.timeout_ms": "the model is shown the command and the folder",
        "input[].action.user": "the model is shown the command and the folder",
    },
    notes={
        "input": "a text is a message of the user; with what it continues it has an output for each"
        " function_call",
        "input[].id": "kept as it came; who sends none is given one",
        "input[].name": "of a call; its output is shown to the model under that name, too",
        "input[].type": "absent: a message, or a reference where there is nothing but an `id`",
        "instructions": "the first message of the system; not carried over to what continues it",
        "tools": "of a model whose chat template knows tools; those that the vendor's servers would"
        " run (`web_search`, `web_search_preview`, `image_generation`, `tool_search`) the model is"
        " not shown, and the answer's `metadata` names them in `tollgate.left_out_tools`, or with"
        ' `[compat] hosted_tools = "refuse"` they are refused',
        "tools[].tools": "of a namespace: the model knows them as `namespace__name`; their calls"
        " have `name` and `namespace`",
        "tools[].format": "of a custom tool: the model is shown a function with one text, `input`",
        "tools[].format.definition": "of a model of ours the text follows it, by a grammar; Lark"
        " without `%ignore`, look-around and templates; an upstream's model is shown it alone",
        "input[].tools": "of `additional_tools`: as `tools`, for this request",
        "input[].encrypted_content": "of what was thought, and of a summary: as an answer of this"
        " project had it",
        "input[].action": "of a command that the client ran: shown as a call of `local_shell`",
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
        "reasoning.summary": "nobody writes one here; what was thought stands in the item itself",
        "tools[].server_label": "of a server that is registered here; docs/mcp-tools.md says"
        " what is done with its tools",
        "tools[].require_approval": "always, unless it is said; of the filter all that `never` does"
        " not name",
        "tools[].server_description": "for whoever reads it; no model is shown it",
        "max_tool_calls": "of tools of MCP servers; others are refused, and the model told so",
        "include": "`reasoning.encrypted_content`: what was thought, sealed for this project, so"
        " that a client that keeps nothing else can send it back; all others but the logprobs are"
        " of items that no answer here has",
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
        "repetition_penalty": "not OpenAI's: as of chat completions",
    },
    refused_values=responses.NOT_YET,
)
COMPACT = SurfaceFields(
    title="POST /v1/responses/compact",
    body=CompactRequest,
    ignored={
        **of_fields(RESPONSES.ignored, CompactRequest),
        **dict.fromkeys(("tools", "parallel_tool_calls"), "a summary calls no tool"),
        "text": "a summary has no form",
    },
    notes={
        **of_fields(RESPONSES.notes, CompactRequest),
        "input": "the model sums up this, with what it continues: the answer has the messages of"
        " the user and a `compaction` with the summary, sealed for this project, which later"
        " requests begin with",
    },
    refused_values=of_fields(RESPONSES.refused_values, CompactRequest),
)
COMPLETIONS = SurfaceFields(
    title="POST /v1/completions, and POST /invocations, of our engine's models",
    body=CompletionRequest,
    ignored={
        **of_fields(CHAT.ignored, CompletionRequest),
        "prompt_embeds": "an empty one means nothing, and any other is refused",
    },
    refused_values=of_fields(NOT_YET, CompletionRequest),
    notes={
        **VLLMS,
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
        "suffix": "nothing is written before a text",
    },
)
EMBEDDINGS = SurfaceFields(
    title="POST /v1/embeddings, and POST /invocations, of our engine's models",
    body=EmbeddingRequest,
    ignored={"user": "a label for abuse checks"},
    notes={
        "input": "a text, several, token ids, or several lists of them: at most 2048, and 300,000"
        " tokens together",
        "encoding_format": "`base64` is of float32, little-endian",
        "dimensions": "so many of the first numbers, brought to unit length if the model's are",
    },
)
TOKENIZE = SurfaceFields(
    title="POST /v1/tokenize and POST /tokenize, of our engine's models",
    body=TokenizeRequest,
    ignored={path: why for path, why in CHAT.ignored.items() if path.startswith("messages")},
    notes={
        "prompt": "this or `messages`",
        "add_special_tokens": "what the tokenizer puts around a text; unless said, of a `prompt`",
        "add_generation_prompt": "true unless said; beside `messages`",
        "continue_final_message": "beside `messages`; as of chat completions",
        "chat_template_kwargs": "beside `messages`; as of chat completions",
        "return_token_strs": "each token as the vocabulary writes it, too",
    },
)
DETOKENIZE = SurfaceFields(
    title="POST /v1/detokenize and POST /detokenize, of our engine's models",
    body=DetokenizeRequest,
)
TOKENIZER_INFO = SurfaceFields(
    title="GET /v1/tokenizer_info (query) and GET /tokenizer_info (query), of our engine's models",
    body=TokenizerQuery,
)
COUNT_TOKENS = SurfaceFields(
    title="POST /v1/messages/count_tokens",
    body=CountTokensRequest,
    ignored=of_fields(MESSAGES.ignored, CountTokensRequest),
    notes=of_fields(MESSAGES.notes, CountTokensRequest),
    refused_values=of_fields(MESSAGES.refused_values, CountTokensRequest),
)
ITEM_IGNORED = {
    "content[].annotations": "of an earlier answer",
    "content[].logprobs": "of an earlier answer",
    "content[].parsed": "what a client's library read in the text",
}
ITEM_NOT_YET = {
    path.replace("input[]", "items[]"): values
    for path, values in responses.NOT_YET.items()
    if path.startswith("input[]")
}
INCLUDED = "taken; what could be included is in it, where it was asked for when it was made"
RESPONSE = SurfaceFields(
    title="GET /v1/responses/{id} (query)",
    body=RetrieveQuery,
    ignored={"include": INCLUDED},
    notes={
        "stream": "of one that runs in the background: its events",
        "starting_after": "with `stream`: the number of the event behind which it goes on",
        "include_obfuscation": "true is refused: events are not padded",
    },
)
INPUT_ITEMS = SurfaceFields(
    title="GET /v1/responses/{id}/input_items (query)",
    body=ItemsQuery,
    ignored={"include": INCLUDED},
    notes={"order": "the newest come first unless it is said"},
)
NEW_CONVERSATION = SurfaceFields(
    title="POST /v1/conversations",
    body=NewConversation,
    ignored={f"items[].{path}": why for path, why in ITEM_IGNORED.items()},
    notes={"items": "as `input` of `POST /v1/responses`"},
    refused_values=ITEM_NOT_YET,
)
CONVERSATION = SurfaceFields(
    title="POST /v1/conversations/{id}",
    body=ConversationUpdate,
    notes={"metadata": "in place of what was there"},
)
NEW_ITEMS = SurfaceFields(
    title="POST /v1/conversations/{id}/items",
    body=NewItems,
    ignored=NEW_CONVERSATION.ignored,
    notes=NEW_CONVERSATION.notes,
    refused_values=ITEM_NOT_YET,
)
ITEMS = SurfaceFields(
    title="GET /v1/conversations/{id}/items (query)",
    body=ItemsQuery,
    ignored=INPUT_ITEMS.ignored,
    notes=INPUT_ITEMS.notes,
)
ITEM = SurfaceFields(
    title="POST /v1/conversations/{id}/items (query),"
    " GET /v1/conversations/{id}/items/{id} (query)",
    body=IncludeQuery,
    ignored=INPUT_ITEMS.ignored,
)
MODELS = SurfaceFields(
    title="GET /v1/models (query) of who sends `anthropic-version`",
    body=ModelsQuery,
    ignored={"beta": "an SDK's name for the same models"},
    notes={
        "after_id": "those behind it",
        "before_id": "those before it, the nearest of them",
    },
)
KEPT_SURFACES = (RESPONSE, INPUT_ITEMS, NEW_CONVERSATION, CONVERSATION, NEW_ITEMS, ITEMS, ITEM)
OTHER_ENDPOINTS = frozenset(
    {"/v1/moderations", "/v1/images/generations", "/v1/images/edits", "/v1/videos"}
)
FILES = SurfaceFields(
    title="POST /v1/files (multipart/form-data)",
    body=FileUpload,
    notes={
        "file": "up to `max_file_bytes`, streamed",
        "purpose": "`batch` alone is put to a use here; files for others are kept",
        ANCHOR: f"with `{SECONDS}`, or neither",
        SECONDS: "of a file for a batch 30 days unless it is said; others stay",
    },
    refused_values={"purpose": frozenset({"evals"})},
)
FILE_LIST = SurfaceFields(
    title="GET /v1/files (query)",
    body=FilesQuery,
)
BATCHES = SurfaceFields(
    title="POST /v1/batches",
    body=NewBatch,
    notes={
        "input_file_id": "of the same project, uploaded for a batch",
        "endpoint": "`/v1/chat/completions`, `/v1/completions`, `/v1/embeddings`, `/v1/responses`",
        "output_expires_after": "30 days after they are written unless it is said",
    },
    refused_values={"endpoint": OTHER_ENDPOINTS},
)
BATCH_LINE = SurfaceFields(
    title="A line of a batch's input",
    body=WrittenLine,
    notes={
        "custom_id": "once in a file",
        "method": "`POST`",
        "url": "the batch's `endpoint`",
        "body": "as that endpoint takes it; `stream` is refused, and of `/v1/responses` also"
        " `background` and `conversation`; what a model cannot take fails its line alone",
    },
)
BATCH_LIST = SurfaceFields(
    title="GET /v1/batches (query)",
    body=BatchesQuery,
    notes={"order": "not OpenAI's: the newest come first unless it is said"},
)
MESSAGE_BATCHES = SurfaceFields(
    title="POST /v1/messages/batches",
    body=NewMessageBatch,
    notes={
        "requests": "or as many as `max_batch_lines` says",
        "requests[].custom_id": "letters, digits, `_` and `-`; once in a batch",
        "requests[].params": "as `POST /v1/messages` takes them; `stream` is refused; what is wrong"
        " with them fails that request alone",
    },
)
MESSAGE_BATCH_LIST = SurfaceFields(
    title="GET /v1/messages/batches (query)",
    body=MessageBatchesQuery,
    ignored={"beta": "an SDK's name for the same batches"},
    notes={
        "after_id": "those that are older",
        "before_id": "those that are newer, the nearest of them",
    },
)
BATCH_SURFACES = (
    *(FILES, FILE_LIST, BATCHES, BATCH_LINE, BATCH_LIST),
    *(MESSAGE_BATCHES, MESSAGE_BATCH_LIST),
)
SURFACES = (
    *(CHAT, COMPLETIONS, RESPONSES, COMPACT, *KEPT_SURFACES, EMBEDDINGS, TOKENIZE, DETOKENIZE),
    TOKENIZER_INFO,
    *(MESSAGES, COUNT_TOKENS, MODELS, *BATCH_SURFACES),
)
FORWARDED = BILLED_OTHERWISE
"""Fields that are refused for an upstream's model, with the reason."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    on: tuple[str, ...]
    """`METHOD path`, or a prefix of it with `*`."""
    meaning: str


GENERATION = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "POST /v1/messages",
    "POST /v1/responses",
    "POST /v1/responses/compact",
    "POST /invocations",
)
BATCH_ROUTES = ("POST /v1/batches", "POST /v1/messages/batches")
REQUEST_HEADERS = (
    Header(
        name="Idempotency-Key",
        on=(*GENERATION, *BATCH_ROUTES, "POST /v1/conversations", "POST /v1/files"),
        meaning="up to 255 characters; repeated with it within 24 hours by the same credential (an"
        " API key, or an OAuth client for the same person: another key of the same project is"
        " another), the request is done and billed once and answered as before; 409 while the first"
        " runs, 400 with another body. Every POST below `/v1/admin` takes it, too",
    ),
    Header(
        name="X-Request-Timeout-Ms",
        on=GENERATION,
        meaning="how long the answer may take: what cannot begin by then is a 503, what is not"
        " complete by then is cut off, billed for what was generated and ends with 504"
        " `deadline_exceeded`, as an error event where it has begun to stream",
    ),
    Header(
        name="X-Tollgate-Cost",
        on=GENERATION,
        meaning="`true`, `1`, `false` or `0`: whether the answer says what it cost",
    ),
    Header(
        name="X-Tollgate-Tags",
        on=(*GENERATION, *BATCH_ROUTES),
        meaning="what usage is counted by, as `team=search,feature=chat`",
    ),
    Header(
        name="anthropic-version",
        on=("* /v1/messages*", "GET /v1/models*", "* /v1/files*"),
        meaning="from 2023-06-01 on; on `/v1/models` it asks for the list in Anthropic's shape, on"
        " `/v1/files` for files that are not served (404), and errors have Anthropic's shape",
    ),
)
