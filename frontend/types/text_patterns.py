"""Regular expressions for the texts of values: what a reader accepts, with a bounded length."""

from __future__ import annotations

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
# msgspec reads days and smaller units; a year has no fixed length.
_N = "[0-9]{1,5}"
_CLOCK = rf"T({_N}H({_N}M)?({_N}S)?|{_N}M({_N}S)?|{_N}S)"
DURATION = rf"^P({_N}D({_CLOCK})?|{_CLOCK})$"
