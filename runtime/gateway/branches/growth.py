"""How a branch grows without sampling: appended parts, settled tokens, prefill."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import numpy as np

from rootlace.runtime.contracts.request import Request
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.gateway.branches.branch import Branch, BranchState
from rootlace.runtime.gateway.branches.core import Core
from rootlace.runtime.gateway.branches.requests import Requests
from rootlace.runtime.gateway.tokens.pieces import Piece
from rootlace.wire.errors import ContextLengthExceeded, InvalidRequest, RootlaceError
from rootlace.wire.protocol import (
    Append,
    Done,
    Event,
    Explain,
    Explained,
    Image,
    Prefill,
    Quote,
    SamplingParams,
    Text,
    Usage,
)

# Short texts are joined to pieces of up to this many characters: the cost of an append grows with
# the number of pieces, and a program may append word by word.
_JOINED_CHARACTERS = 4096


async def append(
    core: Core, branch: Branch, op: Append, quotes: list[asyncio.Future[Any]]
) -> Event:
    """Add text (it stays pending), ids, or what quoted branches gained.

    Raises InvalidRequest for ids outside the vocabulary, text that is not Unicode or a quote of an
    unknown branch, ContextLengthExceeded for what can never fit.
    """
    state = branch.state
    waiting = iter(quotes)
    for part in op.parts:
        if isinstance(part, Text):
            _check_unicode(part.text)
            _add_piece(state, Piece(part.text, part.special))
        elif isinstance(part, Quote):
            gained = await branch.wait(next(waiting))
            if isinstance(gained, RootlaceError):
                raise type(gained)(f"quoted branch {part.branch}: {gained}")
            for piece in gained:
                _add_piece(state, piece)
        elif isinstance(part, Image):
            raise InvalidRequest(f"{core.model_info.name} reads text only: it takes no images")
        else:
            await _add_ids(core, branch, part.ids)
    _check_size(core, state)
    return Done(op.op)


async def settle(core: Core, branch: Branch, everything: bool = False) -> None:
    """Tokenize pending text: what later text cannot change, or `everything` (for `Generate`)."""
    state = branch.state
    if not state.pending and not (everything and not state.ids and state.begins):
        return
    tokenizer = core.tokenizer
    length = state.pending_length()
    if everything:
        ids = await core.tokenize(
            length, tokenizer.encode_pieces, state.pending, state.previous, state.begins
        )
        rest: tuple[Piece, ...] = ()
    else:
        ids, rest = await core.tokenize(
            length, tokenizer.settle, state.pending, state.previous, state.begins
        )
    state.ids.extend(ids)
    state.pending = rest


async def prefill(core: Core, branch: Branch, op: Prefill) -> Event:
    """Compute the KV of the settled tokens."""
    await settle(core, branch)
    ids = branch.state.ids
    if not ids:
        return Done(op.op, Usage())
    check_fits(core, len(ids), room=0)
    cached = 0

    def note(update: Update) -> None:
        nonlocal cached
        cached = update.cached_tokens if update.cached_tokens is not None else cached

    requests = Requests(core.engine, branch.account, branch.source, branch.paid)
    params = SamplingParams(max_tokens=0, temperature=0.0, seed=0)
    requests.add(
        lambda rid: Request(
            rid,
            branch.state.prompt(),
            params,
            namespace=branch.namespace,
            adapter=branch.adapter,
            program=branch.program,
            handling=op.handling,
        ),
        note,
    )
    branch.paid = len(ids)
    await requests.finish(branch.wait)
    return Done(op.op, Usage(prompt_tokens=len(ids), cached_tokens=cached))


async def explain(core: Core, branch: Branch, op: Explain) -> Event:
    """How far the branch is cached, pending text included; the branch stays as it is."""
    state = branch.state
    pending = await core.tokenize(
        state.pending_length(),
        core.tokenizer.encode_pieces,
        state.pending,
        state.previous,
        state.begins,
    )
    prompt = np.concatenate((state.prompt(), np.array(pending, np.int32)))
    if not len(prompt):
        raise InvalidRequest("the branch is empty: there is nothing to explain")
    return Explained(op.op, await core.explain(prompt, branch.namespace, branch.adapter))


def gained_text(core: Core, state: BranchState) -> tuple[Piece, ...]:
    """What the branch gained since it was opened, as text."""
    pieces = []
    for gained in state.gained:
        if isinstance(gained, Piece):
            pieces.append(gained)
        elif text := core.tokenizer.decode(gained):
            pieces.append(Piece(text))
    return tuple(pieces)


def check_fits(core: Core, prompt: int, room: int, known: str = "") -> None:
    """Raises ContextLengthExceeded unless `room` tokens fit behind a prompt; `known` says how well
    the prompt's length is known."""
    limit = core.max_prompt
    if prompt + room <= limit:
        return
    window = core.model_info.context_length
    # Clients recognise the case by these words, which are OpenAI's.
    what = f"this model's maximum context length is {window} tokens"
    if limit < window:
        what += f", of which the KV cache holds {limit}"
    verb = "does not fit" if prompt > limit else "leaves no room for another token"
    raise ContextLengthExceeded(f"the prompt of {known}{prompt} tokens {verb}: {what}")


def _add_piece(state: BranchState, piece: Piece) -> None:
    if state.begin is None and not (piece.special and not piece.text):
        state.begin = not piece.special
    if not piece.text:
        return
    state.gained.append(piece)
    *before, last = state.pending or (Piece("", piece.special),)
    if last.special == piece.special and len(last.text) + len(piece.text) <= _JOINED_CHARACTERS:
        state.pending = (*before, Piece(last.text + piece.text, piece.special))
    else:
        state.pending += (piece,)


async def _add_ids(core: Core, branch: Branch, ids: tuple[int, ...]) -> None:
    vocabulary = core.model_info.vocab_size
    try:
        added = array("i", ids)
    except OverflowError:
        added = None
    # Negative ids are large ones without a sign.
    if added is None or (added and np.frombuffer(added, np.uint32).max() >= vocabulary):
        bad = next(token_id for token_id in ids if not 0 <= token_id < vocabulary)
        raise InvalidRequest(f"{bad} is not a token id (the vocabulary has {vocabulary})")
    state = branch.state
    if state.begin is None:
        state.begin = False
    await settle(core, branch, everything=bool(state.pending))
    state.ids.extend(added)
    state.gained.append(added)


def _check_unicode(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode: {error}") from error


def _check_size(core: Core, state: BranchState) -> None:
    """Refuse text that can never fit, before tokenizing it costs memory and time."""
    at_least = len(state.ids) + state.pending_length() // core.tokenizer.longest_token
    check_fits(core, at_least, room=0, known="at least ")
