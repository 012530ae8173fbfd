"""Vectors of texts: hidden states that a model's head never sees, or its scores of labels."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rootlace.runtime.contracts.request import Pooling, Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.gateway.branches.core import Core
from rootlace.runtime.gateway.branches.growth import check_fits
from rootlace.runtime.gateway.branches.requests import Requests
from rootlace.runtime.gateway.keys.account import Account, namespace_of, private
from rootlace.runtime.gateway.tokens.pieces import Piece
from rootlace.wire.errors import DeadlineExceeded, InvalidRequest
from rootlace.wire.handling import PLAIN, Handling
from rootlace.wire.protocol import Embed, Embedded, Part, SamplingParams, Text, Tokens, Usage

T = TypeVar("T")
Input = Sequence[Part]
"""The parts of one text; it quotes no branch."""

KNOWN: dict[str, Pooling] = {"last": "last", "mean": "mean"}
NOTHING = SamplingParams(max_tokens=0, temperature=0.0, seed=0)


@dataclass
class Vector:
    """`values` float32 [hidden size], or [labels]."""

    values: np.ndarray
    prompt_tokens: int
    cached_tokens: int = 0


async def find_vectors(
    core: Core,
    inputs: Sequence[Input],
    pooling: Pooling | None,
    *,
    normalise: bool = False,
    dimensions: int | None = None,
    namespace: str = "",
    adapter: str = "",
    account: Account | None = None,
    source: str = "",
    handling: Handling = PLAIN,
    names: Sequence[str] = (),
) -> list[Vector]:
    """A vector for each input. Those of one call are computed together, and with whatever else the
    engine does; a caller that is cancelled ends them, and so does the timeout of `handling`.

    An input that ends with text is tokenized as a whole text is: what the tokenizer puts before
    and behind one is there. `pooling` None: what the model was trained for. With `dimensions` the
    first so many numbers are kept; with `normalise` what is kept has the length 1. Raises the typed
    error of the first input that fails, which calls it as `names` do.
    """
    if dimensions is not None and not 0 < dimensions <= core.engine.info.hidden_size:
        size = core.engine.info.hidden_size
        raise InvalidRequest(f"dimensions must be from 1 to {size}, not {dimensions}")
    core.check_adapter(adapter)
    if account is not None:
        account.check_priority(handling.priority)
    chosen = _own_pooling(core) if pooling is None else pooling
    if not handling.cache.share:
        namespace = private(namespace)
    found = [Vector(np.empty(0, np.float32), 0) for _ in inputs]
    requests = Requests(core.engine, account, source)
    prompts = []
    for index, one in enumerate(inputs):
        try:
            prompts.append(await _prompt(core, one))
        except InvalidRequest as error:
            where = f"input[{index}]" if len(inputs) > 1 else "input"
            where = names[index] if names else where
            named = type(error)(f"{where}: {error}")
            named.param = where
            raise named from error
    for vector, prompt in zip(found, prompts, strict=True):
        vector.prompt_tokens = len(prompt)
        requests.add(
            lambda rid, prompt=prompt: Request(  # type: ignore[misc]
                rid,
                prompt,
                NOTHING,
                namespace=namespace,
                adapter=adapter,
                pooling=chosen,
                handling=handling,
            ),
            lambda update, vector=vector: _take(vector, update),  # type: ignore[misc]
        )
    try:
        async with asyncio.timeout(handling.timeout):
            await requests.finish(_plain)
    except TimeoutError:
        assert handling.timeout is not None
        raise DeadlineExceeded.after(handling.timeout) from None
    finally:
        if not handling.cache.share:
            core.engine.forget_namespace(namespace)
    for vector in found:
        vector.values = vector.values[:dimensions]
        if normalise:
            length = float(np.sqrt(np.sum(np.square(vector.values, dtype=np.float64))))
            vector.values = (vector.values / (length or 1.0)).astype(np.float32)
    return found


def _own_pooling(core: Core) -> Pooling:
    own = core.own_pooling
    if own in KNOWN:
        return KNOWN[own]
    raise InvalidRequest(f"the model's own pooling ({own}) is not supported; ask for last or mean")


def _take(vector: Vector, update: Update) -> None:
    if update.cached_tokens is not None:
        vector.cached_tokens = update.cached_tokens
    if update.vector is not None:
        vector.values = update.vector


async def _prompt(core: Core, parts: Input) -> np.ndarray:
    """int32: the tokens of an input."""
    length = sum(len(part.text) for part in parts if isinstance(part, Text))
    if length // core.tokenizer.longest_token > core.max_prompt:
        check_fits(core, length // core.tokenizer.longest_token, room=0)
    ids = await core.tokenize(length, _ids, core, parts)
    if not ids:
        raise InvalidRequest("it is empty")
    check_fits(core, len(ids), room=0)
    vocabulary = core.model_info.vocab_size
    bad = next((one for one in ids if not 0 <= one < vocabulary), None)
    if bad is not None:
        raise InvalidRequest(f"{bad} is not a token id (the vocabulary has {vocabulary})")
    return np.array(ids, np.int32)


def _ids(core: Core, parts: Input) -> list[int]:
    tokenizer = core.tokenizer
    ids: list[int] = []
    pieces: list[Piece] = []
    begins = bool(parts) and isinstance(parts[0], Text) and not parts[0].special
    for part in (*parts, Tokens(())):
        if isinstance(part, Text):
            pieces.append(Piece(part.text, part.special))
            continue
        if pieces:
            ids += tokenizer.encode_pieces(pieces, ids[-1] if ids else None, begins)
            pieces = []
        if not isinstance(part, Tokens):
            raise InvalidRequest("an input cannot quote a branch")
        ids += part.ids
    if ids and begins and isinstance(parts[-1], Text):
        ids += tokenizer.end_ids
    return ids


async def _plain(future: asyncio.Future[T]) -> T:
    return await future


async def embed(core: Core, op: Embed, account: Account | None, source: str) -> Embedded:
    """What a session answers. Raises what `find_vectors` does."""
    found = await find_vectors(
        core,
        [(one,) for one in op.inputs],
        op.pooling,
        normalise=op.normalise,
        namespace=namespace_of(account, op.namespace),
        account=account,
        source=source,
        adapter=op.adapter,
    )
    usage = Usage(
        prompt_tokens=sum(one.prompt_tokens for one in found),
        cached_tokens=sum(one.cached_tokens for one in found),
    )
    return Embedded(op.op, tuple(one.values.astype("<f4").tobytes() for one in found), usage)
