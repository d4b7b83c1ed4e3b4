"""JSON Schema as its suite has it, in bounded time, and without ever asking the network."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from mcp_bridge.errors import SchemaRefused, ValidationTimedOut
from mcp_bridge.validation import sandboxed_validator as killable_module
from mcp_bridge.validation.arguments import (
    MAX_LOCATED_WORK,
    MAX_PROBLEMS,
    CompiledSchema,
    Problem,
    SchemaCache,
    check,
    compile_schema,
    problems,
)
from mcp_bridge.validation.results import ResultBounds, result_problems
from mcp_bridge.validation.sandboxed_validator import KillableValidator, ValidatorPool
from mcp_bridge.validation.schema_cost import measure

SUITE = Path(__file__).parent / "json_schema_test_suite"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
REQUIRED = {"draft2020-12": 1257, "draft7": 913}
"""Tests that the suite has; fewer would mean that some were not tried."""


@cache
def part(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SUITE / f"{name}.json").read_text())
    return found


def referred(schema: object, draft: str) -> dict[str, Any]:
    """The suite's remote documents that `schema` names, and those that these name."""
    mine = {
        uri: document
        for uri, document in part("remotes").items()
        if draft == "draft2020-12" or "/draft2020-12/" not in uri
    }
    found: dict[str, Any] = {}
    texts = [json.dumps(schema)]
    while texts:
        text = texts.pop()
        for uri, document in mine.items():
            if uri not in found and uri.rsplit("/", 1)[1] in text:
                found[uri] = document
                texts.append(json.dumps(document))
    return found


def compiled_by_suite(schema: Any, draft: str) -> CompiledSchema:
    if draft == "draft7" and isinstance(schema, dict):
        schema = {"$schema": DRAFT_7, **schema}
    return compile_schema(schema, referred(schema, draft))


@pytest.mark.parametrize("draft", list(REQUIRED))
def test_the_json_schema_test_suite(draft: str) -> None:
    tried, wrong = 0, []
    for keyword, groups in part(draft).items():
        for group in groups:
            compiled = compiled_by_suite(group["schema"], draft)
            assert compiled.engine == "linear"
            for test in group["tests"]:
                tried += 1
                if (check(compiled, test["data"]) == ()) != test["valid"]:
                    wrong.append((keyword, group["description"], test["description"]))
    assert wrong == []
    assert tried == REQUIRED[draft]


@pytest_asyncio.fixture
async def killable() -> AsyncIterator[KillableValidator]:
    validator = KillableValidator(timeout_s=20.0)
    yield validator
    await validator.close()


def test_a_problem_names_its_pointer_and_quotes_no_value() -> None:
    compiled = compile_schema(
        {
            "type": "object",
            "properties": {"a/b": {"type": "array", "items": {"type": "integer"}}},
            "required": ["needed"],
        }
    )
    found = check(compiled, {"a/b": [1, "my secret"]})
    assert {(one.path, one.keyword) for one in found} == {("/a~1b/1", "type"), ("", "required")}
    assert "needed" in "".join(one.message for one in found)
    assert "my secret" not in repr(found)


def test_the_count_of_problems_is_bounded() -> None:
    found = check(compile_schema({"items": {"type": "string"}}), list(range(1_000)))
    assert len(found) == MAX_PROBLEMS


@pytest.mark.parametrize(
    "reference",
    [
        "http://127.0.0.1:9/schema.json",
        "https://evil.example/s.json#/a",
        "file:///etc/passwd",
        "//evil.example/x",
        "other.json",
        "#/definitions/missing",
        "#missing",
    ],
)
@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_no_reference_leaves_the_document(
    reference: str, keyword: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dialled(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", dialled)
    for schema in ({keyword: reference}, {"properties": {"x": {"allOf": [{keyword: reference}]}}}):
        with pytest.raises(SchemaRefused) as caught:
            compile_schema(schema)
        assert caught.value.param.endswith(f"/{keyword}")


def doubling(applicator: str, levels: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"a{n}": {applicator: [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(levels)
    }
    return {"$defs": {**definitions, f"a{levels}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def nested(value: object, levels: int, key: str | None = None) -> object:
    for _ in range(levels):
        value = {key: value} if key else [value]
    return value


BOMBS: dict[str, tuple[object, str]] = {
    "allOf twice, thirty times": (doubling("allOf", 30), "at once"),
    "anyOf twice, thirty times": (doubling("anyOf", 30), "at once"),
    "unevaluated, tried again at each level": (
        {
            "$defs": {
                f"a{n}": {"unevaluatedProperties": False, "$ref": f"#/$defs/a{n + 1}"}
                for n in range(30)
            }
            | {"a30": {}},
            "$ref": "#/$defs/a0",
        },
        "at once",
    ),
    "a reference to itself": ({"$ref": "#"}, "without going deeper"),
    "a circle": (
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}},
            "$ref": "#/$defs/a",
        },
        "without going deeper",
    ),
    "too deep": (nested({}, 49, "not"), "deeper than 48"),
    "much too deep": (nested({}, 100_000, "not"), "deeper than 64"),
    "too many": ({"anyOf": [{"const": n} for n in range(6_000)]}, "more than 5000"),
    "too large": ({"description": "x" * 300_000}, "bytes"),
    "beyond both engines": ({"pattern": "((((a{1000}){1000}){1000}){1000})"}, "too large a one"),
    "no regular expression": ({"pattern": "("}, "no regular expression"),
    "no type": ({"type": "strin"}, "anyOf"),
    "an $id that is no URI": ({"$id": "http://[", "$ref": "#/a"}, "no URI"),
    "an inner $id that is none": (
        {"allOf": [{"$id": "//[::1", "$ref": "#/a"}], "$ref": "#/allOf/0"},
        "no URI",
    ),
    "a reference that is no URI": ({"$id": "http://h/a", "not": {"$ref": "//[/"}}, "no URI"),
    "an index of 5000 digits": (
        {"$ref": "#/allOf/" + "9" * 5000, "allOf": [{}]},
        "to what is not there",
    ),
    "an unknown dialect": ({"$schema": "https://evil.example/dialect"}, "dialect"),
    "no schema": ([], "an object, true or false"),
    "a number that is rounded": ({"maximum": 2**60 + 1}, "beyond 2"),
}


@pytest.mark.parametrize("bomb", list(BOMBS))
def test_a_schema_bomb_is_refused_before_it_is_used(bomb: str) -> None:
    schema, reason = BOMBS[bomb]
    with pytest.raises(SchemaRefused, match=reason):
        compile_schema(schema)


def test_a_recursive_schema_is_checked_as_deep_as_it_is_cheap() -> None:
    def tree(node: dict[str, Any]) -> dict[str, Any]:
        return {"$defs": {"node": node}, "$ref": "#/$defs/node"}

    again = {"$ref": "#/$defs/node"}
    plain = compile_schema(
        tree({"type": ["object", "null"], "properties": {"l": again, "r": again}})
    )
    assert plain.cost.deepest == 64
    assert check(plain, nested(None, 60, "l")) == ()
    assert check(plain, nested(1, 10, "l"))[0].path == "/l" * 10
    twice = tree(
        {"anyOf": [{"required": ["c"], "properties": {"c": again}}, {"properties": {"c": again}}]}
    )
    compiled = compile_schema(twice)
    assert 5 < compiled.cost.deepest < 20
    assert check(compiled, nested(1, 5, "c")) == ()
    assert "deeper" in check(compiled, nested(1, 40, "c"))[0].message


def test_a_value_that_costs_too_much_is_refused() -> None:
    compiled = compile_schema(
        {"$defs": doubling("allOf", 10)["$defs"], "items": {"$ref": "#/$defs/a0"}}
    )
    assert "checks" in check(compiled, ["x"] * 40_000)[0].message
    assert "more than" in check(compile_schema({}), ["x"] * 60_000)[0].message
    assert "more than" in check(compile_schema({}), "x" * (5 << 20))[0].message
    assert "deeper" in check(compile_schema({}), nested(1, 100_000))[0].message
    wide = check(compile_schema({"items": {"enum": list(range(4_000))}}), [-1] * 4_000)
    assert wide == (Problem("", "schema", "does not conform; it is too large to say where"),)
    assert MAX_LOCATED_WORK > 10_000  # a hundred arguments are always told where they are wrong


SLOW: dict[str, tuple[dict[str, Any], object]] = {
    "many patterns on a long text": ({"allOf": [{"pattern": f"x*{n}*"} for n in range(900)]},
                                     "x" * 3_000_000),
    "large literals": ({"items": {"enum": [{"a": [n] * 20} for n in range(1_000)]}},
                       [{"a": [999] * 20}] * 2_000),
    "division": ({"items": {"multipleOf": 0.0001}}, [1e300] * 40_000),
    "many branches": ({"items": {"oneOf": [{"const": n} for n in range(900)]}}, [5] * 2_000),
}  # fmt: skip


@pytest.mark.parametrize("slow", list(SLOW))
def test_what_would_take_seconds_is_refused_for_its_work(slow: str) -> None:
    schema, value = SLOW[slow]
    assert "checks" in check(compile_schema(schema), value)[0].message


def test_a_number_of_thousands_of_digits_is_refused_where_it_stands() -> None:
    found = check(compile_schema({"items": {"multipleOf": 3}}), [1, 10**3_000])
    assert [(one.path, one.keyword) for one in found] == [("/1", "type")]


def test_a_redos_pattern_is_linear() -> None:
    compiled = compile_schema({"pattern": "^(a+)+$"})
    assert compiled.engine == "linear"
    assert check(compiled, "a" * 1_000_000 + "!")[0].keyword == "pattern"


def test_a_work_estimate_is_what_is_tried() -> None:
    assert measure({"properties": {"a": {}, "b": {"allOf": [{}, {}]}}}).work == (1, 4, 4)
    assert measure(doubling("allOf", 3)).at(0) == 30
    assert measure({"type": "array", "items": {"$ref": "#"}}).at(9) == 19


async def test_a_schema_is_compiled_once_a_pin_and_forgotten_beyond_the_bound() -> None:
    cache = SchemaCache(bound=2)
    one = await cache.compiled("sha256:a", "inputSchema", {"type": "object"})
    assert await cache.compiled("sha256:a", "inputSchema", {"type": "object"}) is one
    await cache.compiled("sha256:a", "outputSchema", {})
    await cache.compiled("sha256:a", "inputSchema", {"type": "object"})
    await cache.compiled("sha256:b", "inputSchema", {})
    assert list(cache.kept) == [("sha256:a", "inputSchema"), ("sha256:b", "inputSchema")]


async def test_what_the_linear_engine_refuses_is_checked_by_a_process(
    killable: KillableValidator,
) -> None:
    compiled = compile_schema(
        {"properties": {"p": {"pattern": r"^(?=.*\d)(\w)\w*\1$"}, "n": {"type": "integer"}}}
    )
    assert compiled.engine == "killable"
    assert await problems(compiled, {"p": "a1a"}, killable) == ()
    found = await problems(compiled, {"p": "aa", "n": "x"}, killable)
    assert {one.path for one in found} == {"/p", "/n"}
    linear = compile_schema({"type": "integer"})
    killable.timeout_s = 0  # nobody asks it where the linear engine serves
    assert (await problems(linear, "x", killable))[0].keyword == "type"


async def test_a_process_that_takes_long_is_killed_and_the_next_value_is_checked(
    killable: KillableValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = compile_schema({"items": {"pattern": r"^(?=a)(a|a)*(a|a)*(a|a)*\1b$"}, "type": "array"})
    quick = compile_schema({"pattern": "^(?=a)"})
    assert await problems(quick, "a", killable) == ()
    assert killable.child is not None
    first = killable.child
    killable.timeout_s = 0.2
    with pytest.raises(ValidationTimedOut):
        await problems(slow, ["a" * 30 for _ in range(2_000)], killable)
    assert killable.child is None and first.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(first.pid, 0)
    killable.timeout_s = 20.0
    assert await problems(quick, "a", killable) == ()
    assert (await problems(quick, "b", killable))[0].keyword == "pattern"
    monkeypatch.setattr(killable_module, "MAX_WAITING", 0)
    with pytest.raises(ValidationTimedOut, match="too many"):
        await problems(quick, "a", killable)


async def test_who_stops_waiting_leaves_no_process_in_the_middle(
    killable: KillableValidator,
) -> None:
    slow = compile_schema({"items": {"pattern": r"^(?=a)(a|a)*(a|a)*(a|a)*\1b$"}})
    quick = compile_schema({"pattern": "^(?=a)"})
    assert await problems(quick, "a", killable) == ()
    first = killable.child
    task = asyncio.create_task(problems(slow, ["a" * 30] * 2_000, killable))
    while killable.waiting == 0:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert first is not None and first.returncode is not None and killable.waiting == 0
    assert (await problems(quick, "b", killable))[0].keyword == "pattern"


UNIQUE = compile_schema({"type": "array", "uniqueItems": True})
LARGE = [{"a": 2**63 + at} for at in range(20_000)]
"""Integers that are compared two by two: 25 seconds of them."""


async def test_a_large_value_is_checked_beside_the_event_loop() -> None:
    """The library would take 25 seconds; it is stopped after one, and others go on meanwhile."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    pool = ValidatorPool()
    ticking = asyncio.create_task(tick())
    try:
        with pytest.raises(ValidationTimedOut):
            await problems(UNIQUE, LARGE, pool)
        assert ticks > 20  # of about a thousand
        assert await problems(UNIQUE, [{"a": 1}] * 100, pool) != ()
        assert await problems(UNIQUE, [{"a": at} for at in range(20_000)], pool) == ()
    finally:
        ticking.cancel()
        await pool.close()


class NeverAsked:
    async def problems(self, compiled: CompiledSchema, value: object) -> tuple[Problem, ...]:
        raise AssertionError("a small value is checked at once")


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "required": ["a"]}, {"a": "x" * 100_000}),
        ({"type": "object", "required": ["a"]}, {}),
        ({"items": {"type": "integer"}}, [1] * 500),
        ({"uniqueItems": True}, list(range(60))),
    ],
)
async def test_a_small_value_waits_for_no_process(schema: Any, value: Any) -> None:
    assert await problems(compile_schema(schema), value, NeverAsked()) == check(
        compile_schema(schema), value
    )


async def test_one_slow_value_leaves_a_process_to_others() -> None:
    pool = ValidatorPool()
    slow = asyncio.create_task(problems(UNIQUE, LARGE, pool))
    try:
        while sum(one.waiting for one in pool.validators) == 0:
            await asyncio.sleep(0)
        assert await problems(UNIQUE, [{"a": at} for at in range(100)], pool) == ()
        busy = [one.waiting for one in pool.validators]
        assert slow.done() or sorted(busy) == [0, 1]
    finally:
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        await pool.close()


OUTPUT = compile_schema({"type": "object", "properties": {"n": {"type": "integer"}}})


@pytest.mark.parametrize(
    ("result", "path"),
    [
        ({"content": [], "structuredContent": {"n": 1}}, None),
        ({"content": [], "structuredContent": {"n": "x"}}, "/structuredContent/n"),
        ({"content": []}, "/structuredContent"),
        ({"content": [{"type": "text", "text": "no"}], "isError": True}, None),
        ({"content": [{}] * 257, "isError": True}, "/content"),
        ({"content": "x"}, "/content"),
        ({"content": [{"type": "text", "text": "x" * 2_000}], "isError": True}, ""),
        ({"content": [], "structuredContent": nested(1, 70)}, "/structuredContent/0/0/0/..."),
    ],
)
async def test_a_result_is_held_to_its_bounds_and_its_schema(
    result: dict[str, Any], path: str | None, killable: KillableValidator
) -> None:
    found = await result_problems(result, OUTPUT, killable, ResultBounds(size_bytes=1_500))
    assert [one.path for one in found] == ([] if path is None else [path])
