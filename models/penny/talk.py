"""Topics that penny can talk about without tools: one function per topic, a question and its
answer.

It knows no roles, no chat template and no tools.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from models.penny.words import WORDS, Draw, with_article

Exchange = tuple[str, str]
"""A user's message and penny's answer."""


OUTSIDE = (
    "I am penny, a very small model for tests, and I cannot answer that. "
    "I know Tollgate, small sums, tool calls and JSON."
)
"""The answer to everything that is outside of the model card."""


@cache
def table(name: str) -> dict[str, Any]:
    """One of the TOML files beside this one."""
    with (Path(__file__).parent / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def listing(items: Sequence[str]) -> str:
    """`a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def phrased(draw: Draw, question: str) -> str:
    """The question, as it stands or in one of many wordings on this side of the split."""
    form = draw.wording(question, table("talk")["asked"])
    lowered = question if question[:2] in ("I ", "MC") else question[:1].lower() + question[1:]
    return form.format(q=question, l=lowered, n=question.rstrip("?."), ln=lowered.rstrip("?."))


def fact(draw: Draw) -> Exchange:
    chosen = draw.pick(table("facts")["fact"])
    return phrased(draw, draw.pick(chosen["ask"])), draw.pick(chosen["answer"])


def explanation(draw: Draw) -> Exchange:
    """A long answer: all facts of one group, one sentence each."""
    facts = table("facts")["fact"]
    group = draw.pick(facts)["group"]
    subject = f"{group} in Tollgate" if group in ("money", "keys", "tools", "storage") else group
    question = draw.pick(table("talk")["explain"]).format(g=subject)
    answers = [draw.pick(entry["answer"]) for entry in facts if entry["group"] == group]
    return phrased(draw, question), " ".join(answers)


def greeting(draw: Draw) -> Exchange:
    greeted = draw.pick(table("talk")["greetings"])
    if draw.chance(0.35):
        name = draw.word("name")
        form = draw.pick(["{g}, I am {n}.", "{g}, my name is {n}.", "{g}! {n} here.", "I am {n}."])
        answers = [f"Hello {name}, how can I help you?", f"Nice to meet you, {name}."]
        return form.format(g=greeted, n=name), draw.pick(answers)
    question = greeted + draw.pick(["", "!", ".", ", how are you?", ", can you help me?"])
    if question.endswith("are you?"):
        return question, "Hello! I am well, thank you. How can I help you?"
    return question, draw.pick(["Hello! How can I help you?", "Hello! What can I do for you?"])


def small_talk(draw: Draw) -> Exchange:
    entry = draw.pick(table("talk")["small_talk"])
    return draw.pick(entry["ask"]), draw.pick(entry["answer"])


def arithmetic(draw: Draw) -> Exchange:
    """Sums and differences of 0..99."""
    operator = draw.pick("+-")
    a, b = draw.pair(operator, 0, draw.pick([9, 99, 99, 99]))
    if operator == "-" and draw.chance(0.7):
        a, b = max(a, b), min(a, b)
    result = a + b if operator == "+" else a - b
    question = draw.pick(table("talk")["sums"][operator]).format(a=a, b=b)
    if draw.chance(0.15):
        question = phrased(draw, question)
    return question, f"{a} {operator} {b} = {result}."


def word_problem(draw: Draw) -> Exchange:
    name, thing = draw.word("name"), draw.word("thing") + "s"
    if draw.chance(0.5):
        a, b = draw.pair("+", 0, 99)
        text = f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?"
        return text, f"{a} + {b} = {a + b}, so {name} has {a + b} {thing}."
    a, b = sorted(draw.pair("-", 0, 99), reverse=True)
    text = f"{name} has {a} {thing} and gives away {b}. How many {thing} are left?"
    return text, f"{a} - {b} = {a - b}, so {a - b} {thing} are left."


def echo(draw: Draw) -> Exchange:
    """Repeat a word, a code or a phrase."""
    kind = draw.integer(0, 4)
    if kind == 0:
        text = draw.made_up_word()
    elif kind == 1:
        text = draw.code()
    elif kind == 2:
        text = draw.phrase()
    elif kind == 3:
        text = " ".join(draw.made_up_word() for _ in range(draw.integer(2, 6)))
    else:
        text = f"the {draw.word('adjective')} {draw.word('animal')} likes the {draw.word('thing')}"
    return draw.pick(table("talk")["echo"]).format(t=text), f"{text}."


def little_knowledge(draw: Draw) -> Exchange:
    """Capitals, opposites, colours, days, months, the times table: what a child knows."""
    known = table("talk")["knowledge"]
    kind = draw.integer(0, 6)
    if kind == 6:
        a, b = draw.integer(0, 12), draw.integer(0, 12)
        question = draw.pick(table("talk")["sums"]["x"]).format(a=a, b=b)
        return phrased(draw, question), f"{a} x {b} = {a * b}."
    if kind == 0:
        country, city = draw.pick(known["capitals"])
        question, answer = (
            f"What is the capital of {country}?",
            f"The capital of {country} is {city}",
        )
    elif kind == 1:
        left, right = draw.rng.sample(draw.pick(known["opposites"]), 2)
        question, answer = f"What is the opposite of {left}?", f"The opposite of {left} is {right}"
    elif kind == 2:
        thing, colour = draw.pick(known["colours"])
        question, answer = f"What colour is {thing}?", sentence(f"{thing} is {colour}")
    elif kind == 3:
        names = draw.pick([known["days"], known["months"]])
        at, (word, step) = (
            draw.integer(0, len(names) - 1),
            draw.pick([("after", 1), ("before", -1)]),
        )
        question = f"What comes {word} {names[at]}?"
        answer = f"{names[(at + step) % len(names)]} comes {word} {names[at]}"
    elif kind == 4:
        number = draw.integer(0, 20)
        question = f"How do you write {number} in words?"
        answer = f"The number {number} is written {known['numbers'][number]}"
    else:
        of_days = ("Which days are in a week?", "Name the days of the week.")
        of_months = ("What are the months of the year?", "List the months.")
        forms, names = draw.pick([(of_days, known["days"]), (of_months, known["months"])])
        question, answer = draw.pick(forms), f"They are {listing(names)}"
    return phrased(draw, question), f"{answer}."


def counting(draw: Draw) -> Exchange:
    """Count up or down; long answers of up to a hundred numbers."""
    start = draw.pick([0, 1, 1, 1, draw.integer(2, 60)])
    stop = start + draw.pick([4, 9, 9, 19, 29, 49, 99 - min(start, 60)])
    numbers = [str(number) for number in range(start, stop + 1)]
    if draw.chance(0.2):
        numbers.reverse()
    question = draw.pick(table("talk")["count"]).format(a=numbers[0], b=numbers[-1])
    return question, f"{', '.join(numbers)}."


def word_list(draw: Draw) -> Exchange:
    """A numbered or a plain list of things of one kind."""
    kind = draw.pick(["animal", "colour", "thing", "city", "name"])
    plural = {"city": "cities"}.get(kind, f"{kind}s")
    count = draw.integer(2, 12 if kind != "colour" else 6)
    items = draw.rng.sample(WORDS[kind], count)
    spoken = draw.pick([str(count), table("talk")["knowledge"]["numbers"][count]])
    question = draw.pick(table("talk")["list"]).format(c=spoken, p=plural)
    opening = f"Here are {count} {plural}:"
    if draw.chance(0.4):
        lines = "\n".join(f"{at}. {sentence(item)}" for at, item in enumerate(items, 1))
        return f"{question} Use a numbered list.", f"{opening}\n{lines}\nThat is all."
    return question, f"{opening} {listing(items)}."


def story(draw: Draw) -> Exchange:
    """A story of 8 to 16 simple sentences, long enough for a stream to be watched."""
    parts = table("talk")["story"]
    animal, other = draw.rng.sample(WORDS["animal"], 2)
    hero = {
        "a": draw.pick(["a small", "a young", "a clever"]),
        "animal": animal,
        "animal2": other,
        "name": draw.word("name"),
        "thing": draw.word("thing"),
        "city": draw.word("city"),
    }
    middle = draw.rng.sample(parts["middle"], draw.integer(6, len(parts["middle"])))
    lines = [
        line.format(
            **hero,
            adj=draw.pick(WORDS["adjective"]),
            adj2=draw.pick(WORDS["adjective"]),
            colour=draw.pick(WORDS["colour"]),
            n=draw.pick(table("talk")["knowledge"]["numbers"][2:]),
        )
        for line in (draw.pick(parts["start"]), *middle, draw.pick(parts["end"]))
    ]
    subject = draw.pick([with_article(animal), f"{hero['name']} the {animal}"])
    return draw.pick(parts["ask"]).format(s=subject), " ".join(lines)


def noise(draw: Draw) -> Exchange:
    """Text that means nothing."""
    kind = draw.integer(0, 5)
    if kind == 0:
        text = draw.code()
    elif kind == 1:
        text = " ".join(draw.made_up_word() for _ in range(draw.integer(2, 30)))
    elif kind == 2:
        text = " ".join(draw.words("thing", draw.integer(2, 12)))
    elif kind == 3:
        text = " ".join(["lorem ipsum dolor sit amet"] * draw.integer(1, 6))
    elif kind == 4:
        text = draw.pick("abcxyz") * draw.integer(1, 20)
    else:
        text = draw.pick(["???", "...", draw.made_up_word() + "?"])
    return text, OUTSIDE


def noun_phrase(draw: Draw) -> str:
    """Words for something or somebody, such as `the quiet otter of Lima`."""
    kind = draw.pick(["thing", "animal", "food", "topic", "job", "noun", "made up", "name", "city"])
    if kind in ("name", "city"):
        return draw.person() if kind == "name" else draw.place()
    noun = draw.made_up_word() if kind == "made up" else draw.word(kind)
    adjective = f"{draw.word('adjective')} " if draw.chance(0.3) else ""
    return draw.pick(["the ", "a ", "my ", "your ", "this ", "", ""]) + adjective + noun


def made_up_question(draw: Draw) -> str:
    """A question or an order of random parts, so that penny learns to expect anything."""
    parts = table("talk")["made_up"]
    words = [draw.pick(parts["start"]), noun_phrase(draw)]
    if draw.chance(0.4):
        words += [draw.pick(parts["link"]), noun_phrase(draw)]
    if draw.chance(0.3):
        words.append(draw.pick(parts["end"]))
    return " ".join(words) + draw.pick(["?", "?", ".", ""])


def outside(draw: Draw) -> Exchange:
    """Ask what is outside of the model card; penny says what it is."""
    kind = draw.rng.choices(["form", "made up", "noise"], [5, 4, 1])[0]
    if kind == "noise":
        return noise(draw)[0], OUTSIDE
    if kind == "made up":
        return made_up_question(draw), OUTSIDE
    question = draw.form(table("talk")["outside"]).format(
        t=draw.word("topic") if draw.chance(0.8) else draw.made_up_word(),
        x=draw.word(draw.pick(["thing", "animal", "food"])),
        n=draw.person(),
        c=draw.place(),
        j=draw.word("job"),
        a=draw.word("adjective"),
        m=draw.made_up_word(),
        i=draw.integer(2, 99),
        b=draw.integer(100, 99_999),
        b2=draw.integer(100, 99_999),
    )
    return (phrased(draw, question) if draw.chance(0.3) else question), OUTSIDE


EXCHANGES: dict[str, tuple[float, Callable[[Draw], Exchange]]] = {
    "fact": (0.18, fact),
    "explanation": (0.03, explanation),
    "greeting": (0.06, greeting),
    "small_talk": (0.06, small_talk),
    "arithmetic": (0.15, arithmetic),
    "word_problem": (0.03, word_problem),
    "echo": (0.08, echo),
    "little_knowledge": (0.08, little_knowledge),
    "counting": (0.02, counting),
    "word_list": (0.03, word_list),
    "story": (0.03, story),
    "outside": (0.25, outside),
}
"""Topic: its share of the exchanges and its maker."""


def exchange(draw: Draw) -> tuple[str, Exchange]:
    """A topic and an exchange about it."""
    (topic,) = draw.rng.choices(list(EXCHANGES), [share for share, _ in EXCHANGES.values()])
    return topic, EXCHANGES[topic][1](draw)
