"""What the cache says of one prompt."""

from __future__ import annotations

from typing import Literal

import msgspec

Reason = Literal[
    "whole", "new", "differs", "evicted", "flushed", "expired", "namespace", "scored", "disabled"
]

Scope = Literal["own", "all"]
"""Whether a report looks into the prompt's own namespace alone, or into others as well."""


class CacheReport(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How far a prompt was cached, and why no further.

    The first `matched` of `limit` tokens were cached (the prompt's last token is always computed,
    for its logits are wanted). `reason` is the first that applies:

    - "disabled": the cache is switched off.
    - "whole": all of them were cached.
    - "scored": those behind may be cached; they were computed because log-probabilities of the
      prompt, or a vector made of all its tokens, were asked for.
    - "evicted", "flushed", "expired": `lost` tokens more had been, until `lost_seconds` ago.
      Evicted: to make room for a request, that of the program `lost_to` if it was of the same
      namespace. Expired: their request had given them so long to live.
    - "differs": something else followed there; `instead` are its first tokens, in the continuation
      used last, out of `continuations`.
    - "namespace": `elsewhere` tokens are cached in another namespace.
    - "new": nothing had followed there yet.

    Other fields are set wherever they apply. Texts, if the server gives them: what stands `before`
    the end of the match, what the prompt `goes_on` with, and what is `cached_instead`.
    `from_disk` of the tokens that were cached had been given up and were read back, from a disk or
    from main memory beside a GPU; `on_disk` tokens behind them lie there.
    `saved_seconds`: about how long it would have taken to compute what was cached. `advice`: what
    to change, where this and earlier prompts would share much but for an early difference.
    """

    matched: int
    limit: int
    reason: Reason
    instead: tuple[int, ...] = ()
    continuations: int = 0
    lost: int = 0
    lost_seconds: float = 0.0
    lost_to: str = ""
    elsewhere: int = 0
    from_disk: int = 0
    on_disk: int = 0
    before: str = ""
    goes_on: str = ""
    cached_instead: str = ""
    saved_seconds: float = 0.0
    advice: str = ""


def describe(report: CacheReport) -> str:
    """The report as a sentence or two for people."""
    matched, rest = report.matched, report.limit - report.matched
    cached = f"{matched:,} of {report.limit:,} tokens were cached"
    if report.from_disk:
        cached += f" ({report.from_disk:,} of them read from disk)"
    if report.on_disk:
        cached += f", {report.on_disk:,} more are on disk"
    if report.saved_seconds >= 0.001:
        cached += f", which saved about {report.saved_seconds:.3g} s"
    if report.reason == "whole":
        return f"{cached}."
    if report.reason == "disabled":
        return "The cache is switched off."
    if report.reason in ("evicted", "flushed", "expired"):
        ago = f"{report.lost_seconds:.3g} s ago"
        why = "when the cache was flushed"
        if report.reason == "expired":
            why = "when their time to live was over"
        elif report.reason == "evicted":
            whom = f"the program {report.lost_to}" if report.lost_to else "another request"
            why = f"to make room for {whom}"
        return f"{cached}; {report.lost:,} more had been until {ago}, and were given up {why}."
    if report.reason == "scored":
        return f"{cached}; the others were computed because the prompt's own figures were wanted."
    at = f"Behind {report.before!r} the prompt goes on" if matched else "The prompt begins"
    at += f" with {report.goes_on!r}"
    if report.reason == "differs":
        others = report.continuations - 1
        more = f" (and {others} other continuation{'s' if others > 1 else ''})" if others else ""
        if _same_text(report.goes_on, report.cached_instead):
            return (
                f"{cached}. {at}, which the cache has in other tokens{more}: there it was generated"
                " or cut apart elsewhere. Only equal tokens are shared."
            )
        return f"{cached}. {at}, where the cache has {report.cached_instead!r}{more}."
    if report.reason == "namespace":
        return f"{cached}; {report.elsewhere:,} are cached, but in another namespace."
    if not matched:
        return f"None of the {report.limit:,} tokens were cached."
    return f"{cached}; the {rest:,} behind them are new."


def _same_text(one: str, other: str) -> bool:
    """Whether excerpts show the same text as far as both go; parts of characters show none."""
    shown = min(len(one), len(other))
    return shown > 0 and one[:shown] == other[:shown] and "\ufffd" not in one[:shown]
