"""Many more wordings of each fact, for training only, written as small grammars.

``[a|b|]`` stands for any one of its alternatives; the other braces are those of ``passages.py``.
Evaluation never draws from here.  No wording is used that contains all content words (by their
first five letters) of a wording kept for evaluation of the same fact: see :func:`too_close`.
"""

# ruff: noqa: SIM905 - word lists are far easier to read as one split string.

from __future__ import annotations

import re
from collections.abc import Sequence

from .pools import Source
from .wordings_living import LIVING, Grammar
from .wordings_things import THINGS

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_STOP = frozenset(
    "a an the is are was were be been has have had do does did of in on at to for by from with "
    "and it its this that who whom what which when where how many much will there s"
    " order flight".split()
)


def expand(source: Source, grammar: str) -> str:
    """One wording of the grammar, its inner choices first."""
    while "[" in grammar:
        grammar = _CHOICE.sub(lambda match: source.pick(match.group(1).split("|")), grammar)
    return grammar


def _words(wording: str) -> list[str]:
    return re.findall(r"[a-z]+|\{\w+\}", wording.lower())


def too_close(wording: str, kept: Sequence[str], keys: Sequence[str] = ()) -> bool:
    """Whether a wording says no more than one of those ``kept`` for evaluation.

    That is: it has all content words of a kept wording (words of the field's name do not count),
    or, where that has none, the same words in the same order.
    """
    plain = _STOP | {part for key in keys for part in key.split("_")}
    mine = _words(wording)
    stems = {word[:5] for word in mine}
    for other in kept:
        theirs = _words(other)
        content = {word[:5] for word in theirs if word not in plain and word[0] != "{"}
        if content <= stems if content else theirs == mine:
            return True
    return False


GENERIC_SAYS = (
    "The {k} of {n} [is|is listed as|is given as|was noted as|reads] {v}.",
    "{n}'s {k} [is|was given as|is noted as|remains] {v}.",
    "[As to|As for|Regarding|Concerning|On] the {k} of {n}: {v}.",
    "[The|Its|Listed|Known|Current] {k}: {v}.",
    "[The|This] {k} [is|is said to be|turned out to be|has been set to|was] {v}.",
    "{n} ({k}: {v}) [is well known|is new here|was mentioned again].",
    "[Records|Our notes|The files|Papers] [give|show|state|have] {v} as the {k} of {n}.",
)
# A verb that does not exist: the kind of the value alone tells which fact it is.
UNKNOWN_SAYS = (
    "{s} {x} [|in |at |with |by |from |for |to |near |the ]{v}.",
    "{s} [has|will|can|did|was|is] {x} [|in |with |by |for |a |to ]{v}[| today| again| now].",
    "{x} [|in |with |by |of |to ]{s} [is|was] {v}.",
)
COMPOSED_ASKS = (
    "[Say|State|Write|Show|Report|Return|Look up|Read out|Recall|Quote|Spell out] the {k} "
    "[of|for|belonging to|that belongs to] {n}.",
    "[Could|Can|Would|Will] you [say|state|tell me|write|show me|find] the {k} of {n}?",
    "[What|Which] {k} [belongs to|goes with|is linked to|fits|is stated for|is noted for] {n}?",
    "[Looking at|As for|About|Regarding|Concerning|For] {n}, [what is|state|name|say|I need] "
    "the {k}[.|?|]",
    "{n}'s {k}[?|, please.|!|]",
    "{k} of {n}[?|, please|]",
    "[I need|I am after|We look for|My interest is|Let me have|I ask for] the {k} of {n}.",
    "What [might|would|could|should|can] the {k} of {n} be?",
    "[Is there|Do you see|Did you read] a {k} for {n}, and [what|which] is it?",
    "The text [names|states|gives|has] a {k} for {n}: [what|which] is it?",
)
WRAPPED_ASKS = (
    "[Please|Kindly|Quickly|Just|Now] [say|answer|reply|respond|state]: {q}",
    "{q} [Reply|Respond|Answer] with [the value|one word|a few words|a short answer|nothing else].",
    "[Going by|Judging from|Based on|Looking at|From|Using] [the text|this text|the lines|what is "
    "written|the note|these sentences], {l}",
    "[I wonder|I was wondering|I ask myself|My boss asks|Somebody asked|A friend asks]: {l}",
    "[Hey|Hi|OK|Right|Well|Fine|Good|Next|And|Also|Then], {l}",
    "[Just|Only] [one|a] [thing|question|detail|point]: {l}",
    "{q} [Be brief|Keep it short|No sentence|One answer|Thanks|Thank you|Look closely][.|!]",
    "[Help me|Solve this|Look it up|Check this|Read on]: {l}",
    "{x}: {q}",
    "{x}, {l}",
    "{q} {x}.",
)

WORDINGS: Grammar = {**LIVING, **THINGS}
