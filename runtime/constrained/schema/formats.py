"""The formats of strings that are regular: what we write for them, and the check of a given value.

Sources: RFC 3339 (date, time, date-time, duration), RFC 9562 (uuid), RFC 2673 and RFC 4291 (ipv4,
ipv6), RFC 5321 without quoted local parts (email), RFC 3986 without IP literals (uri). Each is a
subset of what its RFC allows; leap seconds and the year 0 are left out because they are valid only
sometimes or not to everybody.
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


def _time() -> str:
    hour_minute = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
    return rf"{hour_minute}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{hour_minute})"


def _duration() -> str:
    n = "[0-9]{1,9}"
    days, seconds = f"{n}D", f"{n}S"
    months = f"{n}M(?:{days})?"
    minutes = f"{n}M(?:{seconds})?"
    clock = f"T(?:{n}H(?:{minutes})?|{minutes}|{seconds})"
    dates = f"(?:{days}|{months}|{n}Y(?:{months})?)"
    return f"P(?:{dates}(?:{clock})?|{clock}|{n}W)"


def _uuid() -> str:
    return "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"


def _ipv4() -> str:
    octet = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
    return rf"{octet}(?:\.{octet}){{3}}"


def _ipv6() -> str:
    group = "[0-9a-fA-F]{1,4}"
    options = [f"(?:{group}:){{7}}{group}", f"(?:{group}:){{1,7}}:", f":(?::{group}){{1,7}}", "::"]
    options += [f"(?:{group}:){{{n}}}(?::{group}){{1,{7 - n}}}" for n in range(1, 7)]
    return "(?:" + "|".join(options) + ")"


def _email() -> str:
    atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
    label = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
    return rf"{atom}(?:\.{atom})*@{label}(?:\.{label})+"


def _uri() -> str:
    unreserved, delimiters = "A-Za-z0-9._~-", "!$&'()*+,;="
    encoded = "%[0-9A-Fa-f]{2}"

    def some(extra: str) -> str:
        return f"(?:[{delimiters}{extra}{unreserved}]|{encoded})"

    segment = some(":@")
    authority = f"(?:{some(':')}*@)?{some('')}*(?::[0-9]*)?"
    rooted = f"/(?:{segment}+(?:/{segment}*)*)?"
    hierarchy = f"(?://{authority}(?:/{segment}*)*|{rooted}|{segment}+(?:/{segment}*)*)?"
    rest = some(":@/?")
    return rf"[A-Za-z][A-Za-z0-9+.-]*:{hierarchy}(?:\?{rest}*)?(?:#{rest}*)?"


_PATTERNS = {
    "date": _date(),
    "time": _time(),
    "date-time": f"{_date()}T{_time()}",
    "duration": _duration(),
    "uuid": _uuid(),
    "ipv4": _ipv4(),
    "ipv6": _ipv6(),
    "email": _email(),
    "uri": _uri(),
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
    """A checker of the formats in FORMATS that takes exactly the values we would write."""
    made = FormatChecker(formats=())
    for name, pattern in _PATTERNS.items():
        made.checks(name)(_check(re.compile(pattern)))
    return made


@cache
def lenient_checker() -> FormatChecker:
    """A checker of values that others wrote: jsonschema's check of a format in FORMATS where it has
    one (some need packages that may not be there), and ours where it has none."""
    made = FormatChecker(formats=())
    theirs = Draft202012Validator.FORMAT_CHECKER.checkers
    for name, own in checker().checkers.items():
        check, raises = theirs.get(name, own)
        made.checks(name, raises)(check)
    return made


def _check(pattern: re.Pattern[str]):  # type: ignore[no-untyped-def]
    return lambda value: not isinstance(value, str) or pattern.fullmatch(value) is not None
