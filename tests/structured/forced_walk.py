"""Walks of a constraint's complete texts, which check the forced tokens at every token."""

import random
from collections import Counter
from functools import cache

import numpy as np

from rootlace.runtime.structured import Grammar, Matcher
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from tests.structured.canonical_tokens import encode

CLOSING = tuple(bytes((byte,)) for byte in b'"}].;<\n')


@cache
def closing_tokens(vocabulary: Vocabulary) -> np.ndarray:
    return np.array([data[:1] in CLOSING for data in vocabulary.token_bytes])


def random_text(
    grammar: Grammar, vocabulary: Vocabulary, rng: random.Random, tokens: int = 24
) -> list[int] | None:
    """Tokens of a random complete text, each drawn from the mask; short ones are more likely
    the longer it gets. None if it did not end."""
    matcher = grammar.matcher()
    taken: list[int] = []
    closing = closing_tokens(vocabulary)
    for step in range(4 * tokens):
        if matcher.is_accepting() and (matcher.is_finished() or rng.random() < 0.2):
            return taken
        allowed = matcher.allowed_mask()
        allowed[list(vocabulary.eos_token_ids)] = False
        # Late, tokens that end what is open.
        late = rng.random() < step / tokens and (allowed & closing).any()
        candidates = np.flatnonzero(allowed & closing if late else allowed)
        if not len(candidates):
            return taken if matcher.is_accepting() else None
        token = int(rng.choice(candidates))
        if not matcher.advance(token):
            return None
        taken.append(token)
    return None


def check_canonical(
    grammar: Grammar, vocabulary: Vocabulary, text: bytes, counts: Counter[str]
) -> list[str]:
    """Return the faults of forced tokens along the canonical tokens of a complete text. Counts
    positions, tokens, and the tokens forced as jump-forward would meet them."""
    tokens = encode(vocabulary, text)
    spelled = b"".join(vocabulary.token_bytes[i] for i in tokens)
    if spelled != text:
        counts["not spelled"] += 1  # the tokenizer normalizes it: there are no canonical tokens
        return []
    wrong: list[str] = []
    matcher = grammar.matcher()
    at = jumped = 0
    for index in range(len(tokens) + 1):
        forced, forced_tokens = matcher.forced_text(), matcher.forced_tokens()
        counts["positions"] += 1
        if not text.startswith(forced, at):
            wrong.append(f"{forced!r} forced at {at} of {text!r}")
        if forced_tokens != tokens[index : index + len(forced_tokens)]:
            words = [vocabulary.token_bytes[i] for i in forced_tokens]
            after = [vocabulary.token_bytes[i] for i in tokens[index : index + len(words) + 1]]
            wrong.append(f"{words} forced where {after} follow, at {at} of {text!r}")
        if index >= jumped:
            counts["forced"] += len(forced_tokens)
            jumped = max(jumped, index + len(forced_tokens) + (index < len(tokens)))
        if index < len(tokens):
            counts["tokens"] += 1
            if not matcher.advance(tokens[index]):
                wrong.append(
                    f"token {tokens[index]} refused at {at} of {text!r}: {matcher.error()}"
                )
                break
            at += len(vocabulary.token_bytes[tokens[index]])
        elif not matcher.is_accepting():
            wrong.append(f"not accepted: {text!r}")
    return wrong


def check_any(
    grammar: Grammar, vocabulary: Vocabulary, tokens: list[int], counts: Counter[str]
) -> list[str]:
    """Return the faults of forced tokens along any tokens of a complete text. Forced tokens must be
    allowed, spell forced text, and have their bytes in the text's canonical tokens."""
    text = b"".join(vocabulary.token_bytes[i] for i in tokens)
    canonical = encode(vocabulary, text)
    places: set[tuple[int, int]] = set()
    at = 0
    for token in canonical:
        places.add((at, token))
        at += len(vocabulary.token_bytes[token])
    spelled = b"".join(vocabulary.token_bytes[i] for i in canonical) == text
    wrong: list[str] = []
    matcher = grammar.matcher()
    at = 0
    for token in tokens:
        forced, forced_tokens = matcher.forced_text(), matcher.forced_tokens()
        counts["positions"] += 1
        counts["forced"] += len(forced_tokens)
        if not text.startswith(forced, at):
            wrong.append(f"{forced!r} forced at {at} of {text!r}")
        place = at
        for forced_token in forced_tokens:
            if spelled and (place, forced_token) not in places:
                wrong.append(f"{vocabulary.token_bytes[forced_token]!r} at {place} of {text!r}")
            place += len(vocabulary.token_bytes[forced_token])
        if b"".join(vocabulary.token_bytes[i] for i in forced_tokens) != forced[: place - at]:
            wrong.append(f"{forced_tokens} do not spell {forced!r}")
        wrong += _refused(matcher, forced_tokens)
        assert matcher.advance(token)
        at += len(vocabulary.token_bytes[token])
    return wrong


def _refused(matcher: Matcher, tokens: list[int]) -> list[str]:
    """Return refused forced tokens: accepts the tokens by the mask, and takes them back."""
    wrong: list[str] = []
    taken = 0
    for token in tokens:
        if not matcher.allowed_mask()[token]:
            wrong.append(f"the mask forbids the forced token {token}")
        if not matcher.advance(token):
            wrong.append(f"the forced token {token} is refused")
            break
        taken += 1
    matcher.rollback(taken)
    return wrong
