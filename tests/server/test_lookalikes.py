"""Marks in content: on all texts that are, or could become, special tokens; in linear time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootlace.runtime.server.chat_template import Lookalikes

MARK = "\ue000"
LLAMA = ["<|begin_of_text|>", *(f"<|reserved_special_token_{n}|>" for n in range(255))]
specials = st.lists(st.text("<|aB >", min_size=2, max_size=5).map(str.strip), max_size=4)


@given(specials, st.text("<|aAb> \n", max_size=14))
def test_no_special_token_is_left_whole_nor_a_part_of_one_at_an_end(
    special: list[str], text: str
) -> None:
    marked = Lookalikes(special).marked(text, MARK)
    assert marked.replace(MARK, "") == text
    pieces = marked.lower().split(MARK)
    begin, end = pieces[0].lstrip(), pieces[-1].rstrip()
    for token in map(str.lower, filter(None, special)):
        # A mark makes the character before it ordinary text.
        assert not any(token in piece[: len(piece) - (piece is not pieces[-1])] for piece in pieces)
        for n in range(1, len(token)):
            head, tail = token[:n].rstrip(), token[n:].lstrip()
            if not (len(tail) == 1 and tail.isalnum()):
                assert not (begin.startswith(tail) and (len(pieces) == 1 or len(begin) > 1))
            if not (len(head) == 1 and head.isalnum()):
                assert not end.endswith(head)


@pytest.mark.parametrize("text", [" ", "\n x", "<", "<|", "<|reserved_special_token_"])
def test_long_texts_are_looked_through_at_once(text: str) -> None:
    """A pattern that tries each token at each place would exceed the test's time limit."""
    long = text * (2**23 // len(text)) + "x"
    assert Lookalikes(LLAMA).marked(long, MARK).replace(MARK, "") == long


def test_what_clients_write_is_not_kept() -> None:
    found = Lookalikes(LLAMA)
    given = {"role": "user", "content": "secret", "another secret": "x" * 9, "tool": "secret"}
    for _ in range(2):
        found.marked([given], MARK)
    kept = found._usual.cache_info()
    assert kept.currsize == 4 and kept.hits  # role, user, content, tool
