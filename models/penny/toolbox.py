"""Made-up tools, requests that need them, the calls to make and what to say of the result.

Two sources: the hand-written tools of `tools.toml`, and tools composed from a verb, a noun and a
few parameters, so that penny learns to copy names and values and learns no tool by heart. It knows
no chat template.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from models.penny.talk import table
from models.penny.words import MAX_TRIES, Draw, with_article

Schema = dict[str, Any]

DOMAINS = ("example.com", "mail.org", "tollgate.dev", "post.net", "office.io")
FOLDERS = ("/home", "/tmp", "docs", "src", "/var/log", "reports", "data")
ANSWERABLE = ("add", "echo")
"""Subjects of tools whose requests penny can answer itself."""
REFUSAL = "I am sorry, I have no tool for that."
ENDINGS = (".txt", ".md", ".csv", ".log", ".toml", ".json")


@dataclass(frozen=True)
class ToolUse:
    """One tool and one request for it."""

    tool: Schema
    """OpenAI form: `{"type": "function", "function": {name, description, parameters}}`."""
    request: str
    arguments: dict[str, Any]
    result: dict[str, Any] | str
    """JSON, or plain text as MCP tools return it."""
    answer: str
    refusal: str
    """The answer to the request when this tool is not offered."""
    subject: str
    """Tools of one subject must not be offered together: a request could mean either."""

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])


def email(draw: Draw) -> str:
    name = draw.word("name").lower()
    return f"{name}{draw.pick(['', '.' + draw.made_up_word()])}@{draw.pick(DOMAINS)}"


def path(draw: Draw) -> str:
    return f"{draw.pick(FOLDERS)}/{draw.made_up_word()}{draw.pick(ENDINGS)}"


KINDS: dict[str, tuple[str, Callable[[Draw], Any]]] = {
    "phrase": ("string", Draw.phrase),
    "code": ("string", Draw.code),
    "symbol": ("string", lambda draw: draw.made_up_word()[:5].upper()),
    "made_up": ("string", Draw.made_up_word),
    "date": ("string", Draw.date),
    "time": ("string", Draw.clock_time),
    "email": ("string", email),
    "path": ("string", path),
    "small": ("integer", lambda draw: draw.integer(1, 30)),
    "int": ("integer", lambda draw: draw.integer(1, draw.pick([99, 999, 9999]))),
    "price": ("number", lambda draw: draw.integer(1, 99999) / 100),
    "bool": ("boolean", lambda draw: True),
    "person": ("string", Draw.person),
    "place": ("string", Draw.place),
    "tags": ("array", lambda draw: draw.words("adjective", draw.integer(1, 3))),
    "topics": ("array", lambda draw: draw.words("topic", draw.integer(1, 3))),
    "people": ("array", lambda draw: draw.words("name", draw.integer(1, 3))),
}
"""Kind of a slot: its JSON type and its values. Beside these `enum A B C` and the word lists."""


def value_of(draw: Draw, kind: str) -> Any:
    """A JSON value of a slot kind."""
    name, *choices = kind.split()
    if name == "enum":
        return draw.pick(choices)
    return KINDS[name][1](draw) if name in KINDS else draw.word(name)


def schema_of(kind: str) -> Schema:
    """The JSON schema of a slot kind."""
    name, *choices = kind.split()
    if name == "enum":
        return {"type": "string", "enum": choices}
    kind = KINDS[name][0] if name in KINDS else "string"
    return {"type": kind, "items": {"type": "string"}} if kind == "array" else {"type": kind}


def tool_schema(
    draw: Draw, name: str, about: str, properties: dict[str, Schema], required: list[str]
) -> Schema:
    """One tool as the API takes it; some properties carry a description."""
    described, pydantic = {}, draw.chance(0.2)
    for key, schema in properties.items():
        about_it = {"description": f"The {key.replace('_', ' ')}."} if draw.chance(0.3) else {}
        titled = {"title": key.replace("_", " ").title()} if pydantic else {}
        described[key] = {**titled, **schema, **about_it}
    parameters: Schema = {"type": "object", "properties": described}
    if required or draw.chance(0.5):
        parameters["required"] = required
    if draw.chance(0.2):
        parameters["additionalProperties"] = False
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


@cache
def written_tools(held_out: bool) -> list[dict[str, Any]]:
    """The entries of `tools.toml` on one side of the split; every sixth is held out whole."""
    return [tool for at, tool in enumerate(table("tools")["tool"]) if (at % 6 == 5) == held_out]


def written_use(draw: Draw, *, known: bool) -> ToolUse:
    """A request for a hand-written tool; known: one that training has, on either side.

    Some requests have no word that could be held out, so that their text decides the side.
    """
    for _ in range(MAX_TRIES):
        use = use_of(draw, draw.pick(written_tools(draw.held_out and not known)))
        if draw.admits("request", use.request):
            return use
    raise AssertionError("no request for a hand-written tool on this side of the split")


def use_of(draw: Draw, entry: dict[str, Any]) -> ToolUse:
    """A request for one entry of `tools.toml`."""
    request_form = draw.pick(entry["ask"])
    properties, required, arguments, spoken = {}, [], {}, {}
    for slot, declared in entry["slots"].items():
        kind, names = declared.split(": ")
        key = draw.pick(names.split("|"))
        properties[key] = schema_of(kind)
        marker = "{" + slot + "}"
        if all(marker in form for form in entry["ask"]):
            required.append(key)
        spoken[slot] = value_of(draw, kind)
        if marker in request_form:
            arguments[key] = spoken[slot]
    result = {key: value_of(draw, kind.split(": ")[0]) for key, kind in entry["result"].items()}
    said = {**spoken, **result}
    name, about = draw.pick(entry["names"]), draw.pick(entry["about"])
    request = request_form.format(**said)
    return ToolUse(
        tool=tool_schema(draw, name, about, properties, required),
        request=request[:1].upper() + request[1:],
        arguments=arguments,
        result=result,
        answer=entry["answer"][0].format(**said),
        refusal=REFUSAL,
        subject=entry["names"][0],
    )


def tool_name(draw: Draw, verb: str, noun: str) -> str:
    form = draw.pick(table("tools")["composed"]["name"])
    return str(form.format(v=verb, n=noun, N=noun.title(), x=draw.made_up_word()))


def spoken_parameters(draw: Draw) -> tuple[dict[str, Schema], list[str], dict[str, Any], list[str]]:
    """One to four parameters: properties, required ones, arguments, and the clauses that say them.

    A parameter that the request does not mention is optional and not among the arguments.
    """
    properties: dict[str, Schema] = {}
    arguments: dict[str, Any] = {}
    clauses, required = [], list[str]()
    entries = table("tools")["composed"]["parameter"]
    for at, entry in enumerate(draw.rng.sample(entries, draw.integer(1, 4))):
        kind = entry["kind"]
        key = draw.pick([key for key in entry["names"] if key not in properties])
        properties[key] = schema_of(kind)
        if at > 0 and draw.chance(0.3):
            continue
        if kind != "bool" and draw.chance(0.7):
            required.append(key)
        arguments[key] = value = value_of(draw, kind)
        spoken = ", ".join(value) if isinstance(value, list) else value
        clauses.append(draw.pick(entry["say"]).format(v=spoken, k=key))
    if draw.chance(0.3):
        draw.rng.shuffle(clauses)
    clauses.sort(key=lambda clause: clause.startswith("and "))
    return properties, required, arguments, clauses


def composed_use(draw: Draw) -> ToolUse:
    """A request for a tool made of a verb, a noun and a few parameters."""
    composed = table("tools")["composed"]
    verb, noun = draw.pick(composed["verb"]), draw.word("noun")
    properties, required, arguments, clauses = spoken_parameters(draw)
    the_noun = draw.pick([with_article(noun), f"the {noun}", f"the {noun}"])
    body = " ".join([draw.pick(verb["say"]), the_noun, *clauses])
    request = draw.wording(body, composed["ask"]).format(r=body, l=body[:1].lower() + body[1:])
    done = verb["done"]
    if draw.chance(0.15):
        error = draw.pick(composed["error"])
        result, answer = {"error": error}, f"I am sorry, the tool failed: {error}."
    else:
        reference = draw.code()
        result = {draw.pick(["id", "reference", "number"]): reference, "status": done}
        answer = composed["answer"][0].format(n=noun, id=reference, done=done)
    about = draw.pick(composed["about"])
    about = about.format(v=verb["name"], V=verb["name"].title(), n=noun, a=with_article(noun))
    name = tool_name(draw, verb["name"], noun)
    return ToolUse(
        tool=tool_schema(draw, name, about, properties, required),
        request=request,
        arguments=arguments,
        result=result,
        answer=answer,
        refusal=REFUSAL,
        subject=f"{verb['name']} {noun}",
    )


def plain_use(draw: Draw) -> ToolUse:
    """A request that says which value each parameter has, for a tool of any name.

    Nothing of it can be learnt by heart: names, keys and values have to be copied.
    """
    first, second = draw.made_up_word(), draw.word("noun")
    name = draw.pick(
        [first, f"{first}_{second}", f"{second}-{first}", f"get-{second}", f"{second}"]
    )
    kinds = ("phrase", "code", "int", "small", "person", "place", "date", "made_up", "price")
    keys = draw.words("noun", draw.rng.choices([0, 1, 2, 3], [1, 5, 4, 2])[0])
    if keys and draw.chance(0.3):
        keys[0] = draw.pick(
            ["a", "text", "message", "query", "input", "value", draw.made_up_word()]
        )
    if len(keys) > 1 and keys[0] == "a":
        keys[1] = "b"
    chosen = {key: draw.pick(kinds) for key in keys}
    arguments = {key: value_of(draw, kind) for key, kind in chosen.items()}
    forms = table("tools")["plain"]
    parts = [draw.pick(forms["part"]).format(k=key, v=value) for key, value in arguments.items()]
    asked = draw.pick(forms["ask"] if parts else forms["ask_alone"])
    request = asked.format(n=name, p=" and ".join(parts))
    content = draw.phrase() if draw.chance(0.5) else f"{second} {draw.code()}"
    return ToolUse(
        tool=tool_schema(
            draw,
            name,
            draw.pick(forms["about"]).format(n=second, m=draw.made_up_word()),
            {key: schema_of(kind) for key, kind in chosen.items()},
            list(chosen),
        ),
        request=request,
        arguments=arguments,
        result=content,
        answer=f"The tool says: {content}",
        refusal=REFUSAL,
        subject=name,
    )


def tool_use(draw: Draw, *, known: bool = False) -> ToolUse:
    (kind,) = draw.rng.choices(["written", "composed", "plain"], [4, 5, 3])
    if kind == "written":
        return written_use(draw, known=known)
    return composed_use(draw) if kind == "composed" else plain_use(draw)


def different_uses(draw: Draw, count: int, *, known: bool = False) -> list[ToolUse]:
    """`count` uses of tools that share neither name nor subject."""
    uses: list[ToolUse] = []
    for _ in range(MAX_TRIES):
        candidate = tool_use(draw, known=known)
        if all(candidate.name != use.name and candidate.subject != use.subject for use in uses):
            uses.append(candidate)
        if len(uses) == count:
            return uses
    raise AssertionError("not enough different tools")
