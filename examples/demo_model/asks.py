"""Requests for extraction and yes/no judging, worded by grammar, for training only.

As in ``wordings.py``: evaluation never draws from here, and what evaluation keeps for itself
(its forms, and the words ``KEPT_VERBS`` that its extraction requests begin with) never occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import pools
from .passages import Passage, Value, say_fact
from .pools import Source
from .wordings import expand, too_close

# Never used as verbs of a request, because evaluation begins its unseen requests with them.
KEPT_VERBS = ("put", "get", "list", "please give")

EXTRACTION = (
    "[|Please |Kindly |Now |Next, |OK, |Then |Quickly ]"
    "[extract|return|find|write|output|show|pick|pick out|collect|produce|report|copy|note down|"
    "print|send|take|provide|name|fetch|gather|read off|deliver|compose|create|generate|build|"
    "identify|select|store|save|turn|convert|parse|render|reply with|respond with|answer with|"
    "look up|dig out|grab|assemble|make|format|supply|hand over|present|record|type|map|{x}]"
    "[| me| us| only| exactly| just|: |: only| the fields| the values of| these fields:|"
    " the following:| the keys| data for| facts on| the details| {x}|:] {f}"
    "[| from it| from the [text|passage|lines|note|message|story|sentences|paragraph|above|below]|"
    " found in the [text|lines|note|story]| that the [text|note] gives| given there| {x} {x}]"
    "[| as JSON| in JSON| as a JSON [object|record|dictionary|document]| using JSON|"
    " and answer in JSON| in [one|a single] JSON object| (JSON only)| formatted as JSON|"
    ", JSON please| to JSON| as an object| with JSON syntax| as {x} JSON| {x} JSON| in the form of "
    "JSON]",
    "[Can|Could|Would|Will] you [|please |kindly |also ]"
    "[extract|return|find|write|show|pick out|collect|produce|report|copy|fetch|{x}] {f}"
    "[| for me| for us| from this| from the text][| as JSON| in JSON| in a JSON object]?",
    "[I|We|They|My program|The system] [need|want|would like|ask for|must have|require|expect|"
    "look for|{x}] {f}[| from this| from the text| from the lines][| as JSON| in JSON]",
    "[JSON|JSON object|Object|Record|Keys|Values|Wanted|Needed|Output|Schema|Columns|Data|"
    "Result|{x}][:| with| of| for|, please:] {f}",
    "[What are|Which are|What does the text say for|What do you find for] {f}?[| JSON.| Use JSON.|"
    " Answer in JSON.]",
    "[A|One|Some] [JSON object|object|record|dictionary] [with|of|holding|containing|for|that has]"
    " {f}[|, please| is needed| is what I want]",
    "[Turn|Convert|Make|Change|Transform] [this|the text|the passage|it] [into|to] [JSON|an object|"
    "a record] [with|of|having|holding|containing] {f}",
    "[Fill|Complete] [in |][this|the] [form|record|JSON object|template]: {f}",
    "[From|Out of|Using|With|Given|In|For] [this|the [text|passage|story|note|lines]][,|:|]"
    " [extract|return|write|build|produce|read|take|show|{x}] {f}[| as JSON| in JSON]",
    "{f}[| as JSON| in JSON|, JSON|: JSON please|, as an object]",
)
# Beginnings that no request of evaluation can be distinguished from follow these words.
ENDINGS = ("", ".", ".", ":", "!", " please.", ", please.", ", thanks.", ". No other text.")


def list_keys(source: Source, keys: Sequence[str]) -> str:
    """Field names as people write them: commas, quotes, dots, lines, articles."""
    roll = source.rng.randrange(12)
    if roll < 6:
        quote = source.pick(("", "", "", '"', "'", "`"))
        shown = [f"{quote}{key}{quote}" for key in keys]
        last = source.pick((", ", " and ", ", and ", " & ", " plus ", " as well as "))
        lead = source.pick(("", "", "the ", "its ", "each ", "all of "))
        return lead + last.join([part for part in (", ".join(shown[:-1]), shown[-1]) if part])
    if roll == 6:
        return "\n" + "\n".join(f"- {key}" for key in keys) + "\n"
    if roll == 7:
        return "{" + ", ".join(f'"{key}"' for key in keys) + "}"
    if roll == 8:
        return "[" + ", ".join(keys) + "]"
    if roll == 9:
        return "(" + ", ".join(keys) + ")"
    article = source.pick(("the ", "a ", "its ", "the value of "))
    return source.pick((", ", "; ", " and ")).join(article + key for key in keys)


def extraction_request(source: Source, keys: Sequence[str], kept: Sequence[str]) -> str:
    """A request for the fields ``keys`` in a wording unlike those ``kept`` for evaluation."""
    while True:
        form = expand(source, source.pick(EXTRACTION + EXTRACTION[:1] * 6))
        form = form.replace("{x}", "\0")
        while "\0" in form:
            form = form.replace("\0", source.value(source.odd_word).lower(), 1)
        form = form[0].upper() + form[1:] if form[0] != "{" else form
        if form not in kept and not form.lower().startswith(KEPT_VERBS):
            break
    ending = "" if form.endswith(("?", ".")) else source.pick(ENDINGS)
    return form.replace("{f}", list_keys(source, keys)) + ending


# --- yes/no ----------------------------------------------------------------------------------

KIND_ASKS = (
    "[Is|Was] [the text|this|it|this text|the story|what you read|the note|the above] about a {t}?",
    "[Does|Do] [the text|the story|the lines|these lines|it|this text] "
    "[describe|deal with|concern|present|introduce|portray|talk about|tell of] a {t}?",
    "[Is|Can it be that|Could it be that] a {t} [|is ][the subject|the topic|described|"
    "what this is about|talked about|meant][| here| in the text]?",
    "[Are|Were] [we|you] [reading|told|hearing] [about|of] a {t}[| here]?",
    "[Is|Would] [the|its] [subject|topic|theme] [|be ]a {t}?",
    "[About|On] a {t}[| or not]?",
    "[True or false|Yes or no|Judge|Decide]: [the text|this|the story] is about a {t}.",
    "[Decide|Judge|Check|Say|Tell me] [whether|if] [the text|this|it] is about a {t}.",
)
VALUE_ASKS = (
    "[Does|Can] [the text|the note|the story|it|this text|the writer] "
    "[contain|name|speak of|include|refer to|give|say|bring up] {v}?",
    "[Is|Was] {v} [written|found|given|there|included|referred to|part of it|stated|present]"
    "[| here| in the text| anywhere| in these lines]?",
    "[Can|Do|Did] you [read|see|find|spot|meet] {v}[| here| in the text| above| anywhere]?",
    "{v}: [is it there|mentioned or not|yes or no|does it occur]?",
    "[Does|Do] {v} [occur|come up|show up|stand there|exist][| here| in the text| in the lines]?",
    "[True or false|Yes or no|Judge]: [the text names|it gives|there is] {v}.",
    "[Decide|Judge|Check|Say|Tell me] [whether|if] {v} [occurs|is there|is mentioned|is named].",
)
CLAIM_ASKS = (
    "[Is it true|Is it right|Is it correct|Does the text say|Would you agree|Is it stated|"
    "Does it follow|Can we say] that {l}?",
    "[True or false|Yes or no|Right or wrong|Judge|Statement|Claim|Check this]: {c}",
    "{c} [Is that so|Is this true|True|Right|Correct|Yes or no|Does this hold|Do you agree]?",
    "[Decide|Judge|Check|Say|Tell me] [whether|if] {l}.",
    "[Does the text|Do the lines|Does the story] [support|back|confirm|agree with] this: {c}",
)
FIELD_ASKS = (
    "[Does|Do] [the text|the lines|the story|it] [give|state|tell|reveal] the {k}[| of {n}]?",
    "[Is|Was] the {k} [|of {n} ][known|stated|given|told][| here| in the text]?",
    "[Do|Can] [we|you] [learn|read|find out|see] the {k}[| of {n}]?",
)
KINDS = ("person", "book", "company", "building", "flight", "pet", "event", "order")


def near_miss(source: Source, value: Value, fresh: Callable[[], Value]) -> str:
    """A wrong value: a new one, or the right one with one part changed."""
    text, other = str(value), str(fresh())
    parts, others = text.split(), other.split()
    if len(parts) > 1 and len(parts) == len(others) and source.chance(0.4):
        place = source.rng.randrange(len(parts))
        return " ".join([*parts[:place], others[place], *parts[place + 1 :]])
    if isinstance(value, int) and source.chance(0.4):
        place = source.rng.randrange(len(text))
        digit = source.pick([d for d in "123456789" if d != text[place]])
        return text[:place] + digit + text[place + 1 :]
    return other


def absent_value(
    source: Source, passages: Sequence[Passage], passage: Passage, at: int, plain: bool
) -> str:
    """A value of the right kind that no passage states, or that the other passage states."""
    make = passage.domain.attributes[at].make
    others = [str(p.facts[at]) for p in passages if p is not passage and at in p.facts]
    if others and others[0] != str(passage.facts[at]) and source.chance(0.7):
        return others[0]
    text = " ".join(each.text for each in passages)
    while True:
        wrong = (
            str(make(source))
            if plain
            else near_miss(source, passage.facts[at], lambda: make(source))
        )
        if wrong not in text and (plain or not pools.is_held_out(wrong)):
            return wrong


def kind_named(source: Source, passage: Passage, right: bool) -> str:
    """The kind of the passage's subject, or another one."""
    kind = "flight" if passage.domain.kind == "trip" else passage.domain.kind
    return kind if right else source.pick([other for other in KINDS if other != kind])


def yes_no(
    source: Source, passages: Sequence[Passage], kept: Sequence[str], plain: bool = False
) -> tuple[str, str]:
    """A question with the answer yes or no, each half of the time, and that answer.

    ``plain``: no claims, and no wrong value that is the right one but for a part.
    """
    passage = source.pick(passages)
    yes = source.chance(0.5)
    answer = "yes" if yes else "no"
    roll = source.rng.random() * (0.68 if plain else 1.0)
    at = source.pick(sorted(passage.facts))
    attribute = passage.domain.attributes[at]
    key = source.pick(attribute.keys).replace("_", " ")
    slots: dict[str, object] = {"n": passage.subject}
    forms: Sequence[str]
    if roll < 0.36:
        slots["t"] = kind_named(source, passage, yes)
        forms = KIND_ASKS
    elif roll < 0.68:
        slots["v"] = (
            passage.facts[at] if yes else absent_value(source, passages, passage, at, plain)
        )
        if source.chance(0.15):
            slots["v"] = passage.subject
            if not yes:
                name = passage.domain.name
                slots["v"] = near_miss(source, passage.subject, lambda: name(source))
        if not yes and str(slots["v"]) in " ".join(each.text for each in passages):
            return yes_no(source, passages, kept, plain)
        forms = VALUE_ASKS
    elif roll < 0.92:
        value = passage.facts[at] if yes else absent_value(source, passages, passage, at, plain)
        claim = say_fact(source, passage, at, value)
        slots |= {"c": claim, "l": claim[0].lower() + claim[1:-1]}
        forms = CLAIM_ASKS
    else:
        missing = [
            other.keys[0]
            for place, other in enumerate(passage.domain.attributes)
            if place not in passage.facts
        ]
        if not yes and not missing:
            return yes_no(source, passages, kept, plain)
        slots["k"] = key if yes else source.pick(missing).replace("_", " ")
        forms = FIELD_ASKS
    while True:
        form = expand(source, source.pick(forms))
        if not too_close(form, kept):
            return pools.articles(form.format(**slots)), answer
