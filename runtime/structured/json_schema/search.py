"""Whether a pattern of a schema is found in a text, in time linear in the text.

Schemas' patterns are ECMA 262's: `\\d` and `\\w` are ASCII, `$` is the very end. They are
translated to Python's syntax and run on an automaton; `re` would backtrack, for ever on some.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator
from functools import lru_cache

from llguidance import LLMatcher

from rootlace.runtime.structured.json_schema.pattern import ECMA_SPACE
from rootlace.runtime.structured.json_schema.to_llguidance import string_matcher
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.parse import parse, sre_parser
from rootlace.runtime.structured.regex.syntax import ALL, Chars, category, complement
from rootlace.runtime.structured.regex.trees import concat, either, repeat
from rootlace.wire.errors import InvalidConstraint

MAX_STATES = 4096
_ANYTHING = repeat(Chars(ALL), 0, None)
_SETS = {"d": category(r"\d", True), "w": category(r"\w", True), "s": ECMA_SPACE}
_SETS |= {name.upper(): complement(ranges) for name, ranges in _SETS.items()}
_IN_CLASS = {
    name: "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
    for name, ranges in _SETS.items()
}
_PIECE = re.compile(
    r"(?P<escape>\\(?:c(?P<control>[A-Za-z])|u\{(?P<braced>[0-9A-Fa-f]+)\}"
    r"|u(?P<high>[dD][89abAB][0-9A-Fa-f]{2})\\u(?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})"
    r"|k<(?P<back>\w+)>|(?P<other>.)))|(?P<opening>\[\^?)|\(\?<(?![=!])|.",
    re.DOTALL,
)


def translated(pattern: str, start: str = "^") -> str:
    """An ECMA pattern in Python's syntax; `start` stands for each `^` that is an anchor."""
    return "".join(text for text, _ in _pieces(pattern, start))


def _pieces(pattern: str, start: str) -> Iterator[tuple[str, str]]:
    """The pieces of a translation, each with what it translates."""
    outside = {"$": r"\Z", "^": start, ".": r"[^\n\r\u2028\u2029]", "(?<": "(?P<"}
    in_class = False
    for piece in _PIECE.finditer(pattern):
        text = piece[0]
        if piece["escape"]:
            yield _escape(piece, in_class), text
        elif in_class:
            in_class = text != "]"
            yield f"\\{text}" if piece["opening"] else text, text
        else:
            in_class = piece["opening"] is not None
            yield outside.get(text, text), text


def _of_users(message: str, pattern: str) -> str:
    """What is wrong with a translation, told of the pattern that the user wrote."""
    found = _PLACE.search(message)
    if found is None:
        return message.removeprefix("regex: ")
    left, place, quoted = int(found["position"]), 0, ""
    for text, quoted in _pieces(pattern, "^"):
        if left < len(text):
            break
        left -= len(text)
        place += len(quoted)
    where = f"at position {place}"
    if found["quoted"]:
        construct = ast.literal_eval(found["quoted"])
        quoted = construct if pattern.startswith(construct, place) else quoted
        where = f"({quoted!r} {where})"
    told = message[: found.start()] + where + message[found.end() :]
    return told.removeprefix("regex: ")


_PLACE = re.compile(
    r"""(?:\((?P<quoted>'[^']*'|"[^"]*") )?at position (?P<position>\d+)(?(quoted)\))"""
)


def _escape(match: re.Match[str], in_class: bool) -> str:
    if match["control"]:
        return f"\\x{ord(match['control'].upper()) - 64:02x}"
    if match["braced"]:
        return f"\\U{int(match['braced'], 16):08x}"
    if match["high"]:
        high, low = int(match["high"], 16), int(match["low"], 16)
        return f"\\U{0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF):08x}"
    if match["back"]:
        return f"(?P={match['back']})"
    name = match["other"]
    if name in _IN_CLASS:
        return _IN_CLASS[name] if in_class else f"[{_IN_CLASS[name]}]"
    return match[0]


class PatternSearch:
    """One pattern. Raises InvalidConstraint if it cannot be searched for in bounded time."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._dfa: LazyDfa | None = None
        self._matcher: LLMatcher | None = None
        try:
            self._dfa = _search_automaton(pattern)
        except InvalidConstraint as error:
            self._matcher = _llguidance(pattern)
            if self._matcher is None:
                raise InvalidConstraint(_of_users(str(error), pattern)) from None

    def __call__(self, text: str) -> bool:
        """Whether it is found in `text`; False, too, where that is beyond the bounds."""
        if self._dfa is not None:
            try:
                state = self._dfa.run(self._dfa.start, text.encode("utf-8", "surrogatepass"))
                return state >= 0 and self._dfa.accepting(state)
            except InvalidConstraint:
                self._matcher = self._matcher or _llguidance(self.pattern)
        if self._matcher is None:
            return False
        matcher = self._matcher.deep_copy()
        data = json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
        return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def syntax_error(pattern: str) -> str:
    """What is malformed in `pattern`; empty where it is a pattern of ECMA 262 or of Python, even if
    nothing here can search for it."""
    known = _OF_ECMA[0].sub(_letters, pattern)
    wrong = _malformed(known)
    if wrong and _malformed(_OF_ECMA[1].sub(_letters, known)):
        return _of_users(wrong, pattern)
    return ""


_OF_ECMA = re.compile(r"\\[pP]\{\w+(?:=\w+)?\}"), re.compile(r"\[\^?\]")
"""What Python cannot read: classes of Unicode, and those that are empty or hold everything."""


def _letters(found: re.Match[str]) -> str:
    return len(found[0]) * "a"


def _malformed(pattern: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sre_parser.parse(translated(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return ""


def _search_automaton(pattern: str) -> LazyDfa:
    # Where the search begins at the beginning, and where it does not (then no `^` matches).
    options = [concat(parse(translated(pattern), at_end=False), _ANYTHING)]
    if not re.fullmatch(r"\^[^|]*", pattern):
        inner = parse(translated(pattern, start="(?!)"), at_begin=False, at_end=False)
        options.append(concat(repeat(Chars(ALL), 1, None), inner, _ANYTHING))
    return LazyDfa(either(*options), MAX_STATES)


def _llguidance(pattern: str) -> LLMatcher | None:
    matcher = string_matcher(pattern)
    return None if matcher.is_error() else matcher


@lru_cache(maxsize=1024)
def searcher(pattern: str) -> PatternSearch:
    """The search for `pattern`, kept for later. Raises InvalidConstraint."""
    return PatternSearch(pattern)
