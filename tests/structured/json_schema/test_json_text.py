"""Strings of automata beside llguidance: equal to the strings that llguidance writes."""

import pytest

from rootlace.runtime.structured.json_schema.json_text import Guidance
from rootlace.runtime.structured.json_schema.to_llguidance import string_matcher
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa

CHARACTERS = [*map(chr, range(0x81)), "é", "\u2028", "\ud7ff", "\ue000", "😀"]


def spellings(character: str) -> set[str]:
    """Return a character's spellings: plain, as a backslash and a letter, and by its number in
    small and capital digits."""
    code = f"{ord(character):04x}"
    short = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character, "")
    return {character, "\\" + character, f"\\u{code}", f"\\u{code.upper()}"} | ({short} - {""})


@pytest.mark.parametrize("letters", ['nrbtf\\"u', 'nrbtf\\"'])
def test_a_character_is_spelt_as_llguidance_spells_it(letters: str) -> None:
    dfa = LazyDfa(
        Guidance({"x-guidance": {"json_allowed_escapes": letters}}).string(
            {"type": "string", "maxLength": 1}
        ),
        1000,
    )
    taken = 0
    for character in CHARACTERS:
        for spelled in spellings(character):
            data = f'"{spelled}"'.encode()
            matcher = string_matcher("^[^é]?$|^é$", json_allowed_escapes=letters)
            theirs = matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()
            assert dfa.accepting(dfa.run(dfa.start, data)) == theirs, data
            taken += theirs
    assert taken > 100
