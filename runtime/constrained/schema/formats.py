"""The formats of strings that are regular: what we write for them, and the check of a given value.

Sources: RFC 3339 (date, time, date-time, duration), RFC 9562 (uuid), RFC 2673 and RFC 4291 (ipv4,
ipv6), RFC 5321 without quoted local parts (email; RFC 6531 with: idn-email), RFC 3986 without IP
literals (uri, uri-reference; RFC 3987: iri, iri-reference), RFC 1123 (hostname), RFC 5890 to 5892
(idn-hostname), RFC 6901 (json-pointer), relative-json-pointer as its draft has it, RFC 6570
(uri-template), ECMA-262 (regex).

Each is a subset of what its source allows. Left out is what is valid only sometimes or not to
everybody (leap seconds, the year 0) and what is not regular: names in Punycode, letters whose place
among others matters (idn-hostname), groups of a regular expression.
"""

from __future__ import annotations

import re
from functools import cache

from jsonschema import Draft202012Validator, FormatChecker

from rootlace.runtime.constrained.automaton.syntax import Regex
from rootlace.runtime.constrained.schema.pattern import regex_of_pattern


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
"""Letters that a name may have anywhere, beside any other (class PVALID of RFC 5892, read from left
to right, equal to their own NFC)."""
_BEYOND_ASCII = "\\u00a0-\\ud7ff\\uf900-\\ufdcf\\ufdf0-\\uffef"


def _hostname() -> str:
    """At most 63 characters a label and 253 in all: many labels are shorter ones. No hyphens side
    by side: where labels have them, they may be Punycode."""

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
    """Absolute, or relative: then its first segment has no colon."""
    return f"(?:{_uri(beyond)}|{_hierarchy(beyond, colons=False)}{_query(beyond)})"


def _some(extra: str) -> str:
    """A character of a component that allows `extra` as well."""
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
    """The values of a format in FORMATS, as a `pattern` of a schema."""
    return f"^(?:{_PATTERNS[name]})$"


@cache
def regex_of_format(name: str) -> Regex:
    """The values of a format in FORMATS."""
    return regex_of_pattern(pattern_of_format(name))


@cache
def checker() -> FormatChecker:
    """A checker of values that others wrote: jsonschema's check of a format in FORMATS where it has
    one (some need packages that may not be there), and ours where it has none."""
    made = FormatChecker(formats=())
    theirs = Draft202012Validator.FORMAT_CHECKER.checkers
    for name, pattern in _PATTERNS.items():
        check, raises = theirs.get(name) or (_check(re.compile(pattern)), ())
        made.checks(name, raises)(check)
    return made


def _check(pattern: re.Pattern[str]):  # type: ignore[no-untyped-def]
    return lambda value: not isinstance(value, str) or pattern.fullmatch(value) is not None
