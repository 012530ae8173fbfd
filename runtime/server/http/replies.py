"""Common parts of replies: streams, and fields of OpenAI's endpoints."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NotRequired, TypedDict

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_writer import StreamWriter

from rootlace.runtime.server.http.errors import error_body
from rootlace.runtime.server.served_model import Deliveries
from rootlace.wire.errors import RootlaceError
from rootlace.wire.protocol import CacheReport, Generated, Usage, describe

# Sse ----------------------------------------------------------------------------------------------
#
# Streamed replies: server-sent events, in two dialects, and lines of JSON.


log = logging.getLogger(__name__)


class Dialect(msgspec.Struct, frozen=True):
    """Notation of a stream: its content type, the encoder of payloads, and the end."""

    content_type: str
    encode: Callable[[Any], bytes]
    end: bytes = b""


_LINE_ENDS = tuple((end.encode(), rb"\u%04x" % ord(end)) for end in "\x85\u2028\u2029")


def one_line(data: bytes) -> bytes:
    """Escape characters in JSON that end a line for `str.splitlines`: some clients split streams
    so, as httpx's `iter_lines` does."""
    if data.isascii():
        return data
    for end, escape in _LINE_ENDS:
        data = data.replace(end, escape)
    return data


def sse(payload: object) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + one_line(msgspec.json.encode(payload)) + b"\n\n"


def _named(payload: dict[str, Any]) -> bytes:
    return b"event: " + payload.get("type", "error").encode() + b"\n" + sse(payload)


def _line(payload: object) -> bytes:
    return one_line(msgspec.json.encode(payload)) + b"\n"


_EVENTS = "text/event-stream; charset=utf-8"
OPENAI = Dialect(_EVENTS, sse, b"data: [DONE]\n\n")
NAMED_EVENTS = Dialect(_EVENTS, _named)
"""Events named after their payload's `type`."""
LINES = Dialect("application/x-ndjson", _line)


class DirectEvents:
    """Direct way into a stream, without waking the task that answers the request.

    The first payload begins the reply and opens the way; the end closes it. Meanwhile it is open
    while the client reads as fast as the server writes. `Stream.send` opens it.

    Events leave at the end of the loop's turn, those of one stream in one `send`. The sends of a
    step's streams follow one another: sends between the making of events would drive the
    interpreter out of the processor's caches.
    """

    def __init__(self, deliveries: Deliveries) -> None:
        self.last = b""
        """Events to be sent together with the reply's end."""
        self._deliveries = deliveries
        self.open = False
        """Whether `write` may be called: false before `begin`, behind `end`, and while the client
        reads too slowly."""
        self._unsent = b""
        self._sent = 0
        self._writer: StreamWriter | None = None
        self._transport: asyncio.WriteTransport | None = None

    def begin(self, writer: AbstractStreamWriter | None) -> None:
        """Open behind the reply's head in `writer`, but not without chunks (HTTP/1.0)."""
        if isinstance(writer, StreamWriter) and writer.chunked and writer.transport is not None:
            self._writer, self._transport, self.open = writer, writer.transport, True

    def end(self) -> None:
        self.flush()
        if self._writer is not None:
            self._writer.output_size += self._sent  # the access log tells it
        self._writer = self._transport = None
        self.open = False

    def resume(self) -> None:
        """Open again behind what the task has written, unless the client still reads too slowly."""
        if self._writer is not None:
            self.open = not self._writer.protocol.writing_paused

    def write(self, data: bytes) -> None:
        """Send events soon. Only while open."""
        if data and not self._unsent:
            self._deliveries.soon(self.flush)
        self._unsent += data

    def flush(self) -> None:
        """Send the events now that `write` took."""
        data, self._unsent = self._unsent, b""
        if data and (transport := self._transport) is not None:
            chunk = b"%x\r\n%b\r\n" % (len(data), data)
            self._sent += len(chunk)
            transport.write(chunk)
            self.open = not (transport.get_write_buffer_size() or transport.is_closing())


class Stream(msgspec.Struct, frozen=True):
    """Reply written as it comes: each of `payloads` is an event, then comes the end.

    Payloads that are bytes are encoded events, sent together: sending is much of a short event's
    cost. `direct`: the way for payloads that the generator does not give.
    """

    payloads: AsyncGenerator[Any, None]
    dialect: Dialect = OPENAI
    direct: DirectEvents | None = None

    async def send(self, request: web.Request) -> web.StreamResponse:
        """Answer `request`.

        The reply starts with the first payload, so an error before it still has its own HTTP
        status. A later error becomes an event in the endpoint's error shape. However this ends, by
        the client's disconnect too, the generator is closed, which cancels its work.
        """
        dialect, direct = self.dialect, self.direct
        response = web.StreamResponse(
            headers={
                "Content-Type": dialect.content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        async with aclosing(self.payloads) as payloads:
            try:
                async for payload in payloads:
                    data = payload if isinstance(payload, bytes) else dialect.encode(payload)
                    if not data:
                        continue
                    if response.prepared:
                        if direct is not None:
                            direct.flush()
                        await response.write(data)
                        if direct is not None:
                            direct.resume()
                        continue
                    writer = await response.prepare(request)
                    await response.write(data)
                    if direct is not None:
                        direct.begin(writer)
            except ConnectionResetError:
                raise
            except Exception as error:
                if not response.prepared:
                    raise
                if not isinstance(error, RootlaceError):
                    log.exception("%s %s failed while streaming", request.method, request.path)
                data = dialect.encode(error_body(error, request.path))
                if direct is not None:
                    direct.flush()
                    data, direct.last = direct.last + data, b""
                await response.write(data)
            finally:
                if direct is not None:
                    direct.end()
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof(dialect.end if direct is None else direct.last + dialect.end)
        return response


# Replies ------------------------------------------------------------------------------------------


def json_response(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


class Envelope(TypedDict):
    """First fields of OpenAI's answers."""

    id: str
    object: str
    created: int
    model: str


class PromptTokens(TypedDict):
    """Origin of the prompts' tokens."""

    cached_tokens: int


class Drafted(TypedDict):
    """Drafted tokens: accepted ones and rejected ones."""

    accepted: int
    rejected: int


class CompletionTokens(TypedDict):
    """Origin of the completions' tokens; a chat's include thoughts. With a prediction: its accepted
    and rejected tokens. `drafts`: the same for each source of drafts: other requests' tokens
    ("tree"), the request's own text ("output"), a draft model ("model")."""

    forced_tokens: int
    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]
    drafts: NotRequired[dict[str, Drafted]]


class ReportReply(CacheReport, kw_only=True, frozen=True, omit_defaults=False):
    """Report on the cache, and a sentence for people."""

    says: str


class Reports(TypedDict):
    """Parts of a reply that only some requests ask for."""

    cache_report: NotRequired[ReportReply]
    cache_pin: NotRequired[str]


class UsageReply(TypedDict):
    """OpenAI's `usage`, with reports on the cache and pins where requested. In chats,
    `reasoning_tokens` also stands where sglang's clients look for it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    reasoning_tokens: NotRequired[int]
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens
    cache_reports: NotRequired[list[ReportReply]]
    cache_pins: NotRequired[list[str]]


class Status(msgspec.Struct):
    """State of the server."""

    status: str


def envelope(prefix: str, kind: str, model: str, chosen: str | None = None) -> Envelope:
    """Make the first fields of every object of a reply, the same in all chunks of a stream.

    `chosen` is the id that the client chose.
    """
    return {
        "id": f"{prefix}-{chosen or uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def report_fields(report: CacheReport) -> ReportReply:
    """Return a report in the form of replies."""
    return ReportReply(**msgspec.structs.asdict(report), says=describe(report))


def report_of(generated: Generated) -> Reports:
    """Return the cache report and the pin of a reply, where requested."""
    reports: Reports = {}
    facts = generated.facts
    if facts.report is not None:
        reports["cache_report"] = report_fields(facts.report)
    if facts.pin:
        reports["cache_pin"] = facts.pin
    return reports


def drafts_of(usages: Sequence[Usage]) -> dict[str, Drafted]:
    """Return the sum of `Usage.drafts`."""
    drafts: dict[str, Drafted] = {}
    for usage in usages:
        for source, (accepted, rejected) in usage.drafts.items():
            sums = drafts.setdefault(source, {"accepted": 0, "rejected": 0})
            sums["accepted"] += accepted
            sums["rejected"] += rejected
    return drafts


def usage_of(results: Sequence[Generated]) -> UsageReply:
    """Sum the usage over a request's prompts; reports and pins are one per prompt."""
    usages = [result.usage for result in results]
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    reply: UsageReply = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {
            "forced_tokens": sum(usage.forced_tokens for usage in usages)
        },
    }
    if drafts := drafts_of(usages):
        reply["completion_tokens_details"]["drafts"] = drafts
    if reports := [report_fields(each.facts.report) for each in results if each.facts.report]:
        reply["cache_reports"] = reports
    if pins := [each.facts.pin for each in results if each.facts.pin]:
        reply["cache_pins"] = pins
    return reply
