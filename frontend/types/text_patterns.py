"""Regular expressions for the texts of values: what a reader accepts, with a bounded length."""

from rootlace.wire.errors import InvalidConstraint

# Keys of JSON objects (which are always strings) whose type is not str.
INT_KEY = r"^(0|-?[1-9][0-9]{0,17})$"
# As many digits as decimal's default precision: without a bound, nothing would end a number.
NUMBER_TEXT = r"^-?(0|[1-9][0-9]{0,27})(\.[0-9]{1,28})?$"
HEX = "[0-9a-f]"
UUID_KEY = rf"^{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}$"
# Only days that exist, leap years considered, which JSON Schema's formats do not promise.
_LEAP = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
DATE = f"([1-9][0-9]{{3}}-{_DAY}|{_LEAP})"
TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
OFFSET = "(Z|[-+]([01][0-9]|2[0-3]):[0-5][0-9])"
# Host names by everybody's reading: neither addresses of numbers nor Punycode, which have rules.
_LABEL = "[a-z0-9]+(-[a-z0-9]+)*"
HOST = rf"({_LABEL}\.)*[a-z]([a-z0-9]*|[a-z0-9]*-[a-z][a-z0-9]*)(:[1-9][0-9]{{0,3}})?"
USER = "([A-Za-z0-9._~-]+(:[A-Za-z0-9._~-]+)?@)?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = f"{HEX}{{1,4}}"
IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
IPV6 = f"({_GROUP}:){{7}}{_GROUP}"
# What is behind the bits of a network is 0, so they are cut between two numbers.
NETWORK4 = "|".join(rf"{_OCTET}(\.{_OCTET}){{{n}}}(\.0){{{3 - n}}}/{8 * (n + 1)}" for n in range(4))
NETWORK6 = "|".join(f"({_GROUP}:){{{n}}}:/{16 * n}" for n in range(1, 8))
INTERFACE4 = f"{IPV4}/([12]?[0-9]|3[0-2])"
INTERFACE6 = f"{IPV6}/(12[0-8]|1[01][0-9]|[1-9]?[0-9])"
# msgspec reads days and smaller units; a year has no fixed length.
_N = "[0-9]{1,5}"
_CLOCK = rf"T({_N}H({_N}M)?({_N}S)?|{_N}M({_N}S)?|{_N}S)"
DURATION = rf"^P({_N}D({_CLOCK})?|{_CLOCK})$"
# Pydantic reads all units, and a timedelta has fewer than 10**9 days.
SHORT_DURATION = f"^([A-Z]+{_N})+[A-Z]$"


def base64_pattern(low: int, high: int | None, text: bool = False) -> str:
    """Base64 of `low` to `high` bytes: groups of three bytes, and what one or two bytes leave.
    `text`: the highest bit of no byte is set."""
    one = "[A-Za-z0-9+/]"
    group, two = f"{one}{{4}}", f"{one}{{2}}"
    first = "[A-Za-f]" if text else one
    if text:
        two = f"{first}[A-HQ-Xg-nw-z0-3]"
        group = f"{two}[ABEFIJMNQRUVYZcdghklopstwx014589]{one}"
    endings = []
    for rest, written in ((0, ""), (1, f"{first}[AQgw]=="), (2, f"{two}[AEIMQUYcgkosw048]=")):
        least = max(0, -((rest - low) // 3))
        most = None if high is None else (high - rest) // 3
        if most is None or most >= least:
            upper = "" if most is None else most
            endings.append(f"({group}){{{least},{upper}}}{written}")
    if not endings:
        raise InvalidConstraint(f"no bytes are at least {low} and at most {high} long")
    return f"^({'|'.join(endings)})$"
