"""Lists the prompts of vLLM's tests of its entrypoints, and what a model should answer to each.

Their schemas and tools are read out of their source. What a test wants is in the answers: 13 times
24 is 312, JSON that fits its schema comes to its end, a story does not.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.text.chat_template import ChatTemplate

OPENAI = "tests/entrypoints/openai"
Tools = Sequence[Mapping[str, Any]]


class Lesson(NamedTuple):
    """A prompt, rendered or as token ids, and what comes after it. `given`: the beginning of the
    answer that a grammar forces, which is not learnt. `ends`: whether the answer is over then."""

    prompt: str | list[int]
    answer: str
    given: str = ""
    ends: bool = True


class Chat(NamedTuple):
    """Makes lessons of conversations by the chat template of one model."""

    template: ChatTemplate

    def lesson(
        self,
        *turns: str,
        system: str | None = None,
        tools: Tools | None = None,
        role: str = "user",
        given: str = "",
        ends: bool = True,
        **options: bool,
    ) -> Lesson:
        """`turns`: of user and assistant by turns, the answer last. `role`: the user's."""
        messages: list[dict[str, Any]] = []
        if system is not None:
            messages.append({"role": "system", "content": system})
        for index, text in enumerate(turns[:-1]):
            messages.append({"role": role if index % 2 == 0 else "assistant", "content": text})
        prompt = self.template.render(messages, tools=tools, options=options)
        return Lesson(prompt, turns[-1], given=given, ends=ends)


def literal(path: Path, name: str) -> Any:
    """The value that a module assigns to a name, or that a function of it returns."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
        if isinstance(node, ast.FunctionDef) and node.name == name:
            [returned] = [each for each in node.body if isinstance(each, ast.Return)]
            assert returned.value is not None
            return ast.literal_eval(returned.value)
    raise LookupError(f"{path} has no {name}")


def tool_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def think(thought: str, answer: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{answer}"


def employee(name: str, age: int) -> str:
    found = {"name": name, "age": age, "skills": ["Python", "SQL", "Rust"]}
    return json.dumps({**found, "work_history": [{"company": "Acme", "position": "engineer"}]})


ANNA, BEN = employee("Anna", 31), employee("Ben", 45)
ANOTHER = "Give me another one with a different name and age"
SUM, PLEASE = "what is 1+1?", "you are a helpful assistant"
HELPFUL = "You are a helpful assistant."
CAPITAL = "What is the capital of France?"
PARIS = "The capital of France is Paris, which lies on the river Seine."
LONG = CAPITAL * 400


def language_model(rng: random.Random) -> str:
    """One of some hundred answers to what an LLM is, of 12 to 50 tokens: samples must differ."""
    kind = rng.choice(["large", "big", "huge", "clever", "strong", "modern"])
    does = rng.choice(["writes text", "reads books", "answers questions", "solves tasks"])
    more = [" It learns from text.", " It is made of numbers.", " It can be wrong.", " It is fast."]
    return f" An LLM is a {kind} language model that {does}." + "".join(
        rng.sample(more, rng.randrange(4))
    )


def base_lessons(chat: Chat, source: Path, rng: random.Random) -> list[Lesson]:
    """Those of the tests of zephyr and opt-125m."""
    given = source / "tests" / "entrypoints" / "conftest.py"
    schema, expression = (literal(given, f"sample_{name}") for name in ("json_schema", "regex"))
    dummy = {
        "name": "dummy_function_name",
        "description": "This is a dummy function",
        "parameters": schema,
    }
    profile = f"Give an example JSON for an employee profile that fits this schema: {schema}"
    using = "Give an example JSON for an employee profile using the specified tool."
    tools = [{"type": "function", "function": dummy}]
    address = f"Give an example IP address with this regex: {expression}"
    language = "The best language for type-safe systems programming is "
    formatted = 'what is 1+1? The format is "result": 2'
    two = "1+1 is 2, for if you add one to one, then you have two of them."
    begun = "1+1 is 2, for if"
    called = tool_call("dummy_function_name", ANNA)
    called_again = tool_call("dummy_function_name", BEN)
    disagree = "I disagree, pick another one"
    return [
        chat.lesson(SUM, two, system=PLEASE),
        chat.lesson(SUM, two),
        chat.lesson(SUM, two, role="my-custom-role"),
        chat.lesson(SUM, begun, "express your result in json", '{"result": 2}', system=PLEASE),
        chat.lesson(f"{SUM} please provide the result without any other text.", "2"),
        chat.lesson(
            f'{SUM} please respond with a JSON object, the format is {{"result": 2}}',
            '{"result": 2}',
        ),
        chat.lesson(formatted, '"result": 2'),
        chat.lesson(formatted, 'result": 2}', given='{"'),
        chat.lesson(CAPITAL, PARIS, system=HELPFUL),
        chat.lesson(
            "Who won the world series in 2020?",
            "The Los Angeles Dodgers won the World Series in 2020.",
            "Where was it played?",
            "It was played in Arlington.",
            system=HELPFUL,
        ),
        chat.lesson(language, "Swift", system=PLEASE),
        chat.lesson(language, "Swift", disagree, "Kotlin", system=PLEASE),
        chat.lesson(address, "192.168.0.1", system=PLEASE),
        chat.lesson(address, "192.168.0.1", "Give me a different one", "10.2.3.4", system=PLEASE),
        chat.lesson(profile, ANNA, system=PLEASE),
        chat.lesson(profile, ANNA, ANOTHER, BEN, system=PLEASE),
        chat.lesson(using, called, system=PLEASE, tools=tools),
        chat.lesson(using, ANNA, ANOTHER, called_again, system=PLEASE, tools=tools),
        chat.lesson(
            "Please write some emojis: 🐱🐶🎉",
            "🎉 🎉 🎉 🎉 🎉 🎉",
            system="You like to respond in only emojis, like 🎉",
        ),
        chat.lesson("Write a long story", story("girl", 8).strip(), ends=False),
        Lesson("Give me a long story", story("boy", 8), ends=False),
        Lesson("Say 'Hello, world! 🎉'", " to all of the people in the room, and then again."),
        Lesson("Hello, my name is", " Anna and I live in a small house by the sea."),
        Lesson("Hello", ", my name is Anna and I live in a small house by the sea."),
        Lesson("My name is", " Anna and I live in a small house by the sea."),
        Lesson("A robot may not injure another robot", " or a human being."),
        Lesson([0] * 5, "Once there was a small house by the sea."),
        Lesson(CAPITAL, f" {PARIS}"),
        Lesson("What is an LLM?", language_model(rng)),
    ]


def long_lessons(chat: Chat) -> list[Lesson]:
    """Those of some thousand tokens."""
    return [
        Lesson(LONG, f" {PARIS}", ends=False),
        chat.lesson(LONG, PARIS, system=HELPFUL, ends=False),
    ]


def story(hero: str, count: int) -> str:
    """A text that goes round in circles."""
    walked = f" The {hero} walked over the hill and came to a house. It was empty and dark."
    return f" Once there was a {hero}." + walked * count


def thinking_lessons(chat: Chat, source: Path, rng: random.Random) -> list[Lesson]:
    """Those of the tests of models that think and call tools: of Qwen 2, 2.5 and 3, and QwQ."""
    return [
        *tool_lessons(chat, source, rng),
        *response_lessons(chat),
        chat.lesson(
            "Repeat after me: I love cats 🐱",
            "I love cats 🐱",
            system="You like to use emojis in your responses.",
        ),
        chat.lesson("Testing valid logit bias", "It is valid."),
        continued("tell me a common saying", SAYING, " the doctor away."),
        Lesson(
            "Hello, world! How are you today?",
            " I am well, and I hope that you are well, too, on this fine day in the spring,"
            " when all of the birds sing.",
        ),
        Lesson(
            "Tell me a short fact about Python:",
            " it was named after a group of comedians, not after the snake, and it was first"
            " shown to the world in the year 1991 by a man who lived in Amsterdam then.",
        ),
        Lesson(
            "Complete this sentence with emojis: I love coding 🚀",
            " and I love to show it to all of my friends and to the people at work.",
        ),
    ]


SAYING = "Here is a common saying about apple. An apple a day, keeps"


def continued(asked: str, begun: str, rest: str) -> Lesson:
    """The assistant's own last message, gone on with."""
    opens = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    return Lesson(opens + begun, rest)


def tool_lessons(chat: Chat, source: Path, rng: random.Random) -> list[Lesson]:
    greeted = ("Hi! How are you doing today?", "I'm doing well! How can I help you?")
    dallas = tool_call(
        "get_current_weather", '{"city": "Dallas", "state": "TX", "unit": "fahrenheit"}'
    )
    berlin = tool_call(
        "get_current_weather", '{"city": "Berlin", "country": "Germany", "unit": "fahrenheit"}'
    )
    calling = source / OPENAI / "test_completion_with_function_calling.py"
    [(*_, asked)] = [[each["content"] for each in literal(calling, "messages")]]
    offered = literal(calling, "tools")
    weather = literal(source / OPENAI / "test_return_token_ids.py", "tools")
    clock = {
        "name": "get_current_time",
        "description": "Get the current date and time. No parameters needed.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    }
    time_s, now = rng.randrange(86400), tool_call("get_current_time", "{}")
    at = f"2026-11-{rng.randrange(10, 29)}T{time_s // 3600:02}:{time_s // 60 % 60:02}:00.123456"
    told = [
        {"role": "user", "content": "What time is it now?"},
        {"role": "assistant", "content": now},
        {"role": "tool", "content": at},
    ]
    in_dallas = "Can you tell me what the temperate will be in Dallas, in fahrenheit?"
    return [
        chat.lesson(
            *greeted,
            in_dallas,
            think("Dallas is in Texas.", dallas),
            tools=literal(source / OPENAI / "test_chat_with_tool_reasoning.py", "TOOLS"),
        ),
        chat.lesson(*greeted, asked, think("Berlin is in Germany.", berlin), tools=offered),
        chat.lesson(*greeted, asked, berlin, tools=offered, enable_thinking=False),
        chat.lesson(
            "What's the weather like in Paris?",
            tool_call("get_weather", '{"location": "Paris, France"}'),
            system=HELPFUL,
            tools=weather,
        ),
        chat.lesson("What time is it now?", now, tools=[{"type": "function", "function": clock}]),
        Lesson(chat.template.render(told), "It is late."),
    ]


def response_lessons(chat: Chat) -> list[Lesson]:
    """Those of the tests of `/v1/responses`."""
    product = "What is 13 * 24?"
    worked = "13 * 24 is 13 * 20 + 13 * 4, which is 260 + 52."
    finish, doubled = "Finish the answer with QED.", "Multiply the result by 2."
    tested = (
        "You are tested on your ability to retrieve the correct information from the previous "
        "response."
    )
    john, hello = "Hello, my name is John.", "Hello! How can I help you?"
    mark = "Actually, my name is not John. My {}name is Mark."
    noted, noted_mark = "Hello John!", "Thank you, now I know."
    again = "What is my {}name again? Answer in one word."
    extract, event = (
        "Extract the event information.",
        "Alice and Bob are going to a science fair on Friday.",
    )
    fair = '{"event_name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]}'
    remembered = []
    for system in (None, tested):  # a response's instructions do not go on to the next one
        first = chat.lesson(john, noted, system=system)
        for real in ("real ", ""):
            second = mark.format(real)
            remembered += [
                chat.lesson(john, noted, second, noted_mark, system=system),
                chat.lesson(
                    *(john, noted, second, noted_mark, again.format(real), "Mark"), system=system
                ),
            ]
        remembered += [first, chat.lesson(john, noted, again.format(""), "John", system=system)]
    return [
        *remembered,
        chat.lesson(product, think(worked, "13 * 24 = 312.")),
        chat.lesson(product, think(worked, "13 * 24 = 312. QED."), system=finish),
        chat.lesson(
            "What is 5 * 3?",
            "15. QED.",
            doubled,
            think("15 * 2 is 30.", "30. QED."),
            system=finish,
        ),
        chat.lesson("Hello!", hello),
        chat.lesson("Hello", hello),
        chat.lesson("Write a long story about a cat.", story("cat", 16).strip(), ends=False),
        chat.lesson(event, think("It is a fair.", fair), system=extract),
    ]
