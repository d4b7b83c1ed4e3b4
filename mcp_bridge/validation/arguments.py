"""Validates JSON values against schemas in bounded time: arguments, results, search requests.

`jsonschema-rs` validates with linear-time regular expressions and without retrieval. A `$ref` that
leaves the document is refused, and so is a schema or value that could take long to check
(`schema_cost`). The library holds the interpreter's lock while it validates, so a thread would not
help: what may take more than some milliseconds is checked in a process that is killed when it
takes too long (`sandboxed_validator`), and so are look-around and back references, which the linear
engine cannot read.

MCP 2025-11-25 and later, server/tools: a schema without `$schema` is 2020-12. `format` is an
annotation, as both drafts have it by default. Problems name the JSON pointer of the value and
the keyword, and quote no value.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import jsonschema_rs
import msgspec

from mcp_bridge.canonical_json import (
    canonical_bytes,
    digest_of_bytes,
    plain_json,
    pointer,
    short_json,
    walk,
)
from mcp_bridge.errors import NotCanonical, SchemaRefused
from mcp_bridge.text_safety.hidden_text import visible
from mcp_bridge.validation.schema_cost import MAX_SCHEMA_DEPTH, Cost, Schema, measure

Engine = Literal["linear", "killable"]
P = ParamSpec("P")
T = TypeVar("T")

DIALECTS: Mapping[str, tuple[type[jsonschema_rs.Validator], int]] = {
    "https://json-schema.org/draft/2020-12/schema": (
        jsonschema_rs.Draft202012Validator,
        jsonschema_rs.Draft202012,
    ),
    "https://json-schema.org/draft/2019-09/schema": (
        jsonschema_rs.Draft201909Validator,
        jsonschema_rs.Draft201909,
    ),
    "http://json-schema.org/draft-07/schema": (
        jsonschema_rs.Draft7Validator,
        jsonschema_rs.Draft7,
    ),
    "http://json-schema.org/draft-06/schema": (
        jsonschema_rs.Draft6Validator,
        jsonschema_rs.Draft6,
    ),
}
DEFAULT_DIALECT = "https://json-schema.org/draft/2020-12/schema"
OLD = ("http://json-schema.org/draft-07/schema", "http://json-schema.org/draft-06/schema")

MAX_SCHEMA_BYTES = 256 << 10
MAX_VALUE_BYTES = 4 << 20
MAX_VALUE_NODES = 50_000
MAX_NUMBER_BITS = 1_024
MAX_WORK = 500_000
"""Subschemas tried for one value: a quarter of a second if all are slow."""
MAX_LOOP_VALUES = 1_000
MAX_LOOP_WORK = 10_000
MAX_LOOP_LOCATED = 500
"""The values, and the work, that are checked on the event loop: some milliseconds."""
MAX_LOOP_UNIQUE = 64
"""The values that are checked there under `uniqueItems`, which compares every two large integers:
20,000 took 25 seconds."""
CHARS_PER_VALUE = 256
"""Characters of text that patterns read in the time of one value."""
MAX_LOCATED_WORK = 50_000
"""Work up to which problems are located, which costs a hundred times as much."""
LITERALS_PER_WORK = 10
MAX_PROBLEMS = 16
MAX_MESSAGE_CHARS = 300
REGEX_BYTES = 256 << 10
"""Size of a compiled regular expression, which bounds the time for each character."""
KILLABLE_REGEX_BYTES = 4 << 20
BACKTRACK_LIMIT = 10_000_000
MAX_COMPILED = 4_096

LINEAR = jsonschema_rs.RegexOptions(size_limit=REGEX_BYTES, dfa_size_limit=1 << 20)
BACKTRACKING = jsonschema_rs.FancyRegexOptions(
    backtrack_limit=BACKTRACK_LIMIT, size_limit=KILLABLE_REGEX_BYTES, dfa_size_limit=1 << 20
)


class Problem(msgspec.Struct, frozen=True):
    """A violation: its place (JSON pointer), the keyword of the schema, and a message."""

    path: str
    keyword: str
    message: str


class ValueSizes(msgspec.Struct, frozen=True):
    """The sizes of a JSON value: its values, how deep they nest, the characters of its texts."""

    values: int
    depth: int
    chars: int


class CompiledSchema(msgspec.Struct, frozen=True):
    """A schema that is ready for validation, with its cost."""

    digest: str
    schema: Schema
    engine: Engine
    cost: Cost
    validator: Any
    known: Mapping[str, Schema]


class KillableEngine(Protocol):
    async def problems(self, compiled: CompiledSchema, value: object) -> tuple[Problem, ...]: ...


def compile_schema(schema: object, known: Mapping[str, Schema] | None = None) -> CompiledSchema:
    """Compile a schema. `known`: documents that it may refer to, by URI; nothing is fetched.

    Raises: SchemaRefused, with the pointer, for no schema, an unknown dialect, or exceeded bounds.
    """
    try:
        encoded = plain_json(schema) or canonical_bytes(schema)
    except NotCanonical as error:
        raise SchemaRefused(error.param, error.message) from None
    if len(encoded) > MAX_SCHEMA_BYTES:
        raise SchemaRefused("", f"{len(encoded)} bytes, more than {MAX_SCHEMA_BYTES}")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise SchemaRefused("", "a schema is an object, true or false")
    if encoded.count(b"{") + encoded.count(b"[") > MAX_SCHEMA_DEPTH and any(
        len(parts) > MAX_SCHEMA_DEPTH for parts, _ in walk(schema)
    ):
        raise SchemaRefused("", f"nests deeper than {MAX_SCHEMA_DEPTH}")
    documents = known or {}
    dialect = dialect_of(schema, documents)
    cost = measure(schema, documents, old=dialect in OLD)
    engine, validator = validator_of(dialect, schema, documents)
    return CompiledSchema(digest_of_bytes(encoded), schema, engine, cost, validator, documents)


def dialect_of(schema: Schema, known: Mapping[str, Schema]) -> str:
    """Return the URI of the schema's dialect, or of its known metaschema's. Raises:
    SchemaRefused."""
    named = schema.get("$schema", DEFAULT_DIALECT)
    bare = named.rstrip("#") if isinstance(named, str) else ""
    if bare in DIALECTS:
        return bare
    if bare in known and known[bare].get("$schema", "") in DIALECTS:
        return str(known[bare]["$schema"])
    raise SchemaRefused("/$schema", "a dialect that is not known: 2020-12, 2019-09, draft-7 and 6")


def validator_of(
    dialect: str, schema: Schema, known: Mapping[str, Schema]
) -> tuple[Engine, jsonschema_rs.Validator]:
    try:
        return "linear", build(dialect, schema, known, LINEAR)
    except jsonschema_rs.ValidationError as error:
        if not any(step in ("pattern", "patternProperties") for step in error.instance_path):
            raise refused(error) from None
    except ValueError as error:
        raise SchemaRefused("", str(error)[:MAX_MESSAGE_CHARS]) from None
    try:
        return "killable", build(dialect, schema, known, BACKTRACKING)
    except jsonschema_rs.ValidationError as error:
        raise refused(error) from None


def build(
    dialect: str,
    schema: Schema,
    known: Mapping[str, Schema],
    patterns: jsonschema_rs.RegexOptions | jsonschema_rs.FancyRegexOptions,
) -> jsonschema_rs.Validator:
    validator, draft = DIALECTS[dialect]
    documents: list[tuple[str, Any]] = list(known.items())
    registry = jsonschema_rs.Registry(documents, draft=draft) if documents else None
    return validator(
        schema,  # type: ignore[arg-type]
        validate_formats=False,
        registry=registry,
        mask="the value",
        pattern_options=patterns,
        offline=True,
    )


def refused(error: jsonschema_rs.ValidationError) -> SchemaRefused:
    path = pointer(tuple(error.instance_path))
    if 'not a "regex"' in error.message:
        return SchemaRefused(path, "a pattern that is no regular expression, or too large a one")
    return SchemaRefused(path, sentence(error))


def sentence(error: jsonschema_rs.ValidationError) -> str:
    return visible(error.message[:MAX_MESSAGE_CHARS])


def check(compiled: CompiledSchema, value: object) -> tuple[Problem, ...]:
    """Return at most MAX_PROBLEMS problems of `value`.

    Runs in this thread, and may take a second or, unless the engine is `linear`, forever: where
    others wait, `problems` is called instead.
    """
    sizes = measured(value)
    if isinstance(sizes, Problem):
        return (sizes,)
    if sizes.depth > compiled.cost.deepest:
        return (Problem("", "schema", f"nests deeper than {compiled.cost.deepest} here"),)
    work = work_of(compiled, sizes)
    if work > MAX_WORK:
        return (Problem("", "schema", f"takes more than {MAX_WORK} checks by this schema"),)
    if compiled.validator.is_valid(value):
        return ()
    if locating_work(compiled, work) > MAX_LOCATED_WORK:
        return (Problem("", "schema", "does not conform; it is too large to say where"),)
    return located(compiled, value)


def quick_check(compiled: CompiledSchema, value: object) -> tuple[Problem, ...] | None:
    """Return what `check` does, if that takes at most some milliseconds; None: it may not."""
    if compiled.engine != "linear":
        return None
    sizes = measured(value, MAX_LOOP_UNIQUE if compiled.cost.is_unique else MAX_LOOP_VALUES)
    if isinstance(sizes, Problem) or sizes.depth > compiled.cost.deepest:
        return None
    work = work_of(compiled, sizes)
    if work > MAX_LOOP_WORK:
        return None
    if compiled.validator.is_valid(value):
        return ()
    return located(compiled, value) if locating_work(compiled, work) <= MAX_LOOP_LOCATED else None


def work_of(compiled: CompiledSchema, sizes: ValueSizes) -> int:
    """Return how many subschemas may be tried for a value."""
    return (sizes.values + sizes.chars // CHARS_PER_VALUE) * compiled.cost.at(sizes.depth)


def locating_work(compiled: CompiledSchema, work: int) -> int:
    """Return the work of locating problems, of which each repeats the list that was broken."""
    return work * (1 + compiled.cost.longest_list // LITERALS_PER_WORK)


def located(compiled: CompiledSchema, value: object) -> tuple[Problem, ...]:
    errors = compiled.validator.iter_errors(value)
    return tuple(problem_of(error) for _, error in zip(range(MAX_PROBLEMS), errors, strict=False))


def measured(value: object, max_values: int = MAX_VALUE_NODES) -> ValueSizes | Problem:
    """Return the sizes of a JSON value, or the bound that it breaks."""
    nodes = depth = size = 0
    try:
        for parts, one in walk(value):
            nodes += 1
            depth = max(depth, len(parts))
            size += len(one) if isinstance(one, str) else 1
            size += sum(map(len, one)) if isinstance(one, dict) else 0
            if isinstance(one, int) and one.bit_length() > MAX_NUMBER_BITS:
                return Problem(
                    pointer(parts), "type", f"a number of more than {MAX_NUMBER_BITS} bits"
                )
            if nodes > max_values or size > MAX_VALUE_BYTES:
                return Problem(
                    "", "schema", f"more than {max_values} values or {MAX_VALUE_BYTES} bytes"
                )
    except (NotCanonical, TypeError) as error:
        return Problem("", "schema", str(error)[:MAX_MESSAGE_CHARS])
    return ValueSizes(nodes, depth, size)


def problem_of(error: jsonschema_rs.ValidationError) -> Problem:
    path = visible(pointer(tuple(error.instance_path)))
    return Problem(path, error.kind.name, sentence(error))


async def beside(value: object, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do work on a value: on the event loop if it is short, else in a thread beside it."""
    if short_json(value) is not None:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


class SchemaCache:
    """A cache of at most `bound` compiled schemas by the pins of their tools."""

    def __init__(self, bound: int = MAX_COMPILED) -> None:
        self.bound = bound
        self.kept: OrderedDict[tuple[str, str], CompiledSchema] = OrderedDict()

    async def compiled(self, pin: str, part: str, schema: object) -> CompiledSchema:
        """Return `schema` compiled. `pin`: digest of its tool; `part`: which of the tool's schemas.
        Raises: SchemaRefused."""
        key = (pin, part)
        found = self.kept.get(key)
        if found is None:
            found = self.kept[key] = await beside(schema, compile_schema, schema)
            if len(self.kept) > self.bound:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        return found


async def problems(
    compiled: CompiledSchema, value: object, killable: KillableEngine
) -> tuple[Problem, ...]:
    """Return the problems of a value: checked here if that is quick, else by `killable`. Raises:
    ValidationTimedOut."""
    found = quick_check(compiled, value)
    return await killable.problems(compiled, value) if found is None else found
