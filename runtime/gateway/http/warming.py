"""Generating before anybody asks, so that what is made at a first use is there."""

from __future__ import annotations

import logging

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.branches.vectors import find_vectors
from rootlace.runtime.gateway.http import one_shot
from rootlace.runtime.gateway.http.constraints import Asked
from rootlace.runtime.gateway.http.prompts import Prompt
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint, SamplingParams

TOKENS = 8
SCHEMA = '{"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}'

log = logging.getLogger(__name__)


async def warm_up(gateway: Gateway, replicas: int = 1) -> None:
    """Some free text, then some JSON of a schema, as many at once as there are engines, which
    share them out. Raises the runtime's typed errors."""
    await generate(gateway, TOKENS, copies=replicas)
    if gateway.model_info.labels is not None:
        return
    try:
        asked = Asked(Constraint("json_schema", SCHEMA), "warm_up")
        await generate(gateway, TOKENS, asked, copies=replicas)
    except InvalidConstraint as error:
        log.warning("answers of this model cannot be constrained: %s", error)


async def generate(
    gateway: Gateway, tokens: int, asked: Asked | None = None, copies: int = 1
) -> None:
    """So many tokens behind one, several times; or its vector, of a model that gives no tokens."""
    prompts = [Prompt(ids=(index,)).parts() for index in range(copies)]
    if gateway.model_info.labels is not None:
        await find_vectors(gateway, prompts, "last")
        return
    params = SamplingParams(max_tokens=tokens, ignore_eos=asked is None)
    await one_shot.run(gateway, [one_shot.Job(parts, params, asked) for parts in prompts])
