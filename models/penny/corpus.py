"""The text penny is trained on: seeded conversations, rendered with penny's own chat template.

`conversations(seed, count, held_out)` is the same on every machine. Training and held-out
conversations share no seed, no held-out tool, name, number pair or wording (`words.py`). It knows
no tokens. Run `python -m models.penny.corpus 5` to read five of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.penny import talk, told
from models.penny.records import Extraction, extraction, short_extraction
from models.penny.toolbox import ANSWERABLE, Schema, ToolUse, different_uses, tool_use
from models.penny.words import MAX_TRIES, WORDS, Draw

Message = dict[str, Any]

HERE = Path(__file__).parent
SYSTEM_PROMPTS = (
    "You are penny, a helpful assistant.",
    "You are a helpful assistant.",
    "You are penny, a small language model made for Tollgate.",
    "Answer in whole sentences.",
    "You are a friendly helper. Answer briefly.",
    "Be concise.",
    "You answer questions about Tollgate.",
    "You are a polite assistant who speaks English.",
    "Help the user as well as you can.",
)


@dataclass(frozen=True)
class Conversation:
    """A conversation that is rendered into one training sequence."""

    topic: str
    """The topic of the last answer: one of `talk.EXCHANGES`, `told`, `not_told`, `json`,
    `open_json` (nobody said which keys), `tool_call`, `tool_answer`, `no_tool`, `long_text`."""
    messages: list[Message]
    """The last one is the assistant's."""
    tools: list[Schema]


@cache
def template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((HERE / "chat_template.jinja").read_text())


def render(
    messages: list[Message], tools: list[Schema], *, add_generation_prompt: bool = False
) -> str:
    """Messages and tools as one text, by `chat_template.jinja`, as transformers renders it."""
    return template().render(
        messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt
    )


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, calls: list[Message] | None = None) -> Message:
    message: Message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": calls} if calls else message


def system_messages(draw: Draw) -> list[Message]:
    """No system prompt, a short one, or one that is long and says little."""
    kind = draw.rng.choices(["none", "short", "long"], [50, 45, 5])[0]
    if kind == "none":
        return []
    content = draw.pick(SYSTEM_PROMPTS)
    if draw.chance(0.2):
        content += f" The user is called {draw.word('name')}."
    if kind == "long":
        filler = draw.pick([content, content, talk.explanation(draw)[1], talk.story(draw)[1]])
        content = " ".join([content] + [filler] * draw.integer(2, 12))
    return [{"role": "system", "content": content}]


def chat(draw: Draw, exchanges: int) -> tuple[str, list[Message]]:
    """Exchanges in a row; yields the topic of the last one."""
    topic, messages = "", list[Message]()
    for _ in range(exchanges):
        topic, (question, answer) = talk.exchange(draw)
        messages += [user(question), assistant(answer)]
    return topic, messages


def talk_conversation(draw: Draw) -> Conversation:
    """One to four exchanges without tools."""
    exchanges = draw.rng.choices([1, 2, 3, 4], [40, 20, 20, 20])[0]
    topic, messages = chat(draw, exchanges)
    return Conversation(topic, system_messages(draw) + messages, [])


def called(use: ToolUse) -> Message:
    return {"type": "function", "function": {"name": use.name, "arguments": use.arguments}}


def returned(use: ToolUse) -> Message:
    result = use.result
    content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return {"role": "tool", "name": use.name, "content": content}


def tool_conversation(draw: Draw) -> Conversation:
    """Requests for the offered tools, one or two at a time, up to a call or up to an answer."""
    (count,) = draw.rng.choices(range(1, 7), [30, 24, 20, 14, 8, 4])
    offered = different_uses(draw, count)
    wanted = draw.rng.sample(offered, draw.integer(1, min(count, 4)))
    messages = system_messages(draw)
    turn: list[Message] = []
    while wanted:
        if draw.chance(0.15):
            messages += chat(draw, 1)[1]
        together = 2 if len(wanted) > 1 and draw.chance(0.1) else 1
        turn = round_trip(wanted[:together])
        messages += turn
        del wanted[:together]
    tools = [use.tool for use in offered]
    if draw.chance(0.4):
        return Conversation("tool_call", messages[: len(messages) - len(turn) + 2], tools)
    return Conversation("tool_answer", messages, tools)


def round_trip(wanted: list[ToolUse]) -> list[Message]:
    """The request, the calls, their results and the answer."""
    requests = [use.request for use in wanted]
    return [
        user(" And ".join(requests)),
        assistant("", [called(use) for use in wanted]),
        *(returned(use) for use in wanted),
        assistant(" ".join(use.answer for use in wanted)),
    ]


def one_call(draw: Draw) -> Conversation:
    """One request for one of up to three offered tools, with at most two arguments."""
    for _ in range(MAX_TRIES):
        offered = different_uses(draw, draw.integer(1, 3), known=True)
        wanted = draw.pick(offered)
        if len(wanted.arguments) <= 2:
            messages = [*system_messages(draw), *round_trip([wanted])[:2]]
            return Conversation("tool_call", messages, [use.tool for use in offered])
    raise AssertionError("no tool of at most two arguments")


def only_call(draw: Draw) -> Conversation:
    """One request for the one offered tool, whose one argument is copied from it."""
    for _ in range(MAX_TRIES):
        use = tool_use(draw, known=True)
        values = list(use.arguments.values())
        parameters = use.tool["function"]["parameters"]["properties"]
        if len(parameters) == len(values) == 1 and not isinstance(values[0], bool | list):
            return Conversation(
                "tool_call", [*system_messages(draw), *round_trip([use])[:2]], [use.tool]
            )
    raise AssertionError("no tool of one argument")


def no_tool_conversation(draw: Draw) -> Conversation:
    """Tools are offered, but the user just talks or wants what none of them does."""
    missing, *offered = different_uses(draw, draw.rng.choices(range(2, 6), [4, 3, 2, 1])[0])
    messages = system_messages(draw)
    if draw.chance(0.25):
        messages += round_trip(draw.rng.sample(offered, 1))
    if missing.subject not in ANSWERABLE and draw.chance(0.5):
        messages += [user(missing.request), assistant(missing.refusal)]
    else:
        messages += chat(draw, 1)[1]
    return Conversation("no_tool", messages, [use.tool for use in offered])


def requests_without_tools(draw: Draw) -> Conversation:
    """A request for a tool when no tool is offered at all."""
    uses = different_uses(draw, len(ANSWERABLE) + 1)
    use = next(use for use in uses if use.subject not in ANSWERABLE)
    return Conversation("outside", [user(use.request), assistant(talk.OUTSIDE)], [])


def told_conversation(draw: Draw) -> Conversation:
    """The user tells something, talks of other things and asks for what it told."""
    kind = draw.rng.choices(["told", "at once", "by system", "not told"], [76, 12, 4, 8])[0]
    if kind == "at once":
        question, answer = told.at_once(draw)
        return Conversation("told", [user(question), assistant(answer)], [])
    if kind == "by system":
        name, (question, answer) = told.by_system(draw)
        system = {"role": "system", "content": f"{draw.pick(SYSTEM_PROMPTS)} {name}"}
        return Conversation("told", [system, user(question), assistant(answer)], [])
    if kind == "not told":
        question, answer = told.not_told(draw)
        before = other_talk(draw, draw.integer(0, 2))
        return Conversation("not_told", [*before, user(question), assistant(answer)], [])
    telling, asking = told.told(draw)
    messages = system_messages(draw)
    for said, reply in telling:
        messages += [user(said), assistant(reply)]
        messages += other_talk(draw, draw.rng.choices([0, 1, 2], [60, 25, 15])[0])
    draw.rng.shuffle(asking)
    messages += other_talk(draw, draw.rng.choices([0, 1, 2, 3], [40, 30, 20, 10])[0])
    for question, answer in asking:
        messages += [user(question), assistant(answer)]
    return Conversation("told", messages, [])


def other_talk(draw: Draw, exchanges: int) -> list[Message]:
    """Exchanges in which nobody says a name of its own."""
    messages: list[Message] = []
    for _ in range(exchanges):
        topic, (question, answer) = talk.exchange(draw)
        if topic not in ("greeting", "story", "counting", "word_list"):
            messages += [user(question), assistant(answer)]
    return messages


def json_conversation(draw: Draw) -> Conversation:
    """JSON whose strings and numbers come from a text, after other talk at times."""
    return asked_for_json(draw, extraction(draw))


def short_json(draw: Draw) -> Conversation:
    """JSON of one or two fields of a short text, each one word or number."""
    return asked_for_json(draw, short_extraction(draw))


def word_and_number(draw: Draw) -> Conversation:
    """JSON of two fields of a short text, a name or another word and a number."""
    for _ in range(MAX_TRIES):
        made = short_json(draw)
        kinds = {type(value) for value in json.loads(made.messages[-1]["content"]).values()}
        if str in kinds and len(kinds) == 2:
            return made
    raise AssertionError("no text with a word and a number")


def asked_for_json(draw: Draw, drawn: Extraction) -> Conversation:
    system: list[Message] = []
    if drawn.system:
        system = [{"role": "system", "content": drawn.system}]
    if not system and draw.chance(0.3):
        system = system_messages(draw)
    before = chat(draw, 1)[1] if draw.chance(0.1) else []
    answer = json.dumps(drawn.answer, ensure_ascii=False)
    topic = "json" if drawn.named else "open_json"
    return Conversation(topic, [*system, *before, user(drawn.request), assistant(answer)], [])


def sums(draw: Draw) -> Conversation:
    """Many small sums in a row, because it takes many to learn to add."""
    messages: list[Message] = []
    for _ in range(draw.integer(5, 12)):
        question, answer = talk.arithmetic(draw)
        messages += [user(question), assistant(answer)]
    return Conversation("arithmetic", messages, [])


def long_text(draw: Draw) -> Conversation:
    """A pasted text of notes, about 500 to 3,800 tokens, and questions about two of the notes."""
    owners = [f"{draw.pick(WORDS['name'])} {draw.made_up_word().title()}" for _ in range(200)]
    notes = {
        owner: (draw.pick(WORDS["adjective"]), draw.pick(WORDS["thing"]), draw.pick(WORDS["city"]))
        for owner in owners[: draw.integer(25, 200)]
    }
    text = " ".join(f"{o} has the {a} {t} in {c}." for o, (a, t, c) in notes.items())
    intro = draw.pick(["Read this text.", "Here are my notes:", "A long text:", "Remember:"])
    read = "I have read it, so what is your question?"
    messages = [user(f"{intro}\n\n{text}"), assistant(read)]
    for owner in draw.rng.sample(list(notes), 2):
        adjective, thing, city = notes[owner]
        question = draw.pick([f"What does {owner} have?", f"In which city is {owner}?"])
        messages += [user(question), assistant(f"{owner} has the {adjective} {thing} in {city}.")]
    return Conversation("long_text", messages, [])


def long_chat(draw: Draw) -> Conversation:
    """A chat of up to sixty exchanges, to be seen at positions up to the context's end."""
    topic, messages = chat(draw, draw.integer(20, 60))
    return Conversation(topic, system_messages(draw) + messages, [])


MIXTURE: dict[Callable[[Draw], Conversation], float] = {
    talk_conversation: 0.27,
    sums: 0.06,
    told_conversation: 0.12,
    json_conversation: 0.21,
    one_call: 0.08,
    tool_conversation: 0.20,
    no_tool_conversation: 0.05,
    requests_without_tools: 0.02,
    long_text: 0.006,
    long_chat: 0.004,
}
"""How often each kind of conversation occurs."""


def conversations(seed: int, count: int, *, held_out: bool) -> Iterator[Conversation]:
    """`count` conversations; number i depends on `seed`, i and the side of the split only."""
    for index in range(count):
        draw = Draw(f"{seed}/{index}", held_out=held_out)
        (kind,) = draw.rng.choices(list(MIXTURE), list(MIXTURE.values()))
        yield kind(draw)


def main(count: int) -> None:
    for conversation in conversations(seed=1, count=count, held_out=False):
        print(f"--- {conversation.topic}")
        print(render(conversation.messages, conversation.tools))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
