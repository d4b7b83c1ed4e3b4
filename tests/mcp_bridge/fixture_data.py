"""Holds what the fixture server says: names and texts are the conformance suite's."""

from __future__ import annotations

from typing import Any

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAA"
    "AABJRU5ErkJggg=="
)
WAV = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA="
EMBEDDED = {
    "type": "resource",
    "resource": {
        "uri": "test://embedded-resource",
        "mimeType": "text/plain",
        "text": "This is an embedded resource content.",
    },
}
MIXED = [
    {"type": "text", "text": "Multiple content types test:"},
    {"type": "image", "data": PNG, "mimeType": "image/png"},
    {
        "type": "resource",
        "resource": {
            "uri": "test://mixed-content-resource",
            "mimeType": "application/json",
            "text": '{"test":"data","value":123}',
        },
    },
]


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


PLAIN: dict[str, list[dict[str, Any]]] = {
    "test_simple_text": [text("This is a simple text response for testing.")],
    "test_image_content": [{"type": "image", "data": PNG, "mimeType": "image/png"}],
    "test_audio_content": [{"type": "audio", "data": WAV, "mimeType": "audio/wav"}],
    "test_embedded_resource": [EMBEDDED],
    "test_multiple_content_types": MIXED,
    "json_schema_2020_12_tool": [text("valid")],
    "test_x_mcp_header": [text("the headers agree")],
    "test_logging_tool": [text("nothing was logged that nobody asked for")],
}
"""Tools that always answer the same."""

NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


def needs(**properties: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties),
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "test_sampling": needs(prompt="string"),
    "test_sampling_with_tools": needs(prompt="string"),
    "test_elicitation": needs(message="string"),
    "test_x_mcp_header": {
        "type": "object",
        "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
        "required": ["region"],
    },
    "json_schema_2020_12_tool": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {
            "address": {
                "$anchor": "addressDef",
                "type": "object",
                "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            }
        },
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {
            "properties": {"contactMethod": {"const": "phone"}},
            "required": ["contactMethod"],
        },
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": False,
    },
}
OTHER_TOOLS = (
    "test_tool_with_logging",
    "test_tool_with_progress",
    "test_error_handling",
    "test_sampling",
    "test_elicitation",
    "test_elicitation_sep1034_defaults",
    "test_elicitation_sep1330_enums",
    "test_reconnection",
    "test_missing_capability",
    "test_streaming_elicitation",
    "test_trigger_tool_change",
    "test_trigger_prompt_change",
    "test_trigger_resource_update",
    "test_count_calls",
    "test_sampling_with_tools",
    "test_headers",
)

DEFAULTS_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {
            "type": "string",
            "enum": ["active", "inactive", "pending"],
            "default": "active",
        },
        "verified": {"type": "boolean", "default": True},
    },
}


def titled(*names: str) -> list[dict[str, str]]:
    return [{"const": f"value{n}", "title": name} for n, name in enumerate(names, 1)]


ENUMS_SCHEMA = {
    "type": "object",
    "properties": {
        "untitledSingle": {"type": "string", "enum": ["option1", "option2", "option3"]},
        "titledSingle": {
            "type": "string",
            "oneOf": titled("First Option", "Second Option", "Third Option"),
        },
        "legacyEnum": {
            "type": "string",
            "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {
            "type": "array",
            "items": {"type": "string", "enum": ["option1", "option2", "option3"]},
        },
        "titledMulti": {
            "type": "array",
            "items": {"anyOf": titled("First Choice", "Second Choice", "Third Choice")},
        },
    },
}
PERSON_SCHEMA = {
    "type": "object",
    "properties": {
        "username": {"type": "string", "description": "User's response"},
        "email": {"type": "string", "description": "User's email address"},
    },
    "required": ["username", "email"],
}


def elicit(message: str, field: str, kind: str = "string") -> dict[str, Any]:
    schema = {"type": "object", "properties": {field: {"type": kind}}, "required": [field]}
    params = {"mode": "form", "message": message, "requestedSchema": schema}
    return {"method": "elicitation/create", "params": params}


def sample(asked: str, max_tokens: int = 100) -> dict[str, Any]:
    messages = [{"role": "user", "content": text(asked)}]
    params = {"messages": messages, "maxTokens": max_tokens}
    return {"method": "sampling/createMessage", "params": params}


ADD: dict[str, Any] = {"name": "sums.add", "inputSchema": needs(a="integer", b="integer")}


def wish_with_tools(messages: list[Any], choice: str = "auto") -> dict[str, Any]:
    params = {"messages": messages, "maxTokens": 200, "tools": [ADD]}
    return {
        "method": "sampling/createMessage",
        "params": {**params, "toolChoice": {"mode": choice}},
    }


ROOTS: dict[str, Any] = {"method": "roots/list", "params": {}}
ROUNDS: dict[str, list[dict[str, Any]]] = {
    "test_input_required_result_elicitation": [{"user_name": elicit("What is your name?", "name")}],
    "test_input_required_result_sampling": [
        {"capital_question": sample("What is the capital of France?")}
    ],
    "test_input_required_result_list_roots": [{"client_roots": ROOTS}],
    "test_input_required_result_request_state": [
        {"confirm": elicit("Please confirm", "ok", "boolean")}
    ],
    "test_input_required_result_tampered_state": [
        {"confirm": elicit("Please confirm", "ok", "boolean")}
    ],
    "test_input_required_result_multiple_inputs": [
        {
            "user_name": elicit("What is your name?", "name"),
            "greeting": sample("Generate a greeting", 50),
            "client_roots": ROOTS,
        }
    ],
    "test_input_required_result_multi_round": [
        {"step1": elicit("Step 1: What is your name?", "name")},
        {"step2": elicit("Step 2: What is your favorite color?", "color")},
    ],
    "test_input_required_result_capabilities": [
        {"ask": elicit("Who?", "name"), "think": sample("Think")}
    ],
}
"""The input requests of each tool, round by round."""
STATELESS = {"test_input_required_result_elicitation"}
"""Those that take answers without the state that they gave: the suite sends some so."""
PROMPT_ROUND = {"user_context": elicit("What context should the prompt use?", "context")}
