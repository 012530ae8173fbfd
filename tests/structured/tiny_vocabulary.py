"""Vocabularies small enough to be checked by hand, and what automaton grammars need of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rootlace.runtime.structured.vocabulary.vocabulary import ByteTrie, TokenOrder


@dataclass
class TinyVocabulary:
    token_bytes: list[bytes]
    eos_token_ids: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.token_bytes)

    @cached_property
    def trie(self) -> ByteTrie:
        return ByteTrie(TokenOrder(self.token_bytes), self.size)


class BytewiseTokenizer:
    """Forced tokens for tests: all of the forced text, a token per byte, where there is one."""

    def __init__(self, vocabulary: TinyVocabulary) -> None:
        self._tokens = {data: i for i, data in reversed(list(enumerate(vocabulary.token_bytes)))}
        self._bytes = vocabulary.token_bytes
        self.asked: list[tuple[bytes, bytes, bool]] = []

    def tail(self, context: Sequence[int]) -> bytes | None:
        return b"".join(self._bytes[token] for token in context)[-4:]

    def tokens_after(
        self,
        tail: bytes | None,
        forced: bytes,
        can_follow: Callable[[bytes], bool],
        may_end: bool,
    ) -> list[int]:
        assert tail is not None
        self.asked.append((tail, forced, may_end))
        tokens = []
        for i in range(len(forced)):
            if forced[i : i + 1] not in self._tokens:
                break
            tokens.append(self._tokens[forced[i : i + 1]])
        return tokens


def tiny_vocabulary(words: Sequence[bytes], eos: int = 1) -> TinyVocabulary:
    """`words` as they are (empty ones are padding), then `eos` end-of-sequence tokens."""
    count = len(words)
    return TinyVocabulary([*words, *[b""] * eos], tuple(range(count, count + eos)))
