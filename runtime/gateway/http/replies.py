"""What the replies of OpenAI's endpoints share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import NotRequired, TypedDict

import msgspec
from aiohttp import web

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.branches.model_name import check_name
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.openai.body import SamplingBody
from rootlace.wire.cache_report import CacheReport, describe
from rootlace.wire.protocol import Generated


def json_response(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


class Envelope(TypedDict):
    """What all of OpenAI's answers begin with."""

    id: str
    object: str
    created: int
    model: str


class PromptTokens(TypedDict):
    """How the tokens of prompts came to be."""

    cached_tokens: int


class CompletionTokens(TypedDict):
    """How the tokens of completions came to be; some of chats are thoughts. Where there was a
    prediction: of its tokens, those computed ahead that came, and those that did not."""

    forced_tokens: int
    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class ReportReply(CacheReport, kw_only=True, frozen=True, omit_defaults=False):
    """A report on the cache, and a sentence for people."""

    says: str


class Reports(TypedDict):
    """What there is where it was asked for."""

    cache_report: NotRequired[ReportReply]
    cache_pin: NotRequired[str]


class UsageReply(TypedDict):
    """OpenAI's `usage`, with reports on the cache and pins where they were asked for."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens
    cache_reports: NotRequired[list[ReportReply]]
    cache_pins: NotRequired[list[str]]


class Status(msgspec.Struct):
    """How the server is."""

    status: str


def envelope(prefix: str, kind: str, model: str, given: str | None = None) -> Envelope:
    """The first fields of every object of a reply, the same in all chunks of a stream.

    `given` is the id that the client chose.
    """
    return {
        "id": f"{prefix}-{given or uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def report_fields(report: CacheReport) -> ReportReply:
    """A report as replies carry it."""
    return ReportReply(**msgspec.structs.asdict(report), says=describe(report))


def report_of(generated: Generated) -> Reports:
    """Those of a reply, where they were asked for."""
    found: Reports = {}
    if generated.cache_report is not None:
        found["cache_report"] = report_fields(generated.cache_report)
    if generated.pin:
        found["cache_pin"] = generated.pin
    return found


def usage_of(results: Sequence[Generated]) -> UsageReply:
    """Summed over the prompts of a request; reports and pins are one per prompt."""
    usages = [result.usage for result in results]
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    found: UsageReply = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {
            "forced_tokens": sum(usage.forced_tokens for usage in usages)
        },
    }
    if reports := [report_fields(each.cache_report) for each in results if each.cache_report]:
        found["cache_reports"] = reports
    if pins := [each.pin for each in results if each.pin]:
        found["cache_pins"] = pins
    return found


def check_model(gateway: Gateway, asked: str | None) -> str:
    """The name of the served model, with that of the adapter that is asked for behind it
    (`MODEL:ADAPTER`). Raises ModelNotFound when another one is asked for."""
    return check_name(gateway.model_info, asked)


def adapter_of(
    gateway: Gateway, model: str, asked: str | None = None, field: str = "adapter"
) -> str:
    """The adapter of a request: what its `field` asks for, or else what is behind the name of the
    model, as `check_model` gives it. "": none, also where it is asked for. Raises InvalidParameter,
    also where the two differ."""
    named = model.removeprefix(gateway.model_info.name).removeprefix(":")
    if asked is None or asked == named:
        return named
    if asked and asked not in gateway.model_info.adapters:
        known = ", ".join(gateway.model_info.adapters) or "none"
        raise InvalidParameter(field, f"the adapter {asked!r} is not loaded (loaded: {known})")
    if named:
        raise InvalidParameter(field, f"{field} {asked!r} is not that of the model, {named!r}")
    return asked


def wants_usage(body: SamplingBody) -> bool:
    """Whether a stream ends with a chunk that carries the usage, and with it the cache report."""
    if body.stream_options is None:
        return bool(body.stream and body.return_cache_report)
    if not body.stream:
        raise InvalidParameter("stream_options", "stream_options needs stream=true")
    return bool(body.stream_options.include_usage or body.return_cache_report)
