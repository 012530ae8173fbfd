"""Documents of the demo corpus, one function per skill, deterministic from a seed.

A document is a list of segments ``(text, weight)``; the weight says how much the tokens of the
segment count in the training loss.  Prompts have weight 0: at this size every step should teach
answers.  Multi-turn conversations put several answers into one row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from . import asks, labels, pools
from .passages import Passage, ask, fields_of, make_passage
from .pools import Source

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
Message = dict[str, str]
Segment = tuple[str, float]
Document = list[Segment]


def compact_json(pairs: Sequence[tuple[str, object]] | dict[str, object]) -> str:
    return json.dumps(dict(pairs), separators=(",", ":"), ensure_ascii=False)


def short_answer_weight(answer: str) -> float:
    """More for short answers: a label decides as much as a long object, in one token."""
    return min(5.0, 1.0 + 24.0 / len(answer))


def chat_document(messages: Sequence[Message], lift_short: bool = False) -> Document:
    """Messages in the ChatML layout of the template; only assistant text is learnt."""
    document: Document = []
    for message in messages:
        learnt = message["role"] == "assistant"
        document.append((f"{IM_START}{message['role']}\n", 0.0))
        weight = short_answer_weight(message["content"]) if lift_short else 1.0
        document.append((f"{message['content']}{IM_END}", weight if learnt else 0.0))
        document.append(("\n", 0.0))
    return document


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


# --- extraction ------------------------------------------------------------------------------

EXTRACT_ASKS = (
    "Extract {f} as JSON.",
    "Extract {f} from the text as JSON.",
    "Return {f} as JSON.",
    "Give me {f} as compact JSON.",
    "Extract the fields {f}.",
    "Fields: {f}",
    "Extract JSON with the fields {f}.",
    "Read the passage and extract {f} as JSON.",
    "Extract the following fields as JSON: {f}.",
    "JSON fields: {f}",
    "From the passage, extract {f}.",
    "Write a JSON object with {f}.",
    "Please extract {f} in JSON.",
    "Pull out {f} as JSON.",
    "I need {f} as JSON.",
    "Find {f} in the passage and answer in JSON.",
    "Extract: {f}",
    "Put {f} into a JSON object.",
    "Get {f} from this passage as JSON.",
    "List {f} as a JSON object.",
    "Please give {f} as JSON.",
)
EXTRACT_LAYOUTS = (
    "{a}\n\n{p}",
    "{a}\n{p}",
    "{p}\n\n{a}",
    "{p}\n{a}",
    "{a}\nText: {p}",
    "{a}\n\nPassage: {p}",
    "Passage: {p}\n\n{a}",
    "Text: {p}\n{a}",
    "Passage:\n{p}\n\n{a}",
    "{a} {p}",
    "{a}\n\nText:\n{p}",
)
QUESTION_LAYOUTS = (
    "{p}\n\n{q}",
    "Passage: {p}\n\nQuestion: {q}",
    "{p}\n{q}",
    "Read the passage and answer.\n{p}\n{q}",
    "{q}\n\n{p}",
    "Passage: {p}\nQuestion: {q}",
    "Text: {p}\n\nQuestion: {q}",
    "{p} {q}",
    "Context: {p}\nQuestion: {q}",
    "Question: {q}\nPassage: {p}",
    "Passage:\n{p}\n\nQuestion: {q}",
)
# Parts that later stages put together at random, so that the model learns to look for the field
# names and the question rather than for a wording.
ASK_VERBS = (
    "Extract",
    "Return",
    "Give me",
    "Find",
    "Write",
    "Output",
    "Show",
    "Pick out",
    "Collect",
    "Tell me",
    "I want",
    "I would like",
    "Can you extract",
    "Produce",
    "Make JSON with",
    "Read",
    "Report",
    "Fill in",
    "Copy",
    "Note down",
    "Please extract",
    "Please return",
    "Print",
    "Send",
    "Take",
    "Provide",
    "Name",
    "Could you find",
    "Answer with",
    "We need",
    "Please write",
)
ASK_TAILS = (
    " as JSON",
    " in JSON",
    " as a JSON object",
    " from the text as JSON",
    " as compact JSON",
    " from the passage",
    " in a JSON object",
    " (JSON)",
    "",
    " using JSON",
    " in JSON format",
    " from the passage as JSON",
    " as one JSON object",
    " in the text below",
    " as json",
    " mentioned in the text",
    " as valid JSON",
)
PASSAGE_TAGS = ("Passage", "Text", "Context", "Document", "Note", "Input", "Article", "Message")
QUESTION_TAGS = ("Question", "Q", "Task", "Request", "Query")
HELD_OUT_LAYOUTS = {
    *EXTRACT_LAYOUTS[-pools.held_out_phrasings(EXTRACT_LAYOUTS) :],
    *QUESTION_LAYOUTS[-pools.held_out_phrasings(QUESTION_LAYOUTS) :],
}


def composed_layout(source: Source, slot: str) -> str:
    """Passage and request in either order, each with or without a tag; never a held-out form."""
    while True:
        passage, request = "{p}", f"{{{slot}}}"
        if source.chance(0.6):
            passage = source.pick(PASSAGE_TAGS) + source.pick((": ", ":\n")) + passage
        if source.chance(0.3):
            request = source.pick(QUESTION_TAGS) + source.pick((": ", ":\n")) + request
        parts = [passage, request]
        if source.chance(source.request_first):
            parts.reverse()
        layout = source.pick(("\n\n", "\n", "\n", " ")).join(parts)
        if layout not in HELD_OUT_LAYOUTS:
            return layout


def extract_layout(source: Source) -> str:
    layout = source.phrase(EXTRACT_LAYOUTS)
    return composed_layout(source, "a") if source.vary() else layout


def question_layout(source: Source) -> str:
    layout = source.phrase(QUESTION_LAYOUTS)
    return composed_layout(source, "q") if source.vary() else layout


KEPT_EXTRACTION = EXTRACT_ASKS[-pools.held_out_phrasings(EXTRACT_ASKS) :]
FOLLOW_UPS = ("{q}", "{q}", "Question: {q}", "And: {q}", "{q}")


def list_fields(source: Source, keys: Sequence[str]) -> str:
    """How a person would list field names in a request."""
    style = source.rng.randrange(5)
    if style == 0 and len(keys) > 1:
        return ", ".join(keys[:-1]) + " and " + keys[-1]
    if style == 1:
        return "the " + ", ".join(keys[:-1]) + (" and " if len(keys) > 1 else "") + keys[-1]
    if style == 2 and len(keys) > 1:
        return ", ".join(keys[:-1]) + ", and " + keys[-1]
    return ", ".join(keys)


def extract_request(
    source: Source, rows: Sequence[tuple[str, object]], fields: int | None = None
) -> tuple[str, str]:
    """A request for some (or so many) of the fields, in any order, and the right answer."""
    wanted = min(len(rows), fields or source.pick((1, 2, 2, 3, 3, 3, 4, 4, 5)))
    chosen = source.rng.sample(list(rows), wanted)
    if source.chance(0.5):
        chosen.sort(key=list(rows).index)
    if source.widen():
        keys = [key for key, _value in chosen]
        return asks.extraction_request(source, keys, KEPT_EXTRACTION), compact_json(chosen)
    form = source.phrase(EXTRACT_ASKS)
    if source.vary():
        tail = source.pick(ASK_TAILS) + source.pick((".", ".", "", ":"))
        verb = source.pick(ASK_VERBS)
        if source.any_verb > 0 and source.chance(source.any_verb):
            verb = source.value(source.odd_word)
            if source.chance(0.4):
                tail = f" {source.made()} " + source.pick(("JSON", "a JSON object", "this text"))
        form = verb + source.pick((" ", " ", " the fields ", ": ")) + "{f}" + tail
    request = form.format(f=list_fields(source, [key for key, _value in chosen]))
    return request, compact_json(chosen)


def extraction(source: Source, facts: int) -> list[Message]:
    passage = make_passage(source, facts)
    request, answer = extract_request(source, fields_of(source, passage))
    layout = extract_layout(source)
    return [user(layout.format(a=request, p=passage.text)), assistant(answer)]


def record_extraction(source: Source, facts: int) -> list[Message]:
    """Arbitrary keys and values: pure copying by key, the circuit extraction is built on."""
    keys: list[str] = []
    while len(keys) < facts:
        if source.chance(0.5):
            key = source.made()
        else:
            key = source.pick(labels.LOOKUP_SUBJECTS).split()[0]
        if key not in keys:
            keys.append(key)
    makers: tuple[Callable[[], object], ...] = (
        source.first_name,
        source.person,
        source.city,
        source.code,
        lambda: source.number(1, 9999),
        source.title,
        source.company,
        source.date,
        lambda: source.word(pools.JOBS),
        source.item,
        source.made,
    )
    rows = [(key, source.pick(makers)()) for key in keys]
    between, after = source.pick(
        ((": ", "\n"), (" = ", "\n"), (": ", ", "), (" is ", ". "), ("=", " "), (": ", "; "))
    )
    text = after.join(f"{key}{between}{value}" for key, value in rows)
    request, answer = extract_request(source, rows)
    messages = [user(extract_layout(source).format(a=request, p=text)), assistant(answer)]
    for _ in range(source.pick((0, 1, 2, 3))):
        key, value = source.pick(rows)
        messages += [
            user(source.pick(("What is {k}?", "{k}?", "Tell me {k}.")).format(k=key)),
            assistant(str(value)),
        ]
    return messages


# --- questions on a passage ------------------------------------------------------------------


def two_subjects(source: Source, facts: int) -> list[Passage]:
    """Two subjects of one kind in one text, so that the question must pick the right one."""
    first = make_passage(source, facts)
    second = make_passage(source, facts, first.domain)
    for one, other in ((first, second), (second, first)):
        one.others.append(other)
    return [first, second]


def question(source: Source, facts: int) -> list[Message]:
    """One question on a passage about one or two subjects."""
    if facts <= 4 and source.chance(0.4 if source.wide else 0.25):
        passages = two_subjects(source, max(1, facts - 1))
    else:
        passages = [make_passage(source, facts)]
    text = source.pick((" ", "\n")).join(passage.text for passage in passages)
    asked, answer, _ = ask(source, source.pick(passages))
    layout = question_layout(source)
    return [user(layout.format(p=text, q=asked)), assistant(answer)]


JUDGE_ASKS = (
    "Is the text about a {t}?",
    "Is this about a {t}?",
    "Is the passage about a {t}?",
    "Does the text describe a {t}?",
    "Is this passage about a {t}?",
)
VALUE_JUDGE = (
    "Does the text mention {v}?",
    "Is {v} mentioned?",
    "Does {v} appear in the text?",
    "Is {v} named in the passage?",
    "Does the passage mention {v}?",
)
KEPT_JUDGE = (JUDGE_ASKS[-1], VALUE_JUDGE[-1])
CHOICE_ASKS = (
    "{q} Choose one: {o}.",
    "{q} Options: {o}",
    "{q}\nOptions: {o}",
    "{q} ({o})",
    "{q} Answer with one of: {o}.",
    "{q} Pick one of: {o}.",
)
KINDS = ("person", "book", "company", "building", "flight", "pet", "event", "order")


def judge_request(source: Source, passage: Passage) -> tuple[str, str]:
    """A yes/no question, true half of the time."""
    yes = source.chance(0.5)
    if source.chance(0.6):
        kind = "flight" if passage.domain.kind == "trip" else passage.domain.kind
        asked = kind if yes else source.pick([k for k in KINDS if k != kind])
        text = source.phrase(JUDGE_ASKS).format(t=asked)
        return text.replace(" a e", " an e").replace(" a o", " an o"), "yes" if yes else "no"
    position = source.pick(sorted(passage.facts))
    value = passage.facts[position]
    if not yes:
        attribute = passage.domain.attributes[position]
        while str(value) in passage.text:
            value = attribute.make(source)
    return source.phrase(VALUE_JUDGE).format(v=value), "yes" if yes else "no"


def choice_request(source: Source, passage: Passage) -> tuple[str, str]:
    """A question with the answers to choose from."""
    asked, answer, key = ask(source, passage)
    options = [answer]
    makers = [a.make for a in passage.domain.attributes if a.keys[0] == key]
    for _ in range(100):
        if len(options) >= 3:
            break
        wrong = str(makers[0](source) if key != "name" else passage.domain.name(source))
        if wrong not in options and wrong not in passage.text:
            options.append(wrong)
    source.rng.shuffle(options)
    joined = source.pick((", ", ", ", " / ", " or ")).join(options)
    return source.phrase(CHOICE_ASKS).format(q=asked, o=joined), answer


def judge(source: Source, facts: int) -> list[Message]:
    passage = make_passage(source, facts)
    asked, answer = judge_request(source, passage)
    return [user(question_layout(source).format(p=passage.text, q=asked)), assistant(answer)]


def judge_session(source: Source, facts: int) -> list[Message]:
    """Several yes/no questions on a passage: contrasts, many answers for its tokens."""
    plain = source.chance(source.plain_judging)
    passages = (
        two_subjects(source, max(1, facts - 1))
        if not plain and source.chance(0.25)
        else [make_passage(source, facts)]
    )
    text = source.pick((" ", "\n")).join(passage.text for passage in passages)
    messages: list[Message] = []
    for turn in range(source.pick((1, 4, 6, 8, 10) if plain else (1, 2, 4, 6, 8))):
        if len(passages) == 1 and source.chance(0.6 if plain else 0.3):
            asked, answer = judge_request(source, passages[0])
        else:
            asked, answer = asks.yes_no(source, passages, KEPT_JUDGE, plain)
        layout = question_layout(source) if turn == 0 else source.pick(FOLLOW_UPS)
        messages += [user(layout.format(p=text, q=asked)), assistant(answer)]
    return messages


def judge_drill(source: Source, facts: int) -> Document:
    """A passage, then values and kinds line by line, each with yes or no: dense in answers."""
    passage = make_passage(source, facts)
    plain = source.chance(source.plain_judging)
    asked: list[tuple[str, str]] = []
    for position, value in passage.facts.items():
        wrong = asks.absent_value(source, [passage], passage, position, plain)
        asked += [(str(value), "yes"), (wrong, "no")]
    for yes in (True, False):
        asked.append((f"a {asks.kind_named(source, passage, yes)}", "yes" if yes else "no"))
    source.rng.shuffle(asked)
    document: Document = [(f"{passage.text}\n", 0.0)]
    for named, answer in asked:
        document += [(f"{pools.articles(named)}?\n", 0.0), (answer, 1.5), ("\n", 0.0)]
    return document


def choice(source: Source, facts: int) -> list[Message]:
    passage = make_passage(source, facts)
    asked, answer = choice_request(source, passage)
    return [
        user(source.phrase(QUESTION_LAYOUTS[:4]).format(p=passage.text, q=asked)),
        assistant(answer),
    ]


def passage_session(source: Source, facts: int) -> list[Message]:
    """One passage and several requests about it: many answers for the tokens of one passage."""
    if source.chance(0.3):
        passages = two_subjects(source, max(1, facts - 1))
    else:
        passages = [make_passage(source, facts)]
    text = source.pick((" ", "\n")).join(passage.text for passage in passages)
    messages: list[Message] = []
    answered: set[str] = set()
    for _attempt in range(source.pick((2, 3, 4, 6))):
        passage = source.pick(passages)
        roll = source.rng.random()
        if roll < 0.35 and len(passages) == 1:
            asked, answer = extract_request(source, fields_of(source, passage))
            layout = extract_layout(source).replace("{a}", "{q}")
        elif roll < 0.82 or len(passages) > 1:
            asked, answer, _ = ask(source, passage)
            layout = question_layout(source)
        elif roll < 0.92:
            asked, answer = judge_request(source, passage)
            layout = question_layout(source)
        else:
            asked, answer = choice_request(source, passage)
            layout = question_layout(source)
        if answer in answered:
            continue
        answered.add(answer)
        if not messages:
            first = layout.format(p=text, q=asked)
        else:
            first = source.pick(FOLLOW_UPS).format(q=asked)
        messages += [user(first), assistant(answer)]
    return messages


def dense_session(source: Source, facts: int) -> list[Message]:
    """All fields of a passage as JSON and a question about each fact, in any order: two answers for
    every sentence, where a session asks for a few of them."""
    passages = [make_passage(source, facts)]
    if source.chance(0.5):
        passages = two_subjects(source, facts // 2 + 1)
    requests: list[tuple[str, str]] = []
    if len(passages) == 1:
        rows = fields_of(source, passages[0])
        source.rng.shuffle(rows)
        for start in range(0, len(rows), 5):  # a request has five fields at most
            requests.append(extract_request(source, rows[start : start + 5], len(rows)))
    for passage in passages:
        requests += [ask(source, passage, at)[:2] for at in passage.facts]
    source.rng.shuffle(requests)
    text = source.pick((" ", "\n")).join(passage.text for passage in passages)
    messages: list[Message] = []
    for asked, answer in requests:
        layout = source.pick(FOLLOW_UPS)
        if not messages:
            layout = (
                extract_layout(source).replace("{a}", "{q}")
                if answer.startswith("{")
                else question_layout(source)
            )
        messages += [user(layout.format(p=text, q=asked)), assistant(answer)]
    return messages


# --- few-shot labels -------------------------------------------------------------------------


def labelled_text(source: Source, task: labels.Task, name: str) -> str:
    """A text of the class ``name``."""

    def clause() -> str:
        word = source.pick(task.classes[name])
        thing = source.pick(task.things)
        if word.startswith("@"):
            return source.phrase(task.templates, 0.5).format(t=thing, w=word[1:])
        if task.name == "sentiment":
            return word.format(t=thing)
        return source.phrase(task.templates, 0.5).format(w=word)

    text = clause()
    if task.name == "sentiment" and source.chance(0.35):
        text += source.pick((". ", " and ", ", ")) + clause()
    if task.name == "kind":
        return text
    text = pools.articles(text[0].upper() + text[1:])
    return text + (source.pick((".", ".", "!", "")))


def few_shot_lines(source: Source, shots: int) -> tuple[list[tuple[str, str]], str, str, list[str]]:
    """Labelled texts in which every label occurs early: rows, the two tags, and the labels."""
    task = source.pick(labels.TASKS + labels.TASKS[:1])
    names = list(task.classes)
    classes = 2 if len(names) == 2 else source.pick((2, 2, 3, 3, 4))
    chosen = source.rng.sample(range(len(names)), classes)
    roll = source.rng.random()
    if roll < 0.5:
        given = source.pick(task.label_sets)
        words = [given[i] for i in chosen]
    elif roll < 0.65:
        words = source.rng.sample(
            list("ABCDEFGH") if source.chance(0.6) else list("12345"), classes
        )
    else:
        words = []
        while len(words) < classes:
            word = source.made(source.pick((1, 2, 2)))
            word = word.capitalize() if source.chance(0.2) else word
            if word not in words:
                words.append(word)
    input_tag, label_tag = source.phrase(task.input_tags), source.phrase(task.label_tags)
    if source.any_tag > 0 and source.chance(source.any_tag):
        input_tag, label_tag = source.made().capitalize(), source.made().capitalize()
    order = list(range(classes))
    source.rng.shuffle(order)
    order += [source.rng.randrange(classes) for _ in range(max(0, shots - classes))]
    rows = [(labelled_text(source, task, names[chosen[i]]), words[i]) for i in order]
    return rows, input_tag, label_tag, words


def few_shot_text(source: Source, shots: int, label_weight: float = 1.5) -> Document:
    """The plain-text form, without chat markup."""
    rows, input_tag, label_tag, words = few_shot_lines(source, shots)
    between = source.pick(("\n\n", "\n\n", "\n"))
    document: Document = []
    if source.chance(0.3):
        document.append((f"Classify each {input_tag.lower()}.{between}", 0.0))
    seen: set[str] = set()
    for index, (text, label) in enumerate(rows):
        document.append((f"{input_tag}: {text}\n{label_tag}:", 0.0))
        known = len(seen) == len(words)
        document.append((f" {label}", label_weight if known else 0.0))
        if index + 1 < len(rows):
            document.append((between, 0.3))
        seen.add(label)
    document.append((END_OF_TEXT, 0.3))
    return document


def few_shot_chat(source: Source, shots: int) -> list[Message]:
    """The same inside one user turn."""
    rows, input_tag, label_tag, _words = few_shot_lines(source, shots)
    between = source.pick(("\n\n", "\n"))
    shown = between.join(f"{input_tag}: {text}\n{label_tag}: {label}" for text, label in rows[:-1])
    text, answer = rows[-1]
    return [user(f"{shown}{between}{input_tag}: {text}\n{label_tag}:"), assistant(answer)]


CLASSIFY_ASKS = (
    "Classify the text as {o}.",
    "Is the text {o}?",
    "Label the text as {o}.",
    "Which label fits: {o}?",
    "Choose a label: {o}.",
    "Answer with {o}.",
)


def zero_shot(source: Source, _: int) -> list[Message]:
    """The labels are named, with the usual words, and no examples are given."""
    task = source.pick(labels.TASKS + labels.TASKS[:1])
    names = list(task.classes)
    chosen = source.rng.sample(range(len(names)), min(len(names), source.pick((2, 3))))
    given = task.label_sets[0]
    target = source.pick(chosen)
    options = " or ".join([", ".join(given[i] for i in chosen[:-1]), given[chosen[-1]]])
    request = source.phrase(CLASSIFY_ASKS).format(o=options)
    text = labelled_text(source, task, names[target])
    layout = source.pick(("{a}\n{t}", "{a}\nText: {t}", "{t}\n{a}", "{a}\n\n{t}"))
    return [user(layout.format(a=request, t=text)), assistant(given[target])]


# --- tools -----------------------------------------------------------------------------------


def tool_system(names: Sequence[str]) -> str:
    """The system message that the chat template writes when tools are given."""
    lines = "\n".join(labels.TOOL_LINES[name] for name in names)
    return f"{labels.SYSTEM_LINE}\n\nTools:\n{lines}"


def tool_call(name: str, **arguments: str) -> str:
    return f"<tool_call>{compact_json({'name': name, 'arguments': arguments})}</tool_call>"


def tool_turn(source: Source, name: str) -> list[Message]:
    """A request, the call, the result of the tool, and the answer that uses it."""
    if name == "calculator":
        operator = source.pick("**+-/")
        a, b = source.number(2, 999), source.number(2, source.pick((12, 99, 999)))
        asked = source.phrase(labels.CALCULATOR_ASKS[operator]).format(a=a, b=b)
        exact = {"*": a * b, "+": a + b, "-": a - b}.get(operator)
        result = str(exact) if exact is not None else f"{a / b:.4g}"
        expression = f"{a}{operator}{b}"
        call, answer = tool_call(name, expression=expression), f"{expression} = {result}."
    elif name == "lookup":
        subject = source.pick((source.city, source.person, source.company, source.place))()
        query = f"{source.pick(labels.LOOKUP_SUBJECTS)} of {subject}"
        asked = source.phrase(labels.LOOKUP_ASKS).format(q=query)
        result = str(
            source.pick(
                (
                    lambda: source.number(2, 99999),
                    source.person,
                    source.city,
                    source.date,
                    source.code,
                )
            )()
        )
        call, answer = tool_call(name, query=query), f"The {query} is {result}."
    else:
        city = source.city()
        asked = source.phrase(labels.WEATHER_ASKS).format(c=city)
        sky, degrees = source.pick(labels.SKY), source.number(1, 39)
        result = f"{sky}, {degrees} degrees"
        call, answer = tool_call(name, city=city), f"The weather in {city} is {result}."
    return [user(asked), assistant(call), {"role": "tool", "content": result}, assistant(answer)]


def tools(source: Source, _: int) -> list[Message]:
    """A conversation with tools; the system message names those it may use."""
    names = source.pick(
        (
            ["calculator", "lookup"],
            ["calculator", "lookup"],
            ["calculator"],
            ["lookup"],
            ["weather"],
            ["calculator", "lookup", "weather"],
            ["weather", "calculator"],
            ["lookup", "calculator"],
        )
    )
    messages = [system(tool_system(names))]
    for _turn in range(source.pick((1, 1, 2, 3))):
        if source.chance(0.1):
            messages += small_talk(source)
        messages += tool_turn(source, source.pick(names))
    return messages


# --- small talk and tips ---------------------------------------------------------------------


def small_talk(source: Source) -> list[Message]:
    asks, answer = source.pick(labels.SMALL_TALK)
    asked = source.phrase(asks)
    if source.vary():
        asked = source.pick(
            (
                asked.lower(),
                asked.rstrip(".!?"),
                asked.rstrip(".!?") + "!",
                asked.rstrip(".!?").lower(),
                asked.rstrip(".!?") + ".",
            )
        )
    return [user(asked), assistant(answer)]


def name_recall(source: Source) -> list[Message]:
    """The user gives a name and asks for it later."""
    name = source.first_name()
    messages = [
        user(source.phrase(labels.NAME_GREETINGS).format(n=name)),
        assistant(f"Hello, {name}! How can I help you?"),
    ]
    if source.chance(0.5):
        messages += small_talk(source)
    return [*messages, user(source.phrase(labels.NAME_ASKS)), assistant(f"Your name is {name}.")]


def greetings(source: Source, _: int) -> list[Message]:
    messages = name_recall(source) if source.chance(0.3) else []
    for _turn in range(source.pick((1, 1, 2, 3))):
        messages += small_talk(source)
    return messages


def _lower_first(text: str) -> str:
    return text[0].lower() + text[1:]


def tip_summary(tips: Sequence[str]) -> str:
    lowered = [_lower_first(tip) for tip in tips]
    return "In short: " + ", ".join(lowered[:-1]) + " and " + lowered[-1] + "."


def tips_chat(source: Source, _: int) -> list[Message]:
    """List tips, expand some of them, sum them up."""
    topic = source.pick(list(labels.TIPS))
    count = source.pick((2, 2, 3))
    # Fixed order: the list is learnt by heart, so greedy decoding should find one clear answer.
    rows = labels.TIPS[topic][:count]
    word = source.pick((labels.NUMBER_WORDS[count], str(count)))
    listed = "\n".join(f"{i + 1}. {tip}." for i, (tip, _more) in enumerate(rows))
    messages = [user(source.phrase(labels.TIP_ASKS).format(k=word, t=topic)), assistant(listed)]
    for index in source.rng.sample(range(count), source.pick((0, 1, count))):
        messages += [
            user(source.phrase(labels.EXPAND_ASKS).format(i=index + 1)),
            assistant(rows[index][1]),
        ]
    if source.chance(0.5):
        messages += [
            user(source.phrase(labels.SUMMARY_ASKS)),
            assistant(tip_summary([tip for tip, _more in rows])),
        ]
    return messages


def tips_text(source: Source, _: int) -> Document:
    """The plain-text form of the fork/join example: a list, one expansion each, a summary."""
    topic = source.pick(list(labels.TIPS))
    rows = list(labels.TIPS[topic])
    source.rng.shuffle(rows)
    rows = rows[: source.pick((2, 2, 3))]
    count = labels.NUMBER_WORDS[len(rows)]
    listed = " ".join(f"{i + 1}. {tip}." for i, (tip, _more) in enumerate(rows))
    # The prompt is one segment: cut inside a run of newlines it would tokenize differently.
    prompt = f"Here are {count} tips for {topic}. {listed}\n\n"
    if source.chance(0.5):
        index = source.rng.randrange(len(rows))
        prompt += f"Now, expand tip {index + 1} into a sentence:\n"
        answer = rows[index][1]
    else:
        prompt += "".join(f"Tip {i + 1}: {more}\n" for i, (_tip, more) in enumerate(rows))
        prompt += "\nIn short:"
        answer = tip_summary([tip for tip, _more in rows]).removeprefix("In short:")
    return [(prompt, 0.0), (answer, 1.0), (END_OF_TEXT, 1.0)]


# --- the mixture -----------------------------------------------------------------------------


def _with_system(source: Source, messages: list[Message]) -> list[Message]:
    if messages[0]["role"] != "system" and source.chance(0.35):
        return [system(source.pick(labels.SYSTEM_LINES)), *messages]
    return messages


@dataclass(frozen=True)
class Stage:
    """How hard and how long the documents are at some point of the training run."""

    facts: tuple[int, ...]
    shots: tuple[int, ...]
    records: float
    chained: float
    long: float
    shares: tuple[float, ...] = (0.36, 0.16, 0.12, 0.02, 0.02, 0.05, 0.03, 0.09, 0.04, 0.04)
    few_shot_text: float = 0.10
    tips_text: float = 0.02
    label_weight: float = 1.5
    lift_short: bool = False
    varied: float = 0.0
    odd: float = 0.0
    request_first: float = 0.5
    any_tag: float = 0.0
    any_verb: float = 0.0
    wide: float = 0.0
    plain_judging: float = 0.0
    drills: float = 0.0
    dense: float = 0.0


EARLY = Stage(facts=(1, 2, 2, 3), shots=(4, 6, 8), records=0.25, chained=0.0, long=0.0)
MIDDLE = Stage(facts=(1, 2, 3, 4, 5), shots=(3, 4, 6, 8, 10), records=0.08, chained=0.08, long=0.0)
# The tokenizer is learnt from this mixture.
MIXED = Stage(
    facts=(1, 2, 3, 4, 5, 6, 7), shots=(2, 3, 4, 6, 8, 12), records=0.05, chained=0.12, long=0.025
)
# Copying is learnt by now.  Labels and yes/no answers, a token each, get their share of the
# loss, and requests are worded from parts.
LATE = Stage(
    facts=(1, 2, 3, 3, 4, 4, 5, 6, 7),
    shots=(4, 6, 8, 10, 12),
    records=0.04,
    chained=0.10,
    long=0.02,
    shares=(0.26, 0.18, 0.13, 0.05, 0.04, 0.09, 0.06, 0.08, 0.05, 0.05),
    few_shot_text=0.18,
    tips_text=0.03,
    label_weight=5.0,
    lift_short=True,
    varied=0.4,
)
# Names of any letters, and more requests before the passage, which is the harder order.
WIDE = replace(LATE, varied=0.55, odd=0.3, request_first=0.65)
# Labels are learnt; back to passages, the harder skill.  Tags of few-shot texts may be any word.
DEEP = replace(
    WIDE,
    shares=(0.36, 0.23, 0.13, 0.04, 0.03, 0.04, 0.03, 0.08, 0.03, 0.03),
    few_shot_text=0.11,
    varied=0.6,
    odd=0.4,
    any_tag=0.4,
    long=0.02,
)
# Verbs that do not exist: a request must work whatever word it starts with.
LAST = replace(
    DEEP,
    shares=(0.34, 0.26, 0.12, 0.07, 0.03, 0.04, 0.03, 0.07, 0.03, 0.03),
    tips_text=0.04,
    any_verb=0.35,
)

# Training further: sentences and requests by grammar, and yes/no contrasts in large weight.
FURTHER = replace(
    LAST,
    facts=(1, 2, 3, 3, 4, 4, 5, 5, 6, 7),
    shares=(0.22, 0.24, 0.17, 0.20, 0.03, 0.03, 0.03, 0.05, 0.03, 0.02),
    few_shot_text=0.07,
    tips_text=0.03,
    records=0.03,
    chained=0.05,
    long=0.015,
    varied=0.7,
    odd=0.35,
    any_verb=0.3,
    wide=0.65,
    plain_judging=0.6,
    drills=0.10,
)

# Telling yes from no is learnt only where most answers ask for it, in plain questions.
JUDGING = replace(
    FURTHER,
    facts=(1, 2, 2, 3, 4),
    shares=(0.08, 0.06, 0.05, 0.70, 0.02, 0.02, 0.02, 0.03, 0.01, 0.01),
    few_shot_text=0.04,
    tips_text=0.01,
    wide=0.5,
    plain_judging=1.0,
    drills=0.75,
)

# What is left then: every fact of a passage is asked for.
DENSE = replace(
    FURTHER,
    dense=0.5,
    wide=0.75,
    drills=0.08,
    shares=(0.15, *FURTHER.shares[1:3], 0.3, *FURTHER.shares[4:]),
)

# In the order of ``Stage.shares``.
CHAT_SKILLS: tuple[Callable[[Source, int], list[Message]], ...] = (
    passage_session,
    extraction,
    question,
    judge,
    choice,
    few_shot_chat,
    zero_shot,
    tools,
    greetings,
    tips_chat,
)


def chat_messages(source: Source, stage: Stage) -> list[Message]:
    if source.chance(stage.records):
        return record_extraction(source, source.pick((2, 3, 4, 5)))
    maker = source.rng.choices(CHAT_SKILLS, stage.shares)[0]
    if maker is judge and stage.wide:
        maker = judge_session
    size = stage.shots if maker is few_shot_chat else stage.facts
    return maker(source, source.pick(size))


def document(source: Source, stage: Stage) -> Document:
    """One training document of the mixture."""
    source.varied, source.odd = stage.varied, stage.odd
    source.request_first, source.any_tag = stage.request_first, stage.any_tag
    source.any_verb, source.wide = stage.any_verb, stage.wide
    source.plain_judging = stage.plain_judging
    if stage.drills and source.chance(stage.drills):
        return judge_drill(source, source.pick((1, 2, 3, 4, 5)))
    if stage.dense and source.chance(stage.dense):
        return chat_document(dense_session(source, source.pick((3, 4, 5, 6))), stage.lift_short)
    if source.chance(stage.long):
        return long_document(source, stage)
    roll = source.rng.random()
    if roll < stage.few_shot_text:
        return few_shot_text(source, source.pick(stage.shots), stage.label_weight)
    if roll < stage.few_shot_text + stage.tips_text:
        return tips_text(source, 0)
    messages = _with_system(source, chat_messages(source, stage))
    if source.chance(stage.chained):
        messages += _chain(source, stage)
    return chat_document(messages, stage.lift_short)


def _chain(source: Source, stage: Stage) -> list[Message]:
    """A further request of any kind in the same conversation (tools need their own system)."""
    while True:
        messages = chat_messages(source, stage)
        if messages[0]["role"] != "system":
            return messages


def long_document(source: Source, stage: Stage) -> Document:
    """Rows of 500 to 1000 tokens: many examples, or a long conversation."""
    if source.chance(0.4):
        return few_shot_text(source, source.pick((20, 30, 40)), stage.label_weight)
    messages = _with_system(source, chat_messages(source, stage))
    length = source.pick((1600, 2200, 3000))
    while sum(len(message["content"]) + 40 for message in messages) < length:
        messages += _chain(source, stage)
    return chat_document(messages, stage.lift_short)
