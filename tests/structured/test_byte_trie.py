"""The trie of a vocabulary against the vocabulary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rootlace.runtime.structured.vocabulary.vocabulary import ByteTrie, TokenOrder


def words_of(trie: ByteTrie) -> list[bytes]:
    """Return the bytes of each node."""
    words = [b""]
    for start, stop, above in zip(trie.levels[1:-1], trie.levels[2:], trie.levels, strict=False):
        for node in range(start, stop):
            parent = above + int(trie.above[node])
            words.append(words[parent] + bytes([trie.byte[node]]))
    return words


def check(tokens: list[bytes]) -> None:
    trie = ByteTrie(TokenOrder(tokens), len(tokens))
    words = words_of(trie)
    prefixes = {token[:end] for token in tokens for end in range(len(token) + 1)} | {b""}
    assert sorted(words) == sorted(prefixes)
    assert trie.num_nodes == len(words) == trie.levels[-1]
    # Level by level, each by parent and byte: that is by length, then text.
    assert words == sorted(words, key=lambda word: (len(word), word))
    for node, word in enumerate(words):
        children = words[trie.children[node] : trie.children[node + 1]]
        assert set(children) == {w for w in prefixes if len(w) == len(word) + 1 and w[:-1] == word}
    assert len(trie.node) == -(-len(tokens) // 32) * 32
    for token, node in enumerate(trie.node.tolist()):
        if token < len(tokens) and tokens[token]:
            assert words[node] == tokens[token]
        else:
            assert node == trie.num_nodes


@given(st.lists(st.binary(max_size=4) | st.text("aé", max_size=6).map(str.encode), max_size=40))
def test_nodes_are_the_prefixes(tokens: list[bytes]) -> None:
    check(tokens)


def test_duplicates_padding_and_long_tokens() -> None:
    check([b"ab", b"", b"ab", b"a", b"b" * 300, b"", b"\xff\x00", b"ab"])
    check([])
    check([b"", b""])
