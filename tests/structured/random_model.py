"""A model without preferences, run as the scheduler runs one; and a vocabulary of the bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rootlace.runtime.contracts.matcher import Grammar, Matcher
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from tests.structured.canonical_tokens import encode

CLOSING = (b'"', b"]", b"}")


def byte_vocabulary(special: Sequence[str] = ()) -> Vocabulary:
    """A token for every byte, then the end of the sequence and `special` tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", *special])
    return Vocabulary.from_tokenizer(tokenizer, eos_token_ids=[len(alphabet)])


@dataclass
class Generated:
    """Generated text; `text` is None without an end, and `reason` says why."""

    text: bytes | None
    reason: str = ""
    rollbacks: int = 0


class RandomModel:
    """Draws from the masks: every allowed token has about the same chance at first, and what
    closes or ends the more the longer the text."""

    def __init__(self, vocabulary: Vocabulary, seed: int, patience: int = 10) -> None:
        self._vocabulary = vocabulary
        self._source = np.random.default_rng(seed)
        self._patience = patience
        self._ends = np.zeros(vocabulary.size, bool)
        self._ends[list(vocabulary.eos_token_ids)] = True
        self._separates = np.array([data[:1] == b"," for data in vocabulary.token_bytes])
        self._closes = np.array([data[:1] in CLOSING for data in vocabulary.token_bytes])

    def generate(self, grammar: Grammar, max_tokens: int = 600) -> Generated:
        matcher = grammar.matcher()
        tokens: list[int] = []
        rollbacks = 0
        while len(tokens) < max_tokens:
            token = self._draw(matcher, len(tokens))
            if token is None:
                return Generated(None, f"nothing is allowed: {matcher.error()}", rollbacks)
            if matcher.advance(token):
                if self._ends[token]:
                    text = b"".join(self._vocabulary.token_bytes[one] for one in tokens)
                    return Generated(text, "", rollbacks)
                tokens.append(token)
                continue
            undone = matcher.rollback_refused()
            rollbacks += 1
            if undone is None:
                return Generated(None, matcher.error(), rollbacks)
            del tokens[len(tokens) - undone :]
        return Generated(None, f"{max_tokens} tokens without an end", rollbacks)

    def _draw(self, matcher: Matcher, length: int) -> int | None:
        allowed = matcher.allowed_mask()
        if not allowed.any():
            return None
        weights = allowed * np.exp(self._source.normal(size=len(allowed)))
        urge = 1 + max(0, length - self._patience) * allowed.sum() / 20
        weights[self._closes] *= urge
        weights[self._separates] *= urge**0.5
        weights[self._ends] *= 4 * urge
        return int(self._source.choice(len(weights), p=weights / weights.sum()))


def accepts(grammar: Grammar, vocabulary: Vocabulary, text: bytes) -> bool:
    """Whether a grammar takes a text in (its canonical tokens), and as a whole."""
    matcher = grammar.matcher()
    for token in encode(vocabulary, text):
        matcher.prepare_mask()
        if not matcher.advance(token):
            return False
    return matcher.is_accepting()
