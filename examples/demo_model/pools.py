"""Words and values the corpus is made of, and the split between training and evaluation.

Most values (names, cities, companies, codes, numbers) come from combinatorial pools far larger
than the training run, so the only way to answer is to copy from the prompt.  One predicate,
:func:`is_held_out`, decides for every value whether it belongs to evaluation; training never
draws a held-out value, so the two sets are disjoint by construction.
"""

# ruff: noqa: SIM905 - word lists are far easier to read as one split string.

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

HELD_OUT_ONE_IN = 8


def is_held_out(value: object) -> bool:
    """True for the one value in eight that only evaluation may use."""
    return zlib.crc32(f"demo:{value}".encode()) % HELD_OUT_ONE_IN == 0


def articles(text: str) -> str:
    """``a`` before a small vowel becomes ``an`` (sentences are put together from slots)."""
    return re.sub(r"\b([aA]) (?=[aeiou])", r"\1n ", text)


def held_out_phrasings(options: Sequence[T]) -> int:
    """How many phrasings at the end of a list are kept for evaluation."""
    return len(options) // 5 if len(options) >= 5 else (1 if len(options) >= 3 else 0)


FIRST_NAMES = (
    "Mara Anna Lena Ivo Tom Sara Nora Paul Emma Liam Olga Hugo Alice Bob Carol David Erik Fatima "
    "George Hana Igor Julia Karim Laura Marco Nina Oscar Petra Quinn Rosa Samir Tara Uma Victor "
    "Wendy Xenia Yusuf Zoe Amir Bella Chen Diego Elena Felix Grace Henry Iris James Kofi Lucia "
    "Maria Nadia Omar Priya Rahul Sofia Theo Viola Walter Yara John Mary Peter Linda Kate Ben Ruth "
    "Daniel Clara Simon Eva Max Lily Jonas Mia Noah Ella Leo Ada Alan Grete Hiro Ines Joel Kira"
).split()
LAST_NAMES = (
    "Olsen Smith Garcia Rossi Novak Kim Tanaka Silva Brown Keller Moreau Petrov Larsen Khan "
    "Okafor Jensen Lopez Meyer Costa Ivanov Wright Patel Nguyen Schmidt Fischer Dubois Kowalski "
    "Horvat Andersson Murphy Jones Taylor Wilson Evans Green Baker Cooper Hughes Reed Stone Hill "
    "Wood Lind Berg Marino Ferrari Romano Santos Sato Chen Wang Singh Cohen Haddad Mensah Dlamini "
    "Lee Park"
).split()
CITIES = (
    "Turin Paris Oslo Lisbon Madrid Berlin Rome Vienna Prague Warsaw Dublin London Athens Cairo "
    "Lagos Nairobi Lima Quito Boston Denver Austin Seattle Chicago Toronto Montreal Tokyo Osaka "
    "Kyoto Seoul Hanoi Delhi Mumbai Sydney Perth Bergen Geneva Zurich Milan Naples Porto Seville "
    "Lyon Nice Ghent Antwerp Hamburg Munich Leipzig Krakow Budapest Riga Tallinn Helsinki Malmo"
).split()
JOBS = (
    "baker nurse teacher pilot lawyer doctor farmer painter carpenter plumber engineer chef writer "
    "driver gardener dentist librarian architect musician photographer journalist electrician "
    "mechanic waiter tailor barber scientist designer translator accountant cashier fisherman "
    "soldier firefighter florist potter butcher judge actor singer dancer clerk guard guide sailor "
    "programmer surgeon vet welder postman editor banker miner weaver beekeeper"
).split()
HOBBIES = (
    "chess|painting|swimming|hiking|cycling|reading|cooking|dancing|fishing|gardening|running|"
    "sailing|singing|skiing|surfing|tennis|football|photography|pottery|knitting|climbing|rowing|"
    "baking|drawing|yoga|golf|archery|judo|juggling|origami|sewing|camping|boxing|poetry"
).split("|")
COLORS = (
    "red blue green yellow black white brown grey purple orange pink silver golden beige violet "
    "turquoise crimson navy"
).split()
ANIMALS = (
    "cat dog horse rabbit parrot hamster goat turtle donkey pony goose duck hen lizard snake "
    "ferret fox sheep cow pig owl mouse"
).split()
ITEMS = (
    "lamp chair table desk bag coat hat scarf watch camera phone laptop guitar piano violin "
    "bicycle tent kettle mug plate bowl vase mirror clock sofa bed shelf carpet blanket pillow "
    "jacket shirt belt ring necklace umbrella notebook pen book drum flute helmet racket ball "
    "kite ladder hammer drill saw bucket basket candle radio printer keyboard monitor speaker "
    "toaster fridge fan heater"
).split()
FOODS = (
    "pizza soup pasta rice curry salad sushi bread cheese tacos noodles pancakes stew omelette "
    "lasagne dumplings risotto paella falafel goulash burgers waffles porridge pie cake"
).split()
ADJECTIVES = (
    "Silent Golden Hidden Broken Lost Bright Cold Distant Empty Burning Gentle Ancient Quiet Last "
    "First Secret Frozen Crimson Little Endless Wild Blue Dark Winter Summer Paper Iron Glass Stone"
).split()
NOUNS = (
    "River Garden Forest Mountain Road Harbor Tower Island Letter Window Bridge Mirror Storm "
    "Valley Castle Song Door Clock Ocean Star Shadow Train Lantern Orchard Kingdom Voyage Summer "
    "Night Sea"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
COUNTRIES = (
    "Italy France Norway Portugal Spain Germany Austria Poland Ireland Greece Egypt Kenya Peru "
    "Ecuador Canada Japan Korea Vietnam India Australia Switzerland Belgium Hungary Latvia Estonia "
    "Finland Sweden Brazil Chile Mexico Morocco Turkey Iceland Denmark"
).split()
COMPANY_ENDS = (
    "Works Labs Foods Group Systems Motors Energy Textiles Tools Books Robotics Dairy Airlines "
    "Bank Media Logistics Toys Optics Partners Studio"
).split()
PLACE_ENDS = "Hall Tower Bridge Museum Library Station Theatre Castle Park Stadium Hotel".split()

_ONSETS = (
    "b c d f g h j k l m n p r s t v w z br cr dr fr gr kr pr tr bl cl fl gl pl sl sh th ch st sk"
).split()
_VOWELS = "a e i o u a e i o ai ea ia io ou".split()
_CODAS = ["", "", "", "", "", "", "l", "n", "r", "s", "t", "m", "k", "nd", "rt", "x", "d"]
_LAST_ENDS = "son sen er ini ova berg man ez ic ski ley ton stein ura well ford dahl".split()
_CITY_ENDS = "ton ville burg ford ia stad port holm mouth field grad dale haven bridge".split()

_ALL_WORDS = [
    word
    for pool in (
        FIRST_NAMES,
        LAST_NAMES,
        CITIES,
        JOBS,
        HOBBIES,
        COLORS,
        ANIMALS,
        ITEMS,
        FOODS,
        ADJECTIVES,
        NOUNS,
        DAYS,
        MONTHS,
        COUNTRIES,
        COMPANY_ENDS,
        PLACE_ENDS,
    )
    for word in pool
    if not is_held_out(word)
]


def made_word(rng: random.Random, syllables: int) -> str:
    """A pronounceable word that (almost surely) exists nowhere else."""
    parts = [
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if i else "")
        for i in range(syllables)
    ]
    return "".join(parts)


class Source:
    """Draws values and phrasings from one side of the training / evaluation split.

    ``held_out`` turns to the evaluation side; with ``known_phrasings`` only the values are new
    and the wording is the one of training, which tells the two difficulties apart.
    """

    def __init__(self, seed: int, held_out: bool = False, known_phrasings: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out
        self.unseen_phrasings = held_out and not known_phrasings
        # The share of requests worded from parts (see ``corpus.py``); later stages set it.
        self.varied = 0.0
        # The share of name parts cut from arbitrary letters: copying must work for any token.
        self.odd = 0.0
        # How often a request worded from parts stands before its passage.
        self.request_first = 0.5
        # How often the tags of a few-shot text are made-up words.
        self.any_tag = 0.0
        # How often a request worded from parts starts with a made-up word.
        self.any_verb = 0.0
        # How often a sentence or request is worded by grammar (``wordings.py``, ``asks.py``).
        self.wide = 0.0
        # The share of passages whose yes/no questions are of the plainest forms only.
        self.plain_judging = 0.0

    def value(self, make: Callable[[], T]) -> T:
        """Draw until the value lies on this side of the split."""
        while True:
            drawn = make()
            if is_held_out(drawn) == self.held_out:
                return drawn

    def pick(self, options: Sequence[T]) -> T:
        """Any option: for things that are not subject to the split."""
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def vary(self) -> bool:
        """Whether to word this request from parts.  Draws nothing while the share is zero."""
        return self.varied > 0 and self.chance(self.varied)

    def widen(self) -> bool:
        """Whether to word this by grammar.  Never in evaluation, where it draws nothing."""
        return self.wide > 0 and not self.held_out and self.chance(self.wide)

    def phrase(self, options: Sequence[str], unseen: float = 1.0) -> str:
        """A phrasing; evaluation takes an unseen one with probability ``unseen``."""
        kept = held_out_phrasings(options)
        if self.unseen_phrasings and kept and self.chance(unseen):
            return self.rng.choice(options[len(options) - kept :])
        return self.rng.choice(options[: len(options) - kept])

    def word(self, pool: Sequence[str]) -> str:
        """A lower-case word of a closed pool (jobs, items); the model must know these."""
        return self.rng.choice(pool)

    def odd_word(self) -> str:
        """Halves of two words, or random letters: pieces that made-up syllables never give."""
        if self.chance(0.3):
            letters = "abcdefghijklmnopqrstuvwxyz"
            word = "".join(self.rng.choice(letters) for _ in range(self.rng.randint(3, 7)))
        else:
            first, second = self.rng.choice(_ALL_WORDS), self.rng.choice(_ALL_WORDS)
            word = first[: self.rng.randint(2, 5)] + second[-self.rng.randint(2, 5) :]
        return word.lower().capitalize()

    def _name_part(self, pool: Sequence[str], ends: Sequence[str]) -> str:
        if self.odd > 0 and self.chance(self.odd):
            return self.odd_word()
        if self.chance(0.35):
            return self.rng.choice(pool)
        word = made_word(self.rng, self.rng.choice((1, 1, 2) if ends else (2, 2, 2, 3)))
        return (word + (self.rng.choice(ends) if ends else "")).capitalize()

    def first_name(self) -> str:
        return self.value(lambda: self._name_part(FIRST_NAMES, ()))

    def last_name(self) -> str:
        return self.value(lambda: self._name_part(LAST_NAMES, _LAST_ENDS))

    def person(self) -> str:
        return f"{self.first_name()} {self.last_name()}"

    def city(self) -> str:
        return self.value(lambda: self._name_part(CITIES, _CITY_ENDS))

    def company(self) -> str:
        return f"{self.last_name()} {self.pick(COMPANY_ENDS)}"

    def place(self) -> str:
        return f"{self.city()} {self.pick(PLACE_ENDS)}"

    def title(self) -> str:
        def draw() -> str:
            text = f"{self.pick(ADJECTIVES)} {self.pick(NOUNS)}"
            return f"The {text}" if self.chance(0.6) else text

        return self.value(draw)

    def item(self) -> str:
        return self.value(lambda: f"{self.pick(COLORS)} {self.pick(ITEMS)}")

    def number(self, low: int, high: int) -> int:
        return self.value(lambda: self.rng.randint(low, high))

    def code(self) -> str:
        letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"

        def draw() -> str:
            head = "".join(self.rng.choice(letters) for _ in range(self.rng.choice((1, 2, 2))))
            return f"{head}{self.rng.randint(10, 9999)}"

        return self.value(draw)

    def date(self) -> str:
        return self.value(lambda: f"{self.rng.randint(1, 28)} {self.pick(MONTHS)}")

    def clock(self) -> str:
        return self.value(
            lambda: f"{self.rng.randint(6, 22)}:{self.rng.choice('0134')}{self.rng.choice('05')}"
        )

    def made(self, syllables: int = 2) -> str:
        return self.value(lambda: made_word(self.rng, syllables))
