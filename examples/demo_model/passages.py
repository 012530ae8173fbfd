"""Short passages that state facts about made-up subjects, with questions about each fact.

A :class:`Domain` is a kind of subject (a person, an order, a book) with attributes; every
attribute has field names, sentence phrasings and question phrasings.  In each list the last
phrasings are kept for evaluation (see ``pools.held_out_phrasings``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import pools, wordings
from .pools import Source

Value = str | int


@dataclass(frozen=True)
class Attribute:
    """One fact a passage can state.

    ``says`` use ``{s}`` (a mention of the subject at the start of the sentence) and ``{v}``;
    ``asks`` use ``{n}`` (the subject's name).
    """

    keys: tuple[str, ...]
    make: Callable[[Source], Value]
    says: tuple[str, ...]
    asks: tuple[str, ...]


@dataclass(frozen=True)
class Domain:
    """A kind of subject.  ``openings`` state several facts at once, by attribute position."""

    kind: str
    name_keys: tuple[str, ...]
    name: Callable[[Source], str]
    mentions: tuple[str, ...]
    name_asks: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    openings: tuple[str, ...] = ()


@dataclass
class Passage:
    """A rendered passage and the facts it states."""

    text: str
    domain: Domain
    subject: str
    facts: dict[int, Value]
    others: list[Passage] = field(default_factory=list)


def _number(low: int, high: int) -> Callable[[Source], int]:
    return lambda source: source.number(low, high)


def _from(pool: list[str]) -> Callable[[Source], str]:
    return lambda source: source.word(pool)


PERSON = Domain(
    "person",
    ("name", "name", "person", "full_name"),
    Source.person,
    ("{f}", "{f}", "{p}", "{p}", "{n}"),
    (
        "Who is the passage about?",
        "What is the person's name?",
        "Who is described?",
        "What is the name of the person?",
        "Who is this text about?",
    ),
    (
        Attribute(
            ("age", "age", "years"),
            _number(18, 95),
            (
                "{s} is {v} years old.",
                "{s} is {v}.",
                "{s} turned {v} this year.",
                "{s} just celebrated birthday number {v}.",
                "At {v}, {s} is still busy.",
                "{s} is aged {v}.",
                "{s} has turned {v}.",
            ),
            (
                "How old is {n}?",
                "What is the age of {n}?",
                "What age is {n}?",
                "What is {n}'s age?",
                "Tell me the age of {n}.",
            ),
        ),
        Attribute(
            ("city", "city", "town", "home", "location"),
            Source.city,
            (
                "{s} lives in {v}.",
                "{s} comes from {v}.",
                "{s} moved to {v} last year.",
                "{s} has a small house in {v}.",
                "{s} is based in {v}.",
                "{s} lives with two friends in {v}.",
                "{s} resides in {v}.",
                "{s} has a flat in {v}.",
            ),
            (
                "Where does {n} live?",
                "In which city does {n} live?",
                "What city does {n} live in?",
                "Which town is {n} from?",
                "Where is {n} from?",
                "Which city is the home of {n}?",
            ),
        ),
        Attribute(
            ("job", "job", "occupation", "profession", "work"),
            _from(pools.JOBS),
            (
                "{s} works as a {v}.",
                "{s} is a {v}.",
                "{s} has been a {v} for years.",
                "{s} earns a living as a {v}.",
                "{s} was trained as a {v}.",
                "By profession {s} is a {v}.",
                "{s} found work as a {v}.",
            ),
            (
                "What does {n} do?",
                "What is the job of {n}?",
                "What is {n}'s job?",
                "What does {n} work as?",
                "What is the profession of {n}?",
                "What does {n} do for a living?",
            ),
        ),
        Attribute(
            ("company", "employer", "company"),
            Source.company,
            (
                "{s} works for {v}.",
                "{s} works at {v}.",
                "{s} joined {v} in spring.",
                "{s} has a desk at {v}.",
                "{s} is employed by {v}.",
            ),
            (
                "Which company does {n} work for?",
                "Who employs {n}?",
                "Where does {n} work?",
                "What company does {n} work at?",
                "Who is the employer of {n}?",
            ),
        ),
        Attribute(
            ("hobby", "hobby", "interest"),
            _from(pools.HOBBIES),
            (
                "{s} loves {v}.",
                "{s} enjoys {v}.",
                "In the evening {s} goes in for {v}.",
                "{s} spends every weekend on {v}.",
                "{s} is fond of {v}.",
            ),
            (
                "What does {n} enjoy?",
                "What is the hobby of {n}?",
                "What does {n} love?",
                "What is {n}'s hobby?",
                "Which hobby does {n} have?",
            ),
        ),
        Attribute(
            ("pet", "pet", "animal"),
            _from(pools.ANIMALS),
            (
                "{s} has a pet {v}.",
                "{s} keeps a {v}.",
                "{s} owns a {v}.",
                "{s} shares the house with a {v}.",
                "{s} looks after a {v}.",
            ),
            (
                "What pet does {n} have?",
                "What animal does {n} own?",
                "Which animal does {n} keep?",
                "What is {n}'s pet?",
                "Which pet does {n} own?",
            ),
        ),
        Attribute(
            ("food", "favorite_food", "dish"),
            _from(pools.FOODS),
            (
                "{s} likes {v} best.",
                "{s} eats {v} every Friday.",
                "The favorite food of {n} is {v}.",
                "{s} could eat {v} all day.",
                "{s} always orders {v}.",
            ),
            (
                "What is the favorite food of {n}?",
                "What does {n} like to eat?",
                "What food does {n} like?",
                "Which dish does {n} like best?",
                "What is {n}'s favorite food?",
            ),
        ),
        Attribute(
            ("partner", "friend", "married_to"),
            Source.person,
            (
                "{s} is married to {v}.",
                "{s} shares a home with {v}.",
                "The best friend of {n} is {v}.",
                "{s} has a good friend called {v}.",
            ),
            (
                "Who is close to {n}?",
                "Who shares a life with {n}?",
                "Who is the friend or partner of {n}?",
            ),
        ),
        Attribute(
            ("birth_year", "born", "year_of_birth"),
            _number(1920, 2010),
            (
                "{s} was born in {v}.",
                "Born in {v}, {s} grew up by the sea.",
                "{s} came into the world in {v}.",
                "The year of birth of {n} is {v}.",
            ),
            (
                "When was {n} born?",
                "In which year was {n} born?",
                "What is the birth year of {n}?",
                "What year was {n} born in?",
            ),
        ),
        Attribute(
            ("country", "country", "nation"),
            _from(pools.COUNTRIES),
            (
                "{s} grew up in {v}.",
                "{s} has family in {v}.",
                "{s} spent a year in {v}.",
                "{s} often travels to {v}.",
            ),
            (
                "Which country is linked to {n}?",
                "What country does the text link to {n}?",
                "Which country has {n} been to?",
            ),
        ),
        Attribute(
            ("phone", "phone", "phone_number"),
            lambda s: f"555-{s.number(1000, 9999)}",
            (
                "{s} can be reached at {v}.",
                "The phone number of {n} is {v}.",
                "Call {n} at {v}.",
                "{s} answers the phone at {v}.",
            ),
            (
                "What is the phone number of {n}?",
                "How can {n} be reached?",
                "Which number should one call for {n}?",
                "What is {n}'s phone number?",
            ),
        ),
    ),
    (
        "{n}, {0}, lives in {1} and works as a {2}.",
        "{n} is a {0}-year-old {2} from {1}.",
        "{n} is a {2} who lives in {1}.",
        "{n} ({0}) is a {2} at {3}.",
        "{n}, a {2} from {1}, is {0} years old.",
        "Meet {n}, {0}, from {1}.",
        "My name is {n}. I am {0} years old and I live in {1}.",
        "I am {n}, I am {0}, and I work as a {2} in {1}.",
        "The {2} {n} lives in {1}.",
        "At {3} the {2} is {n}, aged {0}.",
        "{n} is {0} years old, works as a {2} and lives in {1}.",
        "{n} from {1}, {0} years old, is a {2}.",
    ),
)

ORDER = Domain(
    "order",
    ("order", "order_id", "order_number", "id"),
    Source.code,
    ("The order", "It", "Order {n}", "This order"),
    ("What is the order number?", "Which order is it?", "What is the number of the order?"),
    (
        Attribute(
            ("customer", "customer", "buyer", "client"),
            Source.person,
            (
                "{s} was placed by {v}.",
                "{s} is for {v}.",
                "The customer is {v}.",
                "{s} came from {v}.",
                "{v} placed the order.",
            ),
            (
                "Who placed order {n}?",
                "Who is the customer of order {n}?",
                "Who ordered {n}?",
                "Which customer placed order {n}?",
            ),
        ),
        Attribute(
            ("item", "item", "product", "article"),
            Source.item,
            (
                "{s} contains a {v}.",
                "{s} is for one {v}.",
                "The item is a {v}.",
                "Inside is a {v}.",
                "{s} includes a {v}.",
            ),
            (
                "What item is in order {n}?",
                "What was ordered in {n}?",
                "What does order {n} contain?",
                "Which product is in order {n}?",
            ),
        ),
        Attribute(
            ("quantity", "quantity", "count", "amount"),
            _number(2, 99),
            (
                "The quantity is {v}.",
                "{s} asks for {v} pieces.",
                "{v} pieces were ordered.",
                "{s} is for {v} units.",
            ),
            (
                "How many pieces are in order {n}?",
                "What is the quantity of order {n}?",
                "How many were ordered in {n}?",
                "How many units does order {n} have?",
            ),
        ),
        Attribute(
            ("price", "price", "cost", "total"),
            _number(5, 2000),
            (
                "{s} costs {v} euros.",
                "The price is {v} dollars.",
                "The total is {v} euros.",
                "{s} was paid with {v} dollars.",
                "The bill comes to {v} euros.",
            ),
            (
                "What is the price of order {n}?",
                "How much does order {n} cost?",
                "What does order {n} cost?",
                "What is the cost of order {n}?",
            ),
        ),
        Attribute(
            ("city", "destination", "ship_to", "city"),
            Source.city,
            (
                "{s} ships to {v}.",
                "{s} is going to {v}.",
                "The parcel goes to {v}.",
                "{s} will be delivered in {v}.",
                "{s} is sent to {v}.",
            ),
            (
                "Where is order {n} going?",
                "Which city is order {n} sent to?",
                "Where does order {n} ship to?",
                "To which city does order {n} go?",
            ),
        ),
        Attribute(
            ("date", "delivery_date", "date"),
            Source.date,
            (
                "{s} arrives on {v}.",
                "{s} was placed on {v}.",
                "The date is {v}.",
                "{s} is dated {v}.",
            ),
            (
                "What is the date of order {n}?",
                "Which date does order {n} have?",
                "On what date is order {n}?",
            ),
        ),
        Attribute(
            ("shop", "shop", "store", "seller"),
            Source.company,
            (
                "{s} was sold by {v}.",
                "The seller is {v}.",
                "{s} is packed by {v}.",
                "{v} ships the goods.",
            ),
            (
                "Who is the seller of order {n}?",
                "Which shop sold order {n}?",
                "Which store handles order {n}?",
            ),
        ),
    ),
    (
        "Order {n} was placed by {0}.",
        "{0} ordered a {1} under number {n}.",
        "Order {n} from {0} contains {2} pieces.",
        "Order {n}: a {1} for {0}, {3} euros.",
        "{0} bought a {1} for {3} dollars, order {n}.",
    ),
)

EVENT = Domain(
    "event",
    ("event", "title", "name"),
    lambda s: (
        f"{s.last_name()} "
        + s.pick(
            ["Festival", "Conference", "Concert", "Fair", "Workshop", "Meeting", "Party", "Race"]
        )
    ),
    ("It", "The event", "The {l}", "The {n}"),
    ("Which event is it?", "What is the event called?", "What is the name of the event?"),
    (
        Attribute(
            ("city", "city", "location"),
            Source.city,
            (
                "{s} takes place in {v}.",
                "{s} is held in {v}.",
                "{s} will be in {v}.",
                "{s} happens in {v}.",
                "{s} is hosted by the city of {v}.",
            ),
            (
                "Where is the {n} held?",
                "In which city is the {n}?",
                "Where does the {n} take place?",
                "Which city hosts the {n}?",
            ),
        ),
        Attribute(
            ("date", "date", "date"),
            Source.date,
            ("{s} is on {v}.", "{s} starts on {v}.", "The date is {v}.", "{s} begins on {v}."),
            (
                "When is the {n}?",
                "On what date is the {n}?",
                "What is the date of the {n}?",
                "On which date does the {n} start?",
            ),
        ),
        Attribute(
            ("day", "day", "weekday"),
            _from(pools.DAYS),
            ("It is a {v}.", "{s} falls on a {v}.", "Come on {v}.", "{s} is on {v}."),
            (
                "On which day is the {n}?",
                "What day is the {n}?",
                "Which day of the week is the {n}?",
            ),
        ),
        Attribute(
            ("time", "time", "start"),
            Source.clock,
            (
                "{s} starts at {v}.",
                "Doors open at {v}.",
                "{s} begins at {v}.",
                "Be there at {v}.",
                "{s} opens at {v}.",
            ),
            (
                "At what time does the {n} start?",
                "What time is the {n}?",
                "When do the doors open at the {n}?",
                "What is the start time of the {n}?",
            ),
        ),
        Attribute(
            ("place", "venue", "hall"),
            Source.place,
            ("The venue is {v}.", "Guests meet at {v}.", "{s} is at {v}.", "{s} fills {v}."),
            (
                "What is the venue of the {n}?",
                "At which venue is the {n}?",
                "Which place hosts the {n}?",
            ),
        ),
        Attribute(
            ("host", "host", "organizer", "speaker"),
            Source.person,
            (
                "{s} is hosted by {v}.",
                "The host is {v}.",
                "{v} leads the event.",
                "{v} will open the evening.",
                "{s} is led by {v}.",
            ),
            (
                "Who hosts the {n}?",
                "Who is the host of the {n}?",
                "Who leads the {n}?",
                "Who is hosting the {n}?",
            ),
        ),
        Attribute(
            ("guests", "guests", "visitors", "attendees"),
            _number(20, 9000),
            (
                "{v} guests are expected.",
                "{s} expects {v} visitors.",
                "{v} people have a ticket.",
                "About {v} people will come.",
            ),
            (
                "How many guests are expected at the {n}?",
                "How many people come to the {n}?",
                "How many visitors will the {n} have?",
            ),
        ),
        Attribute(
            ("price", "ticket_price", "price"),
            _number(3, 300),
            (
                "A ticket costs {v} euros.",
                "Tickets are {v} dollars.",
                "The entry price is {v} euros.",
                "Entry costs {v} dollars.",
            ),
            (
                "How much is a ticket for the {n}?",
                "What does a ticket for the {n} cost?",
                "What is the ticket price of the {n}?",
            ),
        ),
    ),
    (
        "The {n} takes place in {0} on {1}.",
        "On {1} the {n} will be held in {0}.",
        "Join us for the {n} at {3} on {2}.",
        "{5} invites you to the {n} in {0}.",
        "The {n} is on {2}, {1}, at {3}.",
    ),
)

BOOK = Domain(
    "book",
    ("title", "title", "book"),
    Source.title,
    ("It", "The book", "This book", "The novel"),
    ("What is the title of the book?", "What is the book called?", "Which book is it?"),
    (
        Attribute(
            ("author", "author", "writer"),
            Source.person,
            (
                "{s} was written by {v}.",
                "The author is {v}.",
                "{s} is by {v}.",
                "{v} wrote the book.",
                "{s} is the work of {v}.",
            ),
            (
                "Who wrote {n}?",
                "Who is the author of {n}?",
                "Which author wrote {n}?",
                "By whom was {n} written?",
            ),
        ),
        Attribute(
            ("year", "year", "published"),
            _number(1850, 2030),
            (
                "{s} was published in {v}.",
                "{s} came out in {v}.",
                "{s} is from {v}.",
                "{s} appeared in {v}.",
            ),
            (
                "When was {n} published?",
                "In which year did {n} come out?",
                "What year is {n} from?",
                "In what year was {n} published?",
            ),
        ),
        Attribute(
            ("pages", "pages", "page_count", "length"),
            _number(60, 1200),
            (
                "{s} has {v} pages.",
                "{s} is {v} pages long.",
                "It runs to {v} pages.",
                "{s} fills {v} pages.",
            ),
            (
                "How many pages does {n} have?",
                "How long is {n}?",
                "What is the page count of {n}?",
                "How many pages are in {n}?",
            ),
        ),
        Attribute(
            ("publisher", "publisher"),
            Source.company,
            (
                "{s} is published by {v}.",
                "The publisher is {v}.",
                "{v} brought it to the shops.",
                "{s} was printed by {v}.",
            ),
            (
                "Who is the publisher of {n}?",
                "Which company publishes {n}?",
                "Which publisher has {n}?",
            ),
        ),
        Attribute(
            ("setting", "city", "setting"),
            Source.city,
            (
                "The story is set in {v}.",
                "{s} is set in {v}.",
                "The story starts in {v}.",
                "The tale takes place in {v}.",
            ),
            (
                "Where is {n} set?",
                "In which city is {n} set?",
                "Where does the story of {n} take place?",
            ),
        ),
        Attribute(
            ("price", "price", "cost"),
            _number(4, 90),
            (
                "{s} costs {v} euros.",
                "The price is {v} dollars.",
                "{s} sells for {v} euros.",
                "One copy is {v} dollars.",
            ),
            (
                "What is the price of {n}?",
                "How much does {n} cost?",
                "What does {n} cost?",
                "How much is {n}?",
            ),
        ),
        Attribute(
            ("hero", "main_character", "hero"),
            Source.person,
            (
                "The hero is {v}.",
                "{s} tells of {v}.",
                "The main character is {v}.",
                "The story follows {v}.",
            ),
            (
                "Who is the hero of {n}?",
                "Who is the main character of {n}?",
                "Which character is at the center of {n}?",
            ),
        ),
    ),
    (
        "{n} by {0} was published in {1}.",
        "{0} wrote {n} in {1}.",
        "In {1}, {0} published {n}, a book of {2} pages.",
        "{n} is a novel by {0}.",
        "{n}, written by {0}, has {2} pages.",
    ),
)

TRIP = Domain(
    "trip",
    ("flight", "flight", "code", "trip"),
    Source.code,
    ("It", "The flight", "Flight {n}", "The trip"),
    ("What is the flight number?", "Which flight is it?", "What is the code of the flight?"),
    (
        Attribute(
            ("passenger", "passenger", "traveler"),
            Source.person,
            (
                "The passenger is {v}.",
                "{v} is on board.",
                "{v} booked the flight.",
                "The ticket is for {v}.",
            ),
            (
                "Who is the passenger on {n}?",
                "Who is on flight {n}?",
                "Who booked flight {n}?",
                "Which passenger is on flight {n}?",
            ),
        ),
        Attribute(
            ("from", "origin", "departure_city"),
            Source.city,
            (
                "{s} leaves from {v}.",
                "{s} departs from {v}.",
                "{s} starts in {v}.",
                "The departure is from {v}.",
            ),
            (
                "Where does flight {n} leave from?",
                "Where does {n} start?",
                "From which city does flight {n} depart?",
            ),
        ),
        Attribute(
            ("to", "destination", "arrival_city"),
            Source.city,
            (
                "{s} goes to {v}.",
                "{s} lands in {v}.",
                "{s} is bound for {v}.",
                "The destination is {v}.",
            ),
            (
                "Where does flight {n} go?",
                "Where does {n} land?",
                "What is the destination of flight {n}?",
                "To which city does {n} go?",
            ),
        ),
        Attribute(
            ("day", "day", "weekday"),
            _from(pools.DAYS),
            ("{s} is on {v}.", "{s} leaves on {v}.", "The day is {v}.", "{s} departs on {v}."),
            ("On which day is flight {n}?", "What day does {n} leave?", "Which day is flight {n}?"),
        ),
        Attribute(
            ("time", "time", "departure_time"),
            Source.clock,
            (
                "{s} leaves at {v}.",
                "Departure is at {v}.",
                "{s} takes off at {v}.",
                "The plane starts at {v}.",
            ),
            (
                "At what time does flight {n} leave?",
                "When does {n} take off?",
                "What is the departure time of {n}?",
            ),
        ),
        Attribute(
            ("seat", "seat", "seat_number"),
            lambda s: f"{s.number(1, 60)}{s.pick('ABCDEF')}",
            (
                "The seat is {v}.",
                "The seat number is {v}.",
                "Please sit in {v}.",
                "Seat {v} is reserved.",
            ),
            (
                "Which seat is on the ticket for {n}?",
                "What is the seat on flight {n}?",
                "What is the seat number on {n}?",
            ),
        ),
        Attribute(
            ("gate", "gate", "gate_number"),
            _number(1, 99),
            (
                "Boarding is at gate {v}.",
                "The gate is {v}.",
                "Please go to gate {v}.",
                "{s} boards at gate {v}.",
            ),
            (
                "Which gate is flight {n} at?",
                "What is the gate of {n}?",
                "At which gate does {n} board?",
            ),
        ),
    ),
    (
        "Flight {n} goes from {1} to {2}.",
        "{0} flies from {1} to {2} on flight {n}.",
        "{0} is booked on flight {n} to {2}.",
        "On {3} flight {n} leaves {1} for {2}.",
        "Flight {n} with {0} on board leaves {1} at {4}.",
    ),
)

COMPANY = Domain(
    "company",
    ("company", "company", "name"),
    Source.company,
    ("It", "The company", "{n}", "The firm"),
    ("Which company is it?", "What is the company called?", "What is the name of the company?"),
    (
        Attribute(
            ("founder", "founder", "founder"),
            Source.person,
            (
                "{s} was founded by {v}.",
                "The founder is {v}.",
                "{v} started the company.",
                "{s} was set up by {v}.",
            ),
            (
                "Who founded {n}?",
                "Who is the founder of {n}?",
                "Who started {n}?",
                "Who set up {n}?",
            ),
        ),
        Attribute(
            ("year", "founded", "year"),
            _number(1850, 2030),
            (
                "{s} was founded in {v}.",
                "{s} opened in {v}.",
                "{s} has existed since {v}.",
                "{s} began in {v}.",
            ),
            (
                "When was {n} founded?",
                "In which year did {n} open?",
                "Since when has {n} existed?",
                "What year did {n} begin?",
            ),
        ),
        Attribute(
            ("city", "city", "headquarters"),
            Source.city,
            (
                "{s} has its office in {v}.",
                "{s} is based in {v}.",
                "The head office is in {v}.",
                "{s} sits in {v}.",
            ),
            (
                "Where is {n} based?",
                "In which city is {n}?",
                "Where is the office of {n}?",
                "Which city is {n} based in?",
            ),
        ),
        Attribute(
            ("employees", "employees", "staff", "workers"),
            _number(5, 9000),
            (
                "{s} has {v} employees.",
                "{s} employs {v} people.",
                "{v} people work there.",
                "The staff counts {v} people.",
            ),
            (
                "How many employees does {n} have?",
                "How many people work at {n}?",
                "How many people does {n} employ?",
                "How large is the staff of {n}?",
            ),
        ),
        Attribute(
            ("product", "product", "makes"),
            lambda s: s.word(pools.ITEMS) + "s",
            ("{s} makes {v}.", "{s} sells {v}.", "{s} is known for its {v}.", "{s} builds {v}."),
            (
                "What does {n} make?",
                "What does {n} sell?",
                "What is {n} known for?",
                "Which product does {n} build?",
            ),
        ),
        Attribute(
            ("ceo", "ceo", "boss", "director"),
            Source.person,
            (
                "The boss is {v}.",
                "{s} is led by {v}.",
                "The director is {v}.",
                "{s} is run by {v}.",
            ),
            (
                "Who leads {n}?",
                "Who is the boss of {n}?",
                "Who runs {n}?",
                "Who is the director of {n}?",
            ),
        ),
    ),
    (
        "{n} was founded in {1} by {0}.",
        "{n} is a company in {2} with {3} employees.",
        "In {1}, {0} founded {n} in {2}.",
        "{n}, based in {2}, makes {4}.",
        "{n} from {2} has {3} employees.",
    ),
)

PET = Domain(
    "pet",
    ("name", "name", "pet"),
    Source.first_name,
    ("{n}", "{p}", "The animal", "{n}"),
    ("What is the name of the animal?", "Which animal is it about?", "What is the pet called?"),
    (
        Attribute(
            ("species", "animal", "species", "kind"),
            _from(pools.ANIMALS),
            (
                "{s} is a {v}.",
                "{s} is a friendly {v}.",
                "{s} is a young {v}.",
                "{s} is a lovely {v}.",
            ),
            (
                "What kind of animal is {n}?",
                "What animal is {n}?",
                "What is {n}?",
                "Which species is {n}?",
            ),
        ),
        Attribute(
            ("age", "age", "years"),
            _number(1, 25),
            ("{s} is {v} years old.", "{s} is {v}.", "{s} turned {v} in May.", "{s} is aged {v}."),
            (
                "How old is {n}?",
                "What is the age of {n}?",
                "What age is {n}?",
                "What is {n}'s age?",
            ),
        ),
        Attribute(
            ("color", "color", "color"),
            _from(pools.COLORS),
            ("{s} is {v}.", "{s} has {v} fur.", "The fur is {v}.", "{s} is {v} all over."),
            (
                "What color is {n}?",
                "What is the color of {n}?",
                "Which color is {n}?",
                "What color does {n} have?",
            ),
        ),
        Attribute(
            ("owner", "owner", "owner"),
            Source.person,
            (
                "{s} belongs to {v}.",
                "The owner is {v}.",
                "{v} takes care of {n}.",
                "{s} lives with {v}.",
            ),
            (
                "Who owns {n}?",
                "Who is the owner of {n}?",
                "Who takes care of {n}?",
                "To whom does {n} belong?",
            ),
        ),
        Attribute(
            ("city", "city", "home"),
            Source.city,
            (
                "{s} lives in {v}.",
                "The home of {n} is in {v}.",
                "{s} was found in {v}.",
                "{s} has a home in {v}.",
            ),
            (
                "Where does {n} live?",
                "In which city is {n}?",
                "What city is {n} in?",
                "Which city is the home of {n}?",
            ),
        ),
        Attribute(
            ("weight", "weight", "kilos"),
            _number(2, 60),
            (
                "{s} weighs {v} kilos.",
                "The weight is {v} kilos.",
                "{s} brings {v} kilos to the scale.",
                "{s} has a weight of {v} kilos.",
            ),
            (
                "How much does {n} weigh?",
                "What is the weight of {n}?",
                "How heavy is {n}?",
                "How many kilos does {n} weigh?",
            ),
        ),
    ),
    (
        "{n} is a {2} {0} from {4}.",
        "{n} the {0} belongs to {3}.",
        "{3} has a {0} called {n}.",
        "{n} is a {1}-year-old {0}.",
        "{3} owns {n}, a {2} {0}.",
    ),
)

PLACE = Domain(
    "building",
    ("name", "building", "place"),
    Source.place,
    ("It", "The building", "{n}", "The site"),
    ("Which building is it?", "What is the building called?", "What is the name of the place?"),
    (
        Attribute(
            ("city", "city", "location"),
            Source.city,
            ("{s} stands in {v}.", "{s} is in {v}.", "You find it in {v}.", "{s} lies in {v}."),
            (
                "Where is {n}?",
                "In which city is {n}?",
                "In which city does {n} stand?",
                "What city is {n} in?",
            ),
        ),
        Attribute(
            ("year", "built", "year"),
            _number(1200, 2030),
            (
                "{s} was built in {v}.",
                "{s} was opened in {v}.",
                "{s} dates from {v}.",
                "{s} was finished in {v}.",
            ),
            (
                "When was {n} built?",
                "In which year was {n} opened?",
                "What year is {n} from?",
                "In what year was {n} built?",
            ),
        ),
        Attribute(
            ("height", "height", "meters"),
            _number(5, 700),
            (
                "{s} is {v} meters high.",
                "{s} has a height of {v} meters.",
                "{s} rises {v} meters.",
                "{s} reaches {v} meters.",
            ),
            (
                "How high is {n}?",
                "What is the height of {n}?",
                "How tall is {n}?",
                "How many meters high is {n}?",
            ),
        ),
        Attribute(
            ("architect", "architect", "designer"),
            Source.person,
            (
                "{s} was designed by {v}.",
                "The architect was {v}.",
                "{v} drew the plans.",
                "{s} was planned by {v}.",
            ),
            (
                "Who designed {n}?",
                "Who was the architect of {n}?",
                "Who drew the plans of {n}?",
                "Who planned {n}?",
            ),
        ),
        Attribute(
            ("visitors", "visitors", "guests"),
            _number(100, 99999),
            (
                "{v} people visit each year.",
                "{s} has {v} visitors a year.",
                "{s} welcomes {v} guests a year.",
                "Each year {v} people come.",
            ),
            (
                "How many people visit {n}?",
                "How many visitors does {n} have?",
                "How many guests come to {n}?",
            ),
        ),
        Attribute(
            ("color", "color", "color"),
            _from(pools.COLORS),
            (
                "The roof is {v}.",
                "{s} has {v} walls.",
                "The front is painted {v}.",
                "{s} is painted {v}.",
            ),
            ("What color is {n}?", "Which color does {n} have?", "What is the color of {n}?"),
        ),
    ),
    (
        "{n} in {0} was built in {1}.",
        "{n} was built in {1} and is {2} meters high.",
        "{3} designed {n} in {0}.",
        "{n}, {2} meters high, stands in {0}.",
        "In {1}, {3} built {n}.",
    ),
)

DOMAINS = (PERSON, PERSON, PERSON, PERSON, ORDER, EVENT, BOOK, TRIP, COMPANY, PET, PLACE)

FILLER = (
    "The weather was mild that week.",
    "Nobody knows why.",
    "The neighbors are happy about it.",
    "It was a long day.",
    "Many people have heard of it.",
    "The story was in the paper.",
    "Everything went well.",
    "There was music in the street.",
    "A small crowd had gathered.",
    "More news will follow soon.",
    "The coffee was cold by then.",
    "It rained all morning.",
    "Some things take time.",
    "The train was late again.",
    "That is all we know so far.",
    "Friends say it was no surprise.",
)


def _mention(source: Source, domain: Domain, subject: str, pronoun: str) -> str:
    return source.pick(domain.mentions).format(
        n=subject, f=subject.split()[0], l=subject.split()[-1].lower(), p=pronoun
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def kept_of(options: Sequence[str]) -> Sequence[str]:
    return options[len(options) - pools.held_out_phrasings(options) :]


@functools.cache
def _tells_kind(domain: Domain, position: int) -> bool:
    """Whether a value's kind alone tells the fact: no other of the domain has such values."""
    make = domain.attributes[position].make
    if sum(attribute.make is make for attribute in domain.attributes) > 1:
        return False
    return not isinstance(make(Source(0)), int)


def _odd(source: Source, text: str) -> str:
    """Put a word that does not exist into every slot ``{x}``."""
    while "{x}" in text:
        text = text.replace("{x}", source.value(source.odd_word).lower(), 1)
    return text


def _say(source: Source, domain: Domain, position: int) -> str:
    """A sentence pattern for a fact: one of the list, or in training often one by grammar."""
    attribute = domain.attributes[position]
    if not source.widen():
        return source.phrase(attribute.says, unseen=0.5)
    own = wordings.WORDINGS[domain.kind][attribute.keys[0]][0]
    kept = kept_of(attribute.says)
    while True:
        roll = source.rng.random()
        if roll < 0.12:
            pattern = source.pick(wordings.GENERIC_SAYS)
        elif roll < 0.24 and _tells_kind(domain, position):
            pattern = source.pick(wordings.UNKNOWN_SAYS)
        else:
            pattern = source.pick(own)
        key = source.pick(attribute.keys).replace("_", " ")
        pattern = wordings.expand(source, pattern).replace("{k}", key)
        if not wordings.too_close(pattern, kept, attribute.keys):
            return _odd(source, pattern)


def say_fact(source: Source, passage: Passage, position: int, value: Value) -> str:
    """The sentence that a fact of the passage has the given value, its subject named if it can."""
    for _attempt in range(8):  # some facts have no sentence in their list that names the subject
        say = _say(source, passage.domain, position)
        if "{s}" in say or "{n}" in say:
            break
    return pools.articles(_capital(say.format(s=passage.subject, n=passage.subject, v=value)))


def make_passage(source: Source, facts: int, domain: Domain | None = None) -> Passage:
    """A passage about one subject that states about ``facts`` facts besides its name."""
    domain = domain or source.pick(DOMAINS)
    subject = domain.name(source)
    pronoun = source.pick(("She", "He"))
    values: dict[int, Value] = {}

    def value(position: int) -> Value:
        if position not in values:
            values[position] = domain.attributes[position].make(source)
        return values[position]

    sentences: list[str] = []
    order = list(range(len(domain.attributes)))
    source.rng.shuffle(order)
    if source.chance(0.55):
        opening = source.phrase(domain.openings, unseen=0.5)
        used = [i for i in range(len(domain.attributes)) if f"{{{i}}}" in opening]
        slots = {i: value(i) for i in used}
        sentences.append(
            opening.format(*[slots.get(i) for i in range(len(domain.attributes))], n=subject)
        )
    else:
        # The name must appear: an attribute sentence whose mention is the full name.
        while True:
            position = source.pick(order)
            say = _say(source, domain, position)
            if "{s}" in say or "{n}" in say:
                break
        full = subject
        if domain.kind in ("order", "trip"):
            full = f"{'Order' if domain.kind == 'order' else 'Flight'} {subject}"
        elif domain.kind == "event":
            full = f"The {subject}"
        elif domain.kind == "book" and source.chance(0.5):
            full = f"The book {subject}"
        sentences.append(_capital(say.format(s=full, v=value(position), n=subject)))
    for position in order:
        if len(values) >= facts:
            break
        if position in values:
            continue
        say = _say(source, domain, position)
        mention = _mention(source, domain, subject, pronoun)
        if not say.startswith("{s}") and mention in ("She", "He", "It"):
            mention = mention.lower()
            if source.wide and mention != "it" and not say.startswith(("At ", "In ", "After ")):
                mention = subject.split()[0]
        elif source.wide and not say.startswith("{s}") and mention[:5] in ("The o", "This "):
            mention = mention[0].lower() + mention[1:]
        name = subject.split()[0] if domain.kind == "person" else subject
        sentences.append(_capital(say.format(s=mention, v=value(position), n=name)))
        if source.chance(0.12):
            sentences.append(source.pick(FILLER))
    return Passage(pools.articles(" ".join(sentences)), domain, subject, values)


def ask(source: Source, passage: Passage, position: int | None = None) -> tuple[str, str, Value]:
    """A question about the passage, or about that fact of it: the question, its answer, and the
    field it is about."""
    if position is None:
        if source.chance(0.1) and not passage.others:
            return source.phrase(passage.domain.name_asks), passage.subject, "name"
        position = source.pick(sorted(passage.facts))
    attribute = passage.domain.attributes[position]
    name = passage.subject
    if passage.domain.kind == "person" and source.chance(0.4):
        name = name.split()[0]
    form = source.phrase(attribute.asks)
    if source.widen():
        form = _wide_question(source, passage, position, form)
    elif source.vary():
        form = _composed_question(source, attribute, form, named=bool(passage.others))
    question = form.format(n=name)
    return question, str(passage.facts[position]), attribute.keys[0]


COMPOSED_ASKS = (
    "What is the {k} of {n}?",
    "Tell me the {k} of {n}.",
    "Give the {k} of {n}.",
    "What {k} does {n} have?",
    "Which {k} does the text give for {n}?",
    "{n}: {k}?",
    "What does the text say about the {k} of {n}?",
    "What is {n}'s {k}?",
    "The {k} of {n}?",
    "Find the {k} of {n}.",
    "I want to know the {k} of {n}.",
    "What is the {k}?",
    "{k}?",
    "What is the {k} here?",
    "Please tell me the {k} of {n}.",
    "Do you know the {k} of {n}?",
    "Which {k} is given for {n}?",
    "What was the {k} of {n}?",
    "Name the {k} of {n}.",
)
WRAPPED_ASKS = (
    "Please answer: {q}",
    "{q} Answer briefly.",
    "Can you tell me: {l}",
    "According to the text, {l}",
    "I would like to know: {l}",
    "Tell me: {l}",
    "{q} Give only the answer.",
    "So, {l}",
    "Now tell me, {l}",
    "Q: {q}",
    "{l}",
)


def _composed_question(source: Source, attribute: Attribute, form: str, named: bool) -> str:
    """A question built from the field's name, or a known one in other clothes.

    ``named`` asks for a question that names its subject: the passage has two.
    """
    if source.chance(0.5):
        wrapped = source.pick(WRAPPED_ASKS)
        return wrapped.format(q=form, l=form[0].lower() + form[1:])
    composed = source.pick(COMPOSED_ASKS)
    composed = composed.replace("{k}", source.pick(attribute.keys).replace("_", " "))
    kept = pools.held_out_phrasings(attribute.asks)
    if (kept and composed in attribute.asks[-kept:]) or (named and "{n}" not in composed):
        return form
    return composed


def _wide_question(source: Source, passage: Passage, position: int, form: str) -> str:
    """A question worded by grammar, half of the time in a wrapping besides."""
    domain, attribute = passage.domain, passage.domain.attributes[position]
    kept = kept_of(attribute.asks)
    roll = source.rng.random()
    if roll < 0.75:
        while True:
            own = wordings.WORDINGS[domain.kind][attribute.keys[0]][1]
            pattern = source.pick(wordings.COMPOSED_ASKS if roll < 0.2 else own)
            key = source.pick(attribute.keys).replace("_", " ")
            form = wordings.expand(source, pattern).replace("{k}", key)
            if not wordings.too_close(form, kept, attribute.keys):
                break
        form = _capital(form) if form[0] != "{" else form
    if source.chance(0.35):
        lower = form if form[0] == "{" else form[0].lower() + form[1:]
        wrapped = wordings.expand(source, source.pick(wordings.WRAPPED_ASKS))
        wrapped = _odd(source, wrapped).replace("{q}", form).replace("{l}", lower)
        form = _capital(wrapped) if wrapped[0] != "{" else wrapped
    return form


def fields_of(source: Source, passage: Passage) -> list[tuple[str, Value]]:
    """All fields the passage states, under one of their names each, names distinct."""
    rows: list[tuple[str, Value]] = [(source.pick(passage.domain.name_keys), passage.subject)]
    for position, value in sorted(passage.facts.items()):
        key = source.pick(passage.domain.attributes[position].keys)
        if key not in [row[0] for row in rows]:
            rows.append((key, value))
    return rows
