"""Word lists of penny's corpus and the draw that keeps training and held-out text apart.

It knows no conversation, no tool and no model.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")

MAX_TRIES = 1000
"""Bound of every rejection loop; one try in eight succeeds, so reaching it means a bug."""

_LISTS = {
    "name": """
        Ada Adam Alice Amir Anna Anton Astrid Ben Bela Bruno Carla Carlos Chen Clara Daniel David
        Diego Dora Elena Elias Emil Emma Eva Farid Felix Fiona Frida Georg Grace Greta Hana Hugo Ida
        Igor Ines Ivan Jack Jana Jonas Julia Karim Kate Klara Lars Laura Leo Lena Lina Louis Lucas
        Maja Marco Maria Mark Marta Max Mia Milan Mina Nadia Nina Noah Nora Olga Oliver Omar Oscar
        Paul Paula Pedro Peter Petra Priya Rania Ravi Rita Robert Rosa Ruth Sam Sara Sofia Stefan
        Tariq Theo Tina Tom Ursula Vera Victor Wanda Yara Yusuf Zoe""",
    "city": """
        Amsterdam Athens Auckland Austin Barcelona Basel Beirut Bergen Berlin Bern Boston Bremen
        Brussels Budapest Cairo Chicago Copenhagen Cork Dakar Dallas Delhi Denver Dublin Edinburgh
        Florence Geneva Ghent Glasgow Graz Hamburg Hanoi Helsinki Istanbul Jakarta Kyoto Lagos Leeds
        Leipzig Lima Lisbon Ljubljana London Lyon Madrid Malmo Manila Mexico Miami Milan Montreal
        Mumbai Munich Nairobi Naples Nice Osaka Oslo Ottawa Paris Porto Prague Quito Riga Rome
        Santiago Seattle Seoul Seville Sofia Stockholm Sydney Tallinn Tokyo Toronto Trieste Tunis
        Turin Utrecht Venice Vienna Vilnius Warsaw York Zagreb Zurich""",
    "thing": """
        anchor apple basket bell bicycle blanket boat book bottle box bread bridge brush bucket
        button cake camera candle carpet chair clock coat coin compass cup desk door drum feather
        flag flute garden glass glove guitar hammer hat jacket kettle key kite ladder lamp lantern
        letter map mirror needle notebook oven paper pear pen pencil piano pillow plate pocket radio
        ring rope ruler sail scarf shell shoe shovel spoon stamp stone stool suitcase table teapot
        telescope tent ticket torch towel train tray umbrella vase violin wagon wallet watch wheel
        whistle window""",
    "animal": """
        badger bear beaver bee bird camel cat cow crab crane crow deer dog dolphin donkey duck eagle
        elephant falcon fish fox frog goat goose hare hawk hedgehog heron horse lion lizard mole
        monkey moth mouse otter owl panda parrot penguin pigeon rabbit raven robin salmon seal sheep
        snail sparrow spider squirrel stork swan tiger toad turtle whale wolf zebra""",
    "adjective": """
        amber ancient bold brave bright broken calm careful clean clever cold cosy curious dark deep
        dry early empty fair fast fine fresh friendly gentle golden grand happy heavy honest huge
        kind large late light little long loud lucky narrow neat new noisy odd old open pale patient
        plain polite proud quick quiet rare rich round rusty sharp shiny short silent silver simple
        slow small soft steady strong sunny sweet tall tidy tiny warm weak wide wild wise young""",
    "colour": """
        red blue green yellow orange purple brown black white grey pink gold turquoise violet
        crimson beige""",
    "topic": """
        algebra anatomy archery astronomy ballet banking baseball basketball biology botany boxing
        chemistry chess cinema climate cooking cricket dancing dentistry dinosaurs earthquakes
        ecology economics electricity engineering evolution farming fashion finance fishing football
        galaxies gardening genetics geography geology geometry golf grammar gravity history hockey
        insurance islands jazz journalism knitting law literature logic magnetism mathematics
        medicine meteors mining mountains museums music mythology navigation nutrition oceans opera
        optics origami painting philosophy photography physics pirates planets plumbing poetry
        politics pottery psychology pyramids radar religion robots rockets rugby sailing sculpture
        shipping sociology spices surfing swimming taxes tennis theatre trains trees vaccines
        volcanoes weaving whales winemaking wrestling zoology""",
    "job": """
        actor architect baker barber butcher carpenter cook dentist doctor driver engineer farmer
        fisher gardener judge lawyer librarian mason mechanic miner musician nurse painter pilot
        plumber postman priest sailor scientist singer soldier tailor teacher waiter weaver
        writer""",
    "food": """
        apples beans bread butter cake carrots cheese cherries chocolate corn eggs fish garlic
        grapes honey jam lemons lentils milk mushrooms noodles nuts oats olives onions oranges
        pancakes pasta pears peas pepper pizza plums potatoes rice salad salt soup spinach sugar
        tea toast tomatoes yoghurt""",
    "noun": """
        account address alarm album appointment article asset backup badge bill board booking branch
        budget bug calendar campaign card cart channel chart claim class client comment company
        contact contract coupon course customer dashboard deal delivery deployment device discount
        document domain draft driver employee event expense experiment feature feed file folder form
        gift goal group guest image incident invoice issue item job key label lead lesson licence
        loan machine meeting member message milestone note notice offer order package page partner
        patient payment permit photo plan playlist policy post product profile project quote receipt
        recipe refund release reminder report request reservation review role room rule sample
        schedule sensor server session shift shipment site snapshot song sprint step store student
        subscription supplier survey table task team template test thread ticket token tour trip
        user vehicle video visit volume voucher warehouse webhook widget workflow workspace""",
}

WORDS: dict[str, tuple[str, ...]] = {name: tuple(text.split()) for name, text in _LISTS.items()}

_MIXED = "abcdefghjkmnpqrstuvwxyz23456789"
_ONSETS = "b br c ch d dr f fl g gr h j k l m n p pr qu r s sh st t tr v w y z".split()
_VOWELS = "a e i o u ai ea oo ou".split()
_CODAS = ["", "", "l", "m", "n", "r", "s", "t", "nd", "rk", "x"]


def bucket(*key: object) -> int:
    """0..7 by a stable hash of the parts."""
    return zlib.crc32("\x1f".join(map(str, key)).encode()) % 8


def is_held_out(*key: object) -> bool:
    """One key in eight belongs to the held-out side."""
    return bucket(*key) == 0


def with_article(noun: str) -> str:
    """`a tool` or `an error`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


@cache
def share(kind: str, held_out: bool) -> tuple[str, ...]:
    """The words of one list that lie on one side of the split."""
    return tuple(word for word in WORDS[kind] if is_held_out(kind, word) == held_out)


class Draw:
    """A seeded source of choices that never leaves its side of the split.

    A word, a pair of operands or a phrasing belongs to exactly one side (`is_held_out`).
    `Draw(seed, held_out=False)` never yields a held-out one.
    """

    def __init__(self, seed: int | str, *, held_out: bool) -> None:
        self.rng = random.Random(f"penny {seed} {held_out}")
        self.held_out = held_out

    def admits(self, *key: object) -> bool:
        return is_held_out(*key) == self.held_out

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, choices: Sequence[T]) -> T:
        return self.rng.choice(choices)

    def wording(self, question: str, forms: Sequence[str]) -> str:
        """A form for this question; of its pairs (question, form) one in eight is held out.

        The first form of this side comes up more often. Needs at least
        eight forms, so that no question is without a held-out wording.
        """
        assert len(forms) >= 8
        shift = bucket("wording", question)
        mine = [f for at, f in enumerate(forms) if ((at + shift) % 8 == 0) == self.held_out]
        return mine[0] if self.chance(0.25) else self.rng.choice(mine)

    def form(self, forms: Sequence[str]) -> str:
        """A form on this side of the split; those of the other side are never seen by it."""
        return self.pick([f for f in forms if is_held_out("form", f) == self.held_out])

    def word(self, kind: str) -> str:
        return self.rng.choice(share(kind, self.held_out))

    def words(self, kind: str, count: int) -> list[str]:
        """`count` different words of one list (fewer if this side has fewer)."""
        mine = share(kind, self.held_out)
        return self.rng.sample(mine, min(count, len(mine)))

    def integer(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def pair(self, domain: str, low: int, high: int) -> tuple[int, int]:
        """Two operands whose pair is on this side, in whichever order."""
        for _ in range(MAX_TRIES):
            left, right = self.rng.randint(low, high), self.rng.randint(low, high)
            if self.admits(domain, min(left, right), max(left, right)):
                return left, right
        raise AssertionError(f"no pair of {domain} on this side of the split")

    def made_up_word(self) -> str:
        """A pronounceable word of one to three syllables that is in no list."""
        for _ in range(MAX_TRIES):
            syllables = [
                self.pick(_ONSETS) + self.pick(_VOWELS) + self.pick(_CODAS)
                for _ in range(self.integer(1, 3))
            ]
            if self.admits("made up", word := "".join(syllables)):
                return word
        raise AssertionError("no made-up word on this side of the split")

    def person(self) -> str:
        """A first name of the list or a made-up one, some with a second name."""
        first = self.word("name") if self.chance(0.5) else self.made_up_word().title()
        if self.chance(0.1):
            return f"{first}-{self.made_up_word().title()}"
        return f"{first} {self.made_up_word().title()}" if self.chance(0.15) else first

    def place(self) -> str:
        return self.word("city") if self.chance(0.6) else self.made_up_word().title()

    def code(self) -> str:
        """An identifier such as `INV-4821`, `k7f2q` or `83105`."""
        digits = "".join(self.rng.choices("0123456789", k=self.integer(2, 6)))
        letters = "".join(self.rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=self.integer(2, 4)))
        shape = self.rng.choices([0, 1, 2, 3], [3, 3, 3, 1])[0]
        if shape == 0:
            return f"{letters}-{digits}"
        if shape == 1:
            return f"{letters}{digits}"
        if shape == 2:
            return "".join(self.rng.choices(_MIXED, k=self.integer(4, 7)))
        return digits

    def date(self) -> str:
        """An ISO date of the years 2020 to 2032."""
        return f"{self.integer(2020, 2032)}-{self.integer(1, 12):02}-{self.integer(1, 28):02}"

    def clock_time(self) -> str:
        return f"{self.integer(0, 23):02}:{self.integer(0, 59):02}"

    def phrase(self) -> str:
        """A short title such as `quiet garden` or `meeting with Anna`."""
        shape = self.integer(0, 6)
        if shape == 0:
            return f"{self.word('adjective')} {self.word('thing')}"
        if shape == 5:
            return self.made_up_word()
        if shape == 6:
            kinds = self.rng.choices(["thing", "topic", "adjective", "food"], k=self.integer(1, 4))
            return " ".join(self.word(kind) for kind in kinds)
        if shape == 1:
            return f"{self.word('noun')} with {self.word('name')}"
        if shape == 2:
            return f"{self.word('adjective')} {self.word('noun')} {self.integer(1, 99)}"
        if shape == 3:
            return f"{self.made_up_word()} {self.word('thing')}"
        return f"{self.word('thing')} and {self.word('animal')}"
