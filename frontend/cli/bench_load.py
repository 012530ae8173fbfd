"""Load of `rootlace bench`: requests, the answers' times, their figures, and an HTML page."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import aiohttp

# Loads --------------------------------------------------------------------------------------------
#
# Loads: prompts of random words, by length, arrival and shared prefix.


# Everyday words, which are a token each in most vocabularies.
_WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book eye
job word business issue side kind head house service friend father power hour game line end
member law car city community name president team minute idea kid body information back parent
face others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education foot boy age policy music mind voice
paper space ground light summer field garden river stone window letter
"""
WORDS = _WORDS.split()


@dataclass(frozen=True)
class Ask:
    """Request, sent `at` seconds after the first; None: as soon as concurrency allows."""

    prompt: str
    max_tokens: int
    at: float | None = None


@dataclass(frozen=True)
class Shape:
    """Shape of a load, in tokens; `words` is the number of words per token of the server."""

    requests: int
    input_tokens: int
    output_tokens: int
    prefix: int
    groups: int
    words: float
    seed: int

    def text(self, tokens: float, *seed: object) -> str:
        """Return random text of about `tokens` tokens, deterministic per seed."""
        rng = random.Random(repr((self.seed, *seed)))
        count = max(round(tokens * self.words), 1)
        return " ".join(rng.choices(WORDS, k=count))


def unlike(shape: Shape) -> list[Ask]:
    """Return requests with prompts that share nothing."""
    return [
        Ask(shape.text(shape.input_tokens, "random", number), shape.output_tokens)
        for number in range(shape.requests)
    ]


def shared(shape: Shape) -> list[Ask]:
    """Return requests of `groups` in turn; each group's prompts share a prefix."""
    prefixes = [shape.text(shape.prefix, "prefix", group) for group in range(shape.groups)]
    return [
        Ask(
            f"{prefixes[number % shape.groups]}\n{shape.text(shape.input_tokens, 'own', number)}",
            shape.output_tokens,
        )
        for number in range(shape.requests)
    ]


def chat(shape: Shape) -> list[Ask]:
    """Return requests with a conversation's lengths: log-normal, most of them short. The shape's
    lengths are the medians."""
    rng = random.Random(f"chat {shape.seed}")
    asks = []
    for number in range(shape.requests):
        tokens = min(
            rng.lognormvariate(math.log(shape.input_tokens), 1.0), 8.0 * shape.input_tokens
        )
        answer = rng.lognormvariate(math.log(shape.output_tokens), 0.8)
        length = min(max(round(answer), 1), 8 * shape.output_tokens)
        asks.append(Ask(shape.text(tokens, "chat", number), length))
    return asks


LOADS: dict[str, Callable[[Shape], list[Ask]]] = {"chat": chat, "shared": shared, "random": unlike}


def arriving(asks: list[Ask], rate: float, seed: int) -> list[Ask]:
    """Return the requests at Poisson times, `rate` per second; 0: as soon as concurrency allows."""
    if not rate:
        return asks
    rng = random.Random(f"arrivals {seed}")
    now, timed = 0.0, []
    for ask in asks:
        timed.append(replace(ask, at=now))
        now += rng.expovariate(rate)
    return timed


def of_trace(path: Path, shape: Shape, speed: float) -> list[Ask]:
    """Return the first `shape.requests` requests of a trace, read as `rootlace simulate` does;
    prompts share text for shared blocks. Raises BadTrace, and OSError for an unreadable file."""
    from rootlace.runtime.simulation.trace import read_trace

    trace = read_trace(path)
    asks = []
    for number in range(min(len(trace), shape.requests)):
        left, parts = int(trace.prompt_tokens[number]), []
        for block in trace.blocks[trace.starts[number] : trace.starts[number + 1]].tolist():
            parts.append(shape.text(min(left, trace.block_tokens), "block", block))
            left -= trace.block_tokens
        length = max(int(trace.output_tokens[number]), 1)
        asks.append(Ask(" ".join(parts), length, float(trace.arrivals[number]) / speed))
    return asks


# Sending ------------------------------------------------------------------------------------------


_PROBE_WORDS = 100


class Unusable(Exception):
    """Error for a server that cannot be measured, with the reason."""


@dataclass(frozen=True)
class Server:
    """Address, key and model of the measured server."""

    url: str
    api_key: str
    model: str

    def session(self) -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            read_bufsize=2**20,
        )


@dataclass
class Timed:
    """Times of a request, in seconds after the first one's due time. `pieces` are the arrivals of
    its text.

    With scheduled arrivals, times count from `due`, since a request delayed by `--concurrency`
    waited for the server. `due` is None without a schedule.
    """

    due: float | None
    sent: float = 0.0
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def first(self) -> float:
        """Return seconds until the first token."""
        return self.pieces[0] - self.begun

    @property
    def whole(self) -> float:
        return self.ended - self.begun

    @property
    def begun(self) -> float:
        return self.sent if self.due is None else self.due

    @property
    def between(self) -> float:
        """Return mean seconds between tokens; 0 for a single token."""
        count = self.output_tokens - 1
        return (self.pieces[-1] - self.pieces[0]) / count if count > 0 else 0.0


async def look(server: Server) -> tuple[str, float]:
    """Return the model's name, and the server's words of `WORDS` per token. Raises Unusable."""
    async with server.session() as http:
        try:
            model = server.model
            if not model:
                async with http.get(f"{server.url}/v1/models") as reply:
                    model = (await _answer(reply))["data"][0]["id"]
            body = {
                "model": model,
                "prompt": " ".join(WORDS[:_PROBE_WORDS]),
                "max_tokens": 1,
                "temperature": 0,
            }
            async with http.post(f"{server.url}/v1/completions", json=body) as reply:
                tokens = (await _answer(reply))["usage"]["prompt_tokens"]
        except (aiohttp.ClientError, OSError) as error:
            reason = getattr(error, "os_error", error)  # not what aiohttp says of its SSL options
            raise Unusable(f"there is no server at {server.url}: {reason}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Unusable(f"{server.url} does not answer as OpenAI's servers do") from error
    return model, _PROBE_WORDS / max(tokens, 1)


async def _answer(reply: aiohttp.ClientResponse) -> Any:
    text = await reply.text()
    if reply.status != 200:
        raise Unusable(f"{reply.url}: {_error_text(text, reply.status)}")
    return json.loads(text)


def _error_text(text: str, status: int) -> str:
    try:
        return f"{status}: {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {text[:200]}"


async def send_all(
    server: Server, asks: list[Ask], concurrency: int, ended: Callable[[], None]
) -> list[Timed]:
    """Send all requests, none before it is due, at most `concurrency` at a time."""
    free = asyncio.Semaphore(concurrency)
    begun = time.perf_counter()

    async def one(ask: Ask) -> Timed:
        timed = Timed(ask.at)
        await asyncio.sleep(max((ask.at or 0.0) - (time.perf_counter() - begun), 0))
        async with free:
            timed.sent = time.perf_counter() - begun
            try:
                await _send(http, server, ask, timed, begun)
            except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                timed.error = f"{type(error).__name__}: {error}"[:200]
            timed.ended = time.perf_counter() - begun
        ended()
        return timed

    async with server.session() as http:
        return list(await asyncio.gather(*map(one, asks)))


async def _send(
    http: aiohttp.ClientSession, server: Server, ask: Ask, timed: Timed, begun: float
) -> None:
    body = {
        "model": server.model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with http.post(f"{server.url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            timed.error = _error_text(await reply.text(), reply.status)
            return
        async for event in _events(reply):
            if error := event.get("error"):
                timed.error = str(error["message"] if isinstance(error, dict) else error)
                return
            if any(choice.get("text") for choice in event.get("choices", ())):
                timed.pieces.append(time.perf_counter() - begun)
            if usage := event.get("usage"):
                timed.prompt_tokens = usage["prompt_tokens"]
                timed.output_tokens = usage["completion_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                timed.cached_tokens = details.get("cached_tokens") or 0
    if not timed.pieces:
        timed.error = timed.error or "the answer has no text"


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.content:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


# Figures ------------------------------------------------------------------------------------------
#
# Results of a load: distributions of times, rates, errors.


class Spread(NamedTuple):
    """Mean and percentiles of times, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ranked = sorted(values)
        return cls(fmean(ranked), *(_quantile(ranked, share) for share in (0.5, 0.9, 0.99, 1.0)))


@dataclass(frozen=True)
class Figures:
    """Figures of a load; `spreads` are empty if every request failed."""

    timed: list[Timed]
    spreads: dict[str, Spread]
    rates: dict[str, float]
    errors: dict[str, int]
    asked: dict[str, Any]
    """Settings of the load, the server, and the date."""

    @classmethod
    def of(cls, timed: list[Timed], asked: dict[str, Any] | None = None) -> Figures:
        good = [one for one in timed if not one.error]
        spreads: dict[str, Spread] = {}
        if good:
            spreads["first token, ms"] = Spread.of([one.first for one in good])
            several = [one.between for one in good if one.output_tokens > 1]
            if several:
                spreads["between tokens, ms"] = Spread.of(several)
            spreads["whole answer, ms"] = Spread.of([one.whole for one in good])
        begun = min((one.sent for one in timed), default=0.0)
        seconds = max(max((one.ended for one in timed), default=0.0) - begun, 1e-9)
        prompts = sum(one.prompt_tokens for one in good)
        outputs = sum(one.output_tokens for one in good)
        rates = {
            "requests": float(len(good)),
            "seconds": seconds,
            "requests per second": len(good) / seconds,
            "prompt tokens per second": prompts / seconds,
            "output tokens per second": outputs / seconds,
            "cached prompt tokens, %": 100
            * sum(one.cached_tokens for one in good)
            / max(prompts, 1),
        }
        return cls(
            timed, spreads, rates, dict(Counter(o.error for o in timed if o.error)), asked or {}
        )

    def terms(self) -> str:
        """Return the run's settings in a line, without model and server."""
        names = [name for name in self.asked if name not in ("model", "url")]
        return ", ".join(f"{name} {self.asked[name]}" for name in names)

    def as_json(self) -> dict[str, Any]:
        """Return all figures and requests; times in seconds."""
        return {
            "asked": self.asked,
            "rates": self.rates,
            "spreads": {
                name.removesuffix(", ms"): spread._asdict() for name, spread in self.spreads.items()
            },
            "errors": self.errors,
            "requests": [asdict(one) for one in self.timed],
        }


def _quantile(ranked: Sequence[float], share: float) -> float:
    """Return the quantile by the nearest rank."""
    return ranked[min(max(round(share * len(ranked) + 0.5) - 1, 0), len(ranked) - 1)]


# Page ---------------------------------------------------------------------------------------------


_STYLE = """
:root { color-scheme: light dark; --line: #8886; --main: #3a7d44; --first: #b36b00; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1em; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; text-align: right; }
td:first-child { text-align: left; } tr { border-top: 1px solid var(--line); }
svg { width: 100%; border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0 1.2rem; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.bar { stroke: var(--main); } .wait { stroke: var(--first); }
.curve { fill: none; stroke: var(--main); }
.grid { stroke: var(--line); } .bad { color: #c33; }
"""
_WIDTH, _HEIGHT, _LEFT, _BELOW = 900, 260, 50, 24
_SHOWN = 400


def page(found: Figures) -> str:
    """Return the HTML page; its labels name milliseconds or seconds."""
    model, url = found.asked["model"], found.asked["url"]
    good = [one for one in found.timed if not one.error]
    names = ("mean", "p50", "p90", "p99", "most")
    head = "".join(f"<th>{name}</th>" for name in ("", *names))
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{1000 * v:,.1f}</td>' for v in spread)}</tr>"
        for name, spread in found.spreads.items()
    )
    rates = "".join(
        f"<tr><td>{escape(name)}</td><td>{value:,.2f}</td></tr>"
        for name, value in found.rates.items()
    )
    errors = "".join(
        f'<p class="bad">{count} times {escape(error)}</p>' for error, count in found.errors.items()
    )
    plots = ""
    if good:
        plots = (
            f"<h2>First token: share of requests by seconds</h2>{_curve([o.first for o in good])}"
            f"<h2>Requests over time (until the first token, then the answer)</h2>{_bars(good)}"
        )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(model)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(model)} at {escape(url)}</h1><p>{escape(found.terms())}</p>{errors}"
        f"<table><tr>{head}</tr>{rows}</table><h2>Rates</h2><table>{rates}</table>{plots}"
        "</body></html>\n"
    )


def _frame(inside: str, longest: float) -> str:
    marks = []
    for part in range(6):
        x = _LEFT + (_WIDTH - _LEFT - 10) * part / 5
        marks.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="6" y2="{_HEIGHT - _BELOW}"/>'
            f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">'
            f"{longest * part / 5:.3g} s</text>"
        )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(marks)}{inside}</svg>'


def _curve(values: Sequence[float]) -> str:
    """Draw the cumulative distribution, as SVG."""
    ranked = sorted(values)
    longest = ranked[-1] or 1e-9
    points = [
        (_x(value, longest), 6 + (_HEIGHT - _BELOW - 6) * (1 - (at + 1) / len(ranked)))
        for at, value in enumerate(ranked)
    ]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    labels = "".join(
        f'<text x="4" y="{10 + (_HEIGHT - _BELOW - 6) * (1 - share):.0f}">{share:.0%}</text>'
        for share in (0.0, 0.5, 1.0)
    )
    return _frame(f'<path class="curve" d="{path}"/>{labels}', longest)


def _bars(timed: Sequence[Timed]) -> str:
    shown = timed[:: max(len(timed) // _SHOWN, 1)]
    longest = max(one.ended for one in timed) or 1e-9
    step = (_HEIGHT - _BELOW - 8) / len(shown)
    lines = []
    for at, one in enumerate(shown):
        y = round(8 + step * (at + 0.5), 1)
        sent, first, ended = (_x(t, longest) for t in (one.sent, one.pieces[0], one.ended))
        height = f'stroke-width="{max(step * 0.8, 0.5):.2f}"'
        lines.append(
            f'<line class="wait" {height} x1="{sent:.1f}" x2="{first:.1f}" y1="{y}" y2="{y}"/>'
            f'<line class="bar" {height} x1="{first:.1f}" x2="{ended:.1f}" y1="{y}" y2="{y}"/>'
        )
    return _frame("".join(lines), longest)


def _x(seconds: float, longest: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - 10) * seconds / longest
