"""The `pattern` keyword: an ECMA-262 regular expression as a tree over the string's value.

Validators differ in small ways. Python's `re` takes `\\d` for every Unicode digit, ECMA-262 for
ASCII only; their `\\s`, `\\b`, `.` and `$` differ too. A tree made here holds only strings that
match in both. Every character class, and every place, is the intersection of the two meanings,
or their union inside a look-around that must not match.

Python's own parser reads the pattern. Syntax that differs between the two languages is refused.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import groupby, product, starmap
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator, FormatChecker
from llguidance import LLMatcher

from rootlace.runtime.structured.json_schema.to_llguidance import string_matcher, takes_pattern
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.lookaround import has_look, without_look
from rootlace.runtime.structured.regex.parse import (
    AT_LAST_NEWLINE,
    Context,
    Translation,
    boundary,
    parse,
    sre,
    sre_parser,
)
from rootlace.runtime.structured.regex.syntax import (
    ALL,
    BLANK,
    LAST,
    NOTHING,
    Chars,
    Concat,
    Either,
    Literal,
    Look,
    LookBehind,
    Ranges,
    Regex,
    TooLarge,
    category,
    chars,
    complement,
    concat,
    contains,
    either,
    intersection,
    nodes,
    pattern_of,
    repeat,
    texts_of,
    union,
    with_leaves,
)
from rootlace.wire.errors import InvalidConstraint

MAX_POSITIONS = 2048
"""Most positions of the automaton of a pattern with look-around."""
MAX_WRITTEN = 1 << 18
"""Most characters of a pattern written for llguidance, which has no look-around."""
MAX_STRINGS = 64
"""Most strings of a pattern that are listed."""
_ANYTHING = repeat(Chars(ALL), 0, None)
_REFUSED_ESCAPES = frozenset("AZaNUkpPQEc0123456789")
_TAKEN = (
    *(sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN),
    *(sre.BRANCH, sre.SUBPATTERN, sre.MAX_REPEAT, sre.MIN_REPEAT, sre.ASSERT, sre.ASSERT_NOT),
    sre.FAILURE,  # the code of `(?!)` since Python 3.13
)
_ECMA_BREAKS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
ECMA_SPACE: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
# The other classes are those of Python with re.ASCII.
_IN_ECMA = {
    (sre.CATEGORY, sre.CATEGORY_SPACE): [(sre.RANGE, part) for part in ECMA_SPACE],
    (sre.CATEGORY, sre.CATEGORY_NOT_SPACE): [(sre.RANGE, part) for part in complement(ECMA_SPACE)],
}
_BEGIN = LookBehind(Chars(ALL), negative=True)
_END = Look(Chars(ALL), negative=True)
_INSIDE = Context(flags=0, at_begin=False, after_text=True, at_end=False)


class NotTranslated(ValueError):
    """Error of a pattern whose use is not exact in both dialects, not regular, or too large."""


def regex_of_pattern(pattern: str, wide: bool = False) -> Regex:
    """Return the strings in which both dialects (`wide`: either) find `pattern`: anywhere, unless
    it has anchors."""
    return _containing(_tree(pattern, wide), pattern)


@lru_cache(maxsize=512)
def few_strings(pattern: str) -> tuple[str, ...]:
    """Return the strings with `pattern`; none if there may be over `MAX_STRINGS`."""
    try:
        return tuple(texts_of(regex_of_pattern(pattern), MAX_STRINGS) or ())
    except (NotTranslated, TooLarge):
        return ()


@lru_cache(maxsize=512)
def for_llguidance(pattern: str, one: bool = False) -> tuple[str, ...]:
    """Return patterns for llguidance (`one`: at most one): a string matches all of them if and only
    if it matches `pattern`. Empty if there are no such patterns."""
    taken = takes_pattern(pattern)
    is_wider = _MAY_BE_WIDER.search(pattern) is not None
    if taken and not is_wider and not _MAY_NEED_SPARING.search(pattern):
        return (pattern,)
    try:
        tree = _tree(pattern)
        as_it_is = taken and not (is_wider and tree != _tree(pattern, wide=True))
        if as_it_is and not any(isinstance(n, Chars) and _spared(n) != n for n in nodes(tree)):
            return (pattern,)
        parts = tuple(
            written(_containing(part, pattern)) for part in ([tree] if one else _conjuncts(tree))
        )
    except (NotTranslated, TooLarge):
        return (pattern,) if taken and not _NAMES_QUOTES.search(pattern) else ()
    return parts if all(map(takes_pattern, parts)) else ()


_MAY_BE_WIDER = re.compile(r"\\[DWS]|(?<!\\)\.")
"""Constructs that llguidance reads as the dialect with more characters does."""
_MAY_NEED_SPARING = re.compile(r"\[\^|\\[xuc0]")
_NAMES_QUOTES = re.compile(r"\"|\\\\|\\[xu]")


def written(tree: Regex) -> str:
    """Return the pattern for llguidance of strings that a tree describes. Raises TooLarge."""
    return f"^(?:{pattern_of(with_leaves(tree, _spared), MAX_WRITTEN)})$"


def _spared(leaf: Literal | Chars) -> Regex:
    """Remove U+0000 where llguidance would allow more: in a JSON string it allows `"` and the
    backslash wherever all control characters are allowed."""
    if not isinstance(leaf, Chars) or not contains(leaf.ranges, 0):
        return leaf
    if all(contains(leaf.ranges, ord(each)) for each in '"\\'):
        return leaf
    return chars(intersection(leaf.ranges, ((1, LAST),)))


def _tree(pattern: str, wide: bool = False) -> Regex:
    """Return the tree of the texts that `pattern` matches at a place in a string."""
    _refuse_dialect(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python's warnings announce a change of meaning
            tree = sre_parser.parse(pattern)
        return _Agreed(pattern, wide).sequence(tree, _INSIDE)
    except (re.error, OverflowError, RecursionError, Warning, InvalidConstraint) as error:
        raise NotTranslated(f"pattern {pattern!r}: {error}") from None


def in_all(
    contents: Sequence[Regex], least: int = 0, most: int | None = None, but: Sequence[Regex] = ()
) -> Regex:
    """Return the texts of `least` to `most` characters that are in all of `contents` and in none of
    `but`. Raises TooLarge."""
    looks = [Look(concat(content, _END), negative=False) for content in contents]
    looks += [Look(concat(content, _END), negative=True) for content in but]
    return without_look(concat(*looks, repeat(Chars(ALL), least, most)), MAX_POSITIONS)


def disputed(pattern: str) -> Regex:
    """Return the strings in which one dialect finds `pattern` and the other does not. Raises
    NotTranslated or TooLarge."""
    narrow, wide = regex_of_pattern(pattern), regex_of_pattern(pattern, wide=True)
    return NOTHING if narrow == wide else in_all([wide], but=[narrow])


def _containing(tree: Regex, pattern: str) -> Regex:
    """Return the strings in which a tree is found, without look-around."""
    ways = _ways(tree)
    if ways is not None:
        return either(*(way.whole() for way in ways))
    try:
        return without_look(concat(_ANYTHING, tree, _ANYTHING), MAX_POSITIONS)
    except TooLarge as error:
        raise NotTranslated(f"pattern {pattern!r}: {error}") from None


def _conjuncts(tree: Regex) -> list[Regex]:
    """Split an anchored pattern into its leading look-aheads and the rest.

    The pattern is found where all parts are found. The automata of the parts may be small where the
    automaton of the whole is not.
    """
    parts = tree.parts if isinstance(tree, Concat) else (tree,)
    count = 0
    while count < len(parts) and isinstance(parts[count], Look | LookBehind):
        count += 1
    if _BEGIN not in parts[:count]:
        return [tree]
    looks = [
        concat(_BEGIN, look.item if isinstance(look, Look) and not look.negative else look)
        for look in parts[:count]
        if look != _BEGIN
    ]
    return [*looks, concat(_BEGIN, *parts[count:])]


_PIECE = re.compile(
    r"\\(?P<escape>.)|(?P<empty>\[(?=\^?\]))|(?P<unbounded>\{(?=,))"
    r"|(?P<group>\((?=\?(?!:|<?[=!])))|.",
    re.DOTALL,
)
_REFUSED = {
    "empty": "a class that is empty in ECMA-262",
    "unbounded": "a repetition without a lower bound",
    "group": "a group that is not a plain one",
}


def _refuse_dialect(pattern: str) -> None:
    """Raise NotTranslated for spellings that mean one thing to Python and another to ECMA-262."""
    in_class = False
    for piece in _PIECE.finditer(pattern):
        if piece["escape"]:
            if piece["escape"] in _REFUSED_ESCAPES:
                raise NotTranslated(f"pattern {pattern!r}: {piece[0]}")
        elif in_class:
            in_class = piece[0] != "]"
        elif piece.lastgroup:
            here = pattern[piece.start() : piece.start() + 8]
            raise NotTranslated(f"pattern {pattern!r}: {_REFUSED[piece.lastgroup]}, {here!r}")
        else:
            in_class = piece[0] == "["


class _Way(NamedTuple):
    """Way to match, and whether the match must begin, or end, with the string."""

    regex: Regex
    begins: bool = False
    ends: bool = False

    def whole(self) -> Regex:
        before = BLANK if self.begins else _ANYTHING
        return concat(before, self.regex, BLANK if self.ends else _ANYTHING)


def _ways(regex: Regex) -> list[_Way] | None:
    """Return `regex` without its anchors; None for other looks. The anchors must stand where
    nothing else is before, or behind, them."""
    if regex == _BEGIN:
        return [_Way(BLANK, begins=True)]
    if regex == _END:
        return [_Way(BLANK, ends=True)]
    if not has_look(regex):
        return [_Way(regex)]
    parts = regex.options if isinstance(regex, Either) else ()
    if isinstance(regex, Concat):
        runs = [(anchored, list(run)) for anchored, run in groupby(regex.parts, has_look)]
        parts = tuple(p for anchored, run in runs for p in (run if anchored else [concat(*run)]))
    if not parts:
        return None
    inner = [ways for ways in map(_ways, parts) if ways is not None]
    if len(inner) < len(parts):
        return None
    if isinstance(regex, Either):
        return [way for ways in inner for way in ways]
    found = [_Way(BLANK)]
    for ways in inner:
        pairs = list(product(found, ways))
        for one, other in pairs:
            if (one.ends and other.regex != BLANK) or (other.begins and one.regex != BLANK):
                return None
        found = list(dict.fromkeys(starmap(_joined, pairs)))
    return found


def _joined(one: _Way, other: _Way) -> _Way:
    regex = concat(one.regex, other.regex)
    return _Way(regex, one.begins or other.begins, one.ends or other.ends)


class _Agreed(Translation):
    """Translation of a pattern to texts that both dialects match; `wide`: that either matches."""

    def __init__(self, pattern: str, wide: bool) -> None:
        super().__init__(pattern, verbose=False)
        self._wide = wide

    def operation(self, code: Any, argument: Any, context: Context) -> Regex:
        if code is sre.ANY:
            return Chars(complement(_ECMA_BREAKS[:1] if self._wide else _ECMA_BREAKS))
        if code is sre.ASSERT_NOT:
            other = _Agreed(self._pattern, not self._wide)
            return super(_Agreed, other).operation(code, argument, context)
        if code is not sre.AT and code not in _TAKEN:
            raise NotTranslated(f"{str(code).lower()} inside the pattern")
        if code is sre.LITERAL and 0xD800 <= argument <= 0xDFFF:
            raise NotTranslated("a lone surrogate inside the pattern")
        return super().operation(code, argument, context)

    def _anchor(self, anchor: Any, context: Context) -> Regex:
        if anchor is sre.AT_BEGINNING:
            return _BEGIN
        if anchor is sre.AT_END:  # Python's `$` matches before a last newline, too
            return either(_END, AT_LAST_NEWLINE) if self._wide else _END
        if anchor not in (sre.AT_BOUNDARY, sre.AT_NON_BOUNDARY):
            raise NotTranslated(f"{str(anchor).lower()} inside the pattern")
        python = super()._anchor(anchor, context)
        differs = anchor is sre.AT_BOUNDARY
        ecma = boundary(Chars(category(r"\w", True)), differs)
        return either(python, ecma) if self._wide else concat(python, ecma)

    def characters(self, code: Any, members: tuple[tuple[Any, Any], ...], flags: int) -> Ranges:
        python = super().characters(code, members, flags)
        as_ecma = tuple(one for member in members for one in _IN_ECMA.get(member, (member,)))
        # Sets are negated in each dialect before the intersection.
        ecma = super().characters(code, as_ecma, flags | re.ASCII)
        return union((*python, *ecma)) if self._wide else intersection(python, ecma)


# Formats ------------------------------------------------------------------------------------------
#
# Regular formats of strings: their patterns, and the check of a value.
#
# Sources: RFC 3339 (date, time, date-time, duration), RFC 9562 (uuid), RFC 2673 and RFC 4291 (ipv4,
# ipv6), RFC 5321 without quoted local parts (email; RFC 6531 with: idn-email), RFC 3986 without IP
# literals (uri, uri-reference; RFC 3987: iri, iri-reference), RFC 1123 (hostname), RFC 5890 to 5892
# (idn-hostname), RFC 6901 (json-pointer), relative-json-pointer as its draft has it, RFC 6570
# (uri-template), ECMA-262 (regex).
#
# Each format is a subset of its source. Values are left out that are valid only sometimes or not
# for all readers (leap seconds, the year 0). So are irregular parts: names in Punycode, letters
# whose validity depends on neighbours (idn-hostname), groups of a regular expression.


def _date() -> str:
    year = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
    fours = "(?:0[48]|[2468][048]|[13579][26])"  # two digits, a multiple of 4, not 00
    leap = f"(?:[0-9]{{2}}{fours}|{fours}00)"
    months_31, months_30 = "(?:0[13578]|1[02])", "(?:0[469]|11)"
    upto_29 = "(?:0[1-9]|[12][0-9])"
    return (
        f"(?:{year}-(?:{months_31}-(?:{upto_29}|3[01])|{months_30}-(?:{upto_29}|30)"
        f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{leap}-02-29)"
    )


_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_MINUTE})"


def _duration() -> str:
    n = "[0-9]{1,9}"
    days, seconds = f"{n}D", f"{n}S"
    months = f"{n}M(?:{days})?"
    minutes = f"{n}M(?:{seconds})?"
    clock = f"T(?:{n}H(?:{minutes})?|{minutes}|{seconds})"
    dates = f"(?:{days}|{months}|{n}Y(?:{months})?)"
    return f"P(?:{dates}(?:{clock})?|{clock}|{n}W)"


_UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"


def _ipv6() -> str:
    group = "[0-9a-fA-F]{1,4}"
    options = [f"(?:{group}:){{7}}{group}", f"(?:{group}:){{1,7}}:", f":(?::{group}){{1,7}}", "::"]
    options += [f"(?:{group}:){{{n}}}(?::{group}){{1,{7 - n}}}" for n in range(1, 7)]
    return "(?:" + "|".join(options) + ")"


_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+"

_LETTERS = "à-öø-ÿά-ώа-џぁ-ゖァ-ヺ一-龥가-힣"
"""Letters that a name may have anywhere, beside any other letter (class PVALID of RFC 5892, read
from left to right, equal to their own NFC)."""
_BEYOND_ASCII = "\\u00a0-\\ud7ff\\uf900-\\ufdcf\\ufdf0-\\uffef"


def _hostname() -> str:
    """Write host names: at most 63 characters a label and 253 in all; many labels are shorter. Two
    hyphens side by side are excluded: labels with them may be Punycode."""

    def labels(most: int, label: str) -> str:
        return rf"{label}(?:\.{label}){{0,{most - 1}}}"

    plain = "[A-Za-z0-9]"

    def hyphened(pairs: int) -> str:
        return f"{plain}(?:-?{plain}){{0,{pairs}}}"

    longest = f"(?:{plain}{{1,63}}|{hyphened(31)})"
    return f"(?:{labels(3, longest)}|{labels(8, hyphened(14))}|{labels(16, hyphened(6))})"


# Twelve characters are at most 47 in Punycode.
_IDN_LABEL = f"(?:[{_LETTERS}a-z0-9]{{1,12}}|[a-z0-9](?:-?[a-z0-9]){{0,20}})"
_IDN_HOSTNAME = rf"{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,3}}"
_IDN_ATOM = f"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~{_LETTERS}-]+"
_IDN_EMAIL = rf"{_IDN_ATOM}(?:\.{_IDN_ATOM})*@{_IDN_HOSTNAME}"


def _uri(beyond: str = "") -> str:
    return rf"[A-Za-z][A-Za-z0-9+.-]*:{_hierarchy(beyond, colons=True)}{_query(beyond)}"


def _uri_reference(beyond: str = "") -> str:
    """Write a URI reference: absolute, or relative without a colon in the first segment."""
    return f"(?:{_uri(beyond)}|{_hierarchy(beyond, colons=False)}{_query(beyond)})"


def _some(extra: str) -> str:
    """Return a character of a component that allows `extra` as well."""
    return rf"(?:[!$&'()*+,;={extra}A-Za-z0-9._~-]|%[0-9A-Fa-f]{{2}})"


def _hierarchy(beyond: str, *, colons: bool) -> str:
    segment = _some(f":@{beyond}")
    first = segment if colons else _some(f"@{beyond}")
    authority = f"(?:{_some(f':{beyond}')}*@)?{_some(beyond)}*(?::[0-9]*)?"
    rooted = f"/(?:{segment}+(?:/{segment}*)*)?"
    return f"(?://{authority}(?:/{segment}*)*|{rooted}|{first}+(?:/{segment}*)*)?"


def _query(beyond: str) -> str:
    rest = _some(f":@/?{beyond}")
    return rf"(?:\?{rest}*)?(?:#{rest}*)?"


def _uri_template() -> str:
    literal = r"(?:[!#$&()*+,./:;=?@\[\]A-Za-z0-9_~-]|%[0-9A-Fa-f]{2})"
    name = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})+"
    variable = rf"{name}(?:\.{name})*(?::[1-9][0-9]{{0,3}}|\*)?"
    return rf"(?:{literal}|\{{[+#./;?&]?{variable}(?:,{variable})*\}})*"


_JSON_POINTER = "(?:/(?:[^/~]|~[01])*)*"


def _regex() -> str:
    plain = r"[A-Za-z0-9 _,:;=@%&!#<>'\"/~-]"
    escape = r"\\[dDwWsSnrt.*+?()\[\]{}|^$\\/]"
    inside = r"[A-Za-z0-9 _,:;=@%&!#<>.*+?()]"
    group = rf"\[\^?(?:{inside}|a-z|A-Z|0-9|\\[dDwWsS])+\]"
    atom = f"(?:{plain}|{escape}|\\.|{group})"
    quantity = r"(?:[*+?]\??|\{[0-9]{1,3}\})?"
    branch = f"\\^?(?:{atom}{quantity})*\\$?"
    return f"{branch}(?:\\|{branch})*"


_PATTERNS = {
    "date": _date(),
    "time": _TIME,
    "date-time": f"{_date()}T{_TIME}",
    "duration": _duration(),
    "uuid": _UUID,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "email": _EMAIL,
    "idn-email": _IDN_EMAIL,
    "hostname": _hostname(),
    "idn-hostname": _IDN_HOSTNAME,
    "uri": _uri(),
    "uri-reference": _uri_reference(),
    "uri-template": _uri_template(),
    "iri": _uri(_BEYOND_ASCII),
    "iri-reference": _uri_reference(_BEYOND_ASCII),
    "json-pointer": _JSON_POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,8}})(?:#|{_JSON_POINTER})",
    "regex": _regex(),
}

FORMATS = frozenset(_PATTERNS)


def pattern_of_format(name: str) -> str:
    """Return the values of a format in FORMATS, as a `pattern` of a schema."""
    return f"^(?:{_PATTERNS[name]})$"


@cache
def regex_of_format(name: str) -> Regex:
    """Return the values of a format in FORMATS."""
    return regex_of_pattern(pattern_of_format(name))


@cache
def checker() -> FormatChecker:
    """Return a checker for values of foreign origin. A format has jsonschema's check, if the
    packages that the check needs are installed, and otherwise our own."""
    made = FormatChecker(formats=())
    theirs = Draft202012Validator.FORMAT_CHECKER.checkers
    for name, pattern in _PATTERNS.items():
        check, raises = theirs.get(name) or (_check(re.compile(pattern)), ())
        made.checks(name, raises)(check)
    return made


def _check(pattern: re.Pattern[str]):  # type: ignore[no-untyped-def]
    return lambda value: not isinstance(value, str) or pattern.fullmatch(value) is not None


# Search -------------------------------------------------------------------------------------------

MAX_STATES = 4096
_SETS = {"d": category(r"\d", True), "w": category(r"\w", True), "s": ECMA_SPACE}
_SETS |= {name.upper(): complement(ranges) for name, ranges in _SETS.items()}
_IN_CLASS = {
    name: "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
    for name, ranges in _SETS.items()
}
_ECMA_PIECE = re.compile(
    r"(?P<escape>\\(?:c(?P<control>[A-Za-z])|u\{(?P<braced>[0-9A-Fa-f]+)\}"
    r"|u(?P<high>[dD][89abAB][0-9A-Fa-f]{2})\\u(?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})"
    r"|k<(?P<back>\w+)>|(?P<other>.)))|(?P<opening>\[\^?)|\(\?<(?![=!])|.",
    re.DOTALL,
)


def translated(pattern: str, start: str = "^") -> str:
    """Return an ECMA pattern in Python's syntax; `start` stands for each `^` that is an anchor."""
    return "".join(text for text, _ in _pieces(pattern, start))


def _pieces(pattern: str, start: str) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a translation, each with its source in the pattern."""
    outside = {"$": r"\Z", "^": start, ".": r"[^\n\r\u2028\u2029]", "(?<": "(?P<"}
    in_class = False
    for piece in _ECMA_PIECE.finditer(pattern):
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
    """Return the error message of a translation, with positions in the user's pattern."""
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
    """Search for one pattern. Raises InvalidConstraint if no search is bounded in time."""

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
        """Return whether `text` contains the pattern; also False if the bounds do not suffice."""
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
    """Return the syntax error of `pattern`; "" for a valid pattern of ECMA-262 or of Python,
    searchable or not."""
    known = _OF_ECMA[0].sub(_letters, pattern)
    wrong = _malformed(known)
    if wrong and _malformed(_OF_ECMA[1].sub(_letters, known)):
        return _of_users(wrong, pattern)
    return ""


_OF_ECMA = re.compile(r"\\[pP]\{\w+(?:=\w+)?\}"), re.compile(r"\[\^?\]")
"""Constructs that Python cannot read: classes of Unicode, empty classes and classes of everything.
"""


def _letters(match: re.Match[str]) -> str:
    return len(match[0]) * "a"


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
    """Return the search for `pattern`, kept for later. Raises InvalidConstraint."""
    return PatternSearch(pattern)
