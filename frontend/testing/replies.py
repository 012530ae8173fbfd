"""Events of generations and selections whose texts are known."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from rootlace.wire import protocol
from rootlace.wire.errors import InvalidRequest

Tokenize = Callable[[str], Sequence[str]]
"""A text as its tokens, which joined are the text again."""

_LOGPROB = -0.5


def generated(
    op: protocol.Generate,
    prompt: str,
    texts: Sequence[str],
    tokenize: Tokenize,
    *,
    number: Callable[[int, str], int] = lambda at, token: at,
    cached: int = 0,
    chunk: int = 1,
) -> list[protocol.Event]:
    """What a `Generate` gives where the model would write `texts`, one per sample, without end:
    they are cut at stop strings and at `max_tokens`. `number(at, token)` is the id of the token at
    that place. A stream comes `chunk` tokens at a time."""
    events: list[protocol.Event] = []
    outputs = []
    for index, written in enumerate(texts):
        tokens, reason, matched = cut(written, op.params, tokenize)
        ids = tuple(number(at, token) for at, token in enumerate(tokens))
        logprobs: tuple[protocol.TokenLogprob, ...] = ()
        if op.params.logprobs:
            numbered = zip(ids, tokens, strict=True)
            logprobs = tuple(protocol.TokenLogprob(at, text, _LOGPROB) for at, text in numbered)
        outputs.append(protocol.Output("".join(tokens), ids, reason, matched, logprobs))
        for start in range(0, len(tokens), chunk) if op.stream else ():
            piece = slice(start, start + chunk)
            text = "".join(tokens[piece])
            events.append(protocol.Chunk(op.op, index, text, ids[piece], logprobs[piece]))
    usage = protocol.Usage(
        prompt_tokens=len(tokenize(prompt)),
        cached_tokens=cached,
        completion_tokens=sum(len(output.token_ids) for output in outputs),
    )
    return [*events, protocol.Generated(op.op, tuple(outputs), usage)]


def cut(
    text: str, params: protocol.SamplingParams, tokenize: Tokenize
) -> tuple[list[str], Any, str | None]:
    """The tokens up to the first stop string or the limit, and why they end."""
    found = [(at + len(stop), at, stop) for stop in params.stop if (at := text.find(stop)) >= 0]
    for index, pattern in enumerate(params.stop_regex):
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise InvalidRequest(f"stop_regex[{index}]: {error}") from None
        if search(""):
            raise InvalidRequest(f"stop_regex[{index}]: the pattern matches the empty text")
        searched = ((end, search(text[:end])) for end in range(len(text) + 1))
        found += [(end, match.start(), pattern) for end, match in searched if match][:1]
    matched = None
    if found:
        _, position, matched = min(found)
        text = text[:position]
    tokens = list(tokenize(text))
    if params.max_tokens is not None and len(tokens) > params.max_tokens:
        return tokens[: params.max_tokens], "length", None
    return tokens, "stop", matched


def selected(
    op: protocol.Select, prompt: str, index: int, tokenize: Tokenize, *, cached: int = 0
) -> list[protocol.Event]:
    """What a `Select` gives that chooses number `index`."""
    scores = tuple(-1.0 - abs(number - index) for number in range(len(op.choices)))
    tokens = tuple(
        (protocol.TokenLogprob(number, choice, score),)
        for number, (choice, score) in enumerate(zip(op.choices, scores, strict=True))
    )
    usage = protocol.Usage(prompt_tokens=len(tokenize(prompt)), cached_tokens=cached)
    return [protocol.Selected(op.op, op.choices[index], index, scores, usage, tokens)]
