"""Token sequences: how a prompt grows, for a branch of a program and for an HTTP request alike.

 append    text stays pending, for later text may change its tokens; ids are tokens at once
 settle    pending text becomes tokens
 prefill   the tokens' KV is computed

Sections: sequence, requests, open sequences, growth.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest
from rootlace.runtime.contracts.messages import Explain as ExplainPrompt
from rootlace.runtime.server.auth import Account, Asker, private
from rootlace.runtime.server.cache_lint import with_texts
from rootlace.runtime.server.served_model import ServedModel
from rootlace.runtime.server.server_state import Turn, kept_for_others, nothing
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.errors import (
    Cancelled,
    ContextLengthExceeded,
    InvalidRequest,
    Overloaded,
    RootlaceError,
    from_code,
)
from rootlace.wire.protocol import (
    Append,
    CacheReport,
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
from rootlace.wire.sampling import Handling

if TYPE_CHECKING:
    from rootlace.runtime.server.served_model import Engine

T = TypeVar("T")

NO_OUTPUT = SamplingParams(max_tokens=0, temperature=0.0, seed=0)

# Sequence -----------------------------------------------------------------------------------------


@dataclass
class SequenceState:
    """Contents of a sequence; a fork is a copy.

    `ids` are int32, four bytes a token, copied by a fork (a memcpy: 16 KiB for 4,096 tokens).
    `pending` is text whose tokens may still change; forks share its strings. `begin`: whether the
    sequence starts as the tokenizer's post-processor has it (None: not decided yet). `gained` holds
    additions since the branch was opened, as text or ids. Ids become text only if another branch
    quotes them (`gained_text`).
    """

    ids: array[int] = field(default_factory=partial(array, "i"))
    pending: tuple[Piece, ...] = ()
    begin: bool | None = None
    gained: list[Piece | array[int]] = field(default_factory=list)

    @property
    def before(self) -> tuple[int | None, bool]:
        """Return where tokenizing goes on: the last token (or None), and `begin` for a sequence
        without tokens."""
        return self.ids[-1] if self.ids else None, self.begin is not False

    def pending_length(self) -> int:
        length = 0
        for piece in self.pending:
            length += len(piece.text)
        return length

    def fork(self) -> SequenceState:
        return SequenceState(self.ids[:], self.pending, self.begin)


@dataclass(eq=False)
class TokenSequence:
    """Growing sequence of tokens, with its namespace, program, adapter and caller.

    `private`: the namespace belongs to this sequence and its forks alone.
    """

    namespace: str
    program: str
    adapter: str
    asker: Asker
    private: bool
    paid: int = 0
    """Tokens already charged by prefills, not to be charged again."""
    closed: bool = False
    stop: Callable[[], None] | None = None
    """Ends a running generation, which then returns the tokens so far."""
    state: SequenceState = field(default_factory=SequenceState)

    def wait(self, future: asyncio.Future[T]) -> Awaitable[T]:
        """Wait for a future of the running operation; a branch overrides how."""
        return future

    def request(
        self, ids: np.ndarray, params: SamplingParams, handling: Handling, **more: Any
    ) -> EngineRequest:
        """Make a request of this sequence for `ids` (int32); `more` are further fields."""
        return EngineRequest(
            0,
            ids,
            params,
            namespace=self.namespace,
            adapter=self.adapter,
            program=self.program,
            handling=handling,
            **more,
        )

    def check_handling(self, handling: Handling) -> None:
        """Raise InvalidRequest for a pin of a private sequence, or a priority beyond the key's."""
        if self.private and handling.cache.pin:
            raise InvalidRequest("what is not shared ends with its branch: it has no pin")
        if self.asker.account is not None:
            self.asker.account.check_priority(handling.priority)


# Requests -----------------------------------------------------------------------------------------


_MORE = -1
"""Stands in `_running` for requests still to be added."""


class Requests:
    """Engine requests of one operation: submits them, passes on updates, waits for all.

    If one fails, all end. Tokens are charged to the account of `asker`, also those of failed
    requests. Tokens behind an answer's end and of wrong predictions are free. `paid` tokens of the
    first prompt were charged before.
    """

    def __init__(self, engine: Engine, asker: Asker, paid: int = 0) -> None:
        self._engine = engine
        self._account = asker.account
        self._asker = asker
        self._paid = paid
        self._running: dict[int, Callable[[EngineOutput], int | None]] = {}
        self._stopped = False
        self._all_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, request: EngineRequest, on_update: Callable[[EngineOutput], int | None]) -> None:
        """Submit a request under a new number. To end the request early, `on_update` returns how
        many tokens of the update are unwanted. Raises ClientSuspended."""
        rid = self._engine.next_rid()
        self._running[rid] = on_update
        account = self._account
        limit = None if account is None else account.entry.max_pins
        request = msgspec.structs.replace(
            request, rid=rid, client=self._asker.client, origin=self._asker.origin, max_pins=limit
        )
        try:
            self._engine.submit(request, self._pass_on)
        except BaseException:
            self._running.pop(rid, None)
            self._abort()  # nobody will wait for the requests added before
            raise
        if self._account is not None:
            self._account.used("prompt", len(request.token_ids) - self._paid)
            self._paid = 0

    async def add_all(
        self,
        requests: Iterable[tuple[EngineRequest, Callable[[EngineOutput], int | None]]],
        wait: Callable[[asyncio.Future[None]], Awaitable[None]],
    ) -> None:
        """Add each request, giving others turns in between by `wait`. If adding raises, all are
        aborted; if one fails meanwhile, no more are added, and `finish` raises."""
        self._running[_MORE] = nothing
        try:
            turn = Turn()
            for request, on_update in requests:
                if self._all_ended.done():
                    break
                self.add(request, on_update)
                if turn.over:
                    await wait(turn.next())
        except BaseException:
            self._abort()
            raise
        self._running.pop(_MORE, None)

    async def finish(
        self, wait: Callable[[asyncio.Future[None]], Awaitable[None]] | None = None
    ) -> None:
        """Wait by `wait` until every request has ended. Raises the error of the first that failed.

        If the wait ends early (a failure, the branch interrupted), the rest is aborted.
        """
        try:
            if self._running:
                await (self._all_ended if wait is None else wait(self._all_ended))
        finally:
            if self._running:
                self._abort()

    def stop(self) -> None:
        """End all requests; each gets a last update with its tokens so far."""
        self._stopped = True
        self._engine.abort(self._running.keys() - {_MORE})

    def _abort(self) -> None:
        running, self._running = self._running.keys() - {_MORE}, {}
        if running:
            self._engine.abort(running)

    def _pass_on(self, update: EngineOutput) -> None:
        if (on_update := self._running.get(update.rid)) is None:
            return
        unwanted: int | None = None
        try:
            if update.finish == "error":
                raise from_code(update.code, update.error)
            if update.finish == "abort" and not self._stopped:
                raise Cancelled("the engine ended the request")
            unwanted = on_update(update)
        except Exception as error:
            self._fail(error)
            return
        finally:
            if self._account is not None and update.token_ids:
                self._account.used("completion", len(update.token_ids) - (unwanted or 0))
        if update.finish is None and unwanted is None:
            return
        self._running.pop(update.rid, None)
        if update.finish is None:
            self._engine.abort((update.rid,))
        if not self._running and not self._all_ended.done():
            self._all_ended.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self._all_ended.done():
            self._all_ended.set_exception(error)


# Open sequences -----------------------------------------------------------------------------------


class OpenSequences:
    """Open sequences of one program or HTTP request: counted, and released together.

    `end` tells the owner that the model is unloaded.
    """

    def __init__(
        self,
        model: ServedModel,
        end: Callable[[RootlaceError], None],
        asker: Asker,
        stays_wanted: bool = False,
    ) -> None:
        """An `asker` without a connection gets a number as its connection. With `stays_wanted`,
        cached blocks of its ended programs count as blocks of no program."""
        self.number = next(model.numbers)
        if "#" not in asker.source:
            client = f"{asker.source}#{self.number}" if asker.source else f"session {self.number}"
            asker = Asker.of(asker.account, client)
        self.asker = asker
        self.end = end
        self.open: set[TokenSequence] = set()
        self._model = model
        self._stays_wanted = stays_wanted
        self._programs: Counter[str] = Counter()
        self._private: Counter[str] = Counter()
        model.owners.add(self)

    def begin(
        self, namespace: str = "", adapter: str = "", share: bool = True, program: str = ""
    ) -> TokenSequence:
        """Open an empty sequence. Raises Overloaded, and InvalidRequest for an unknown adapter."""
        model = self._model
        self.check_share()
        if model.branch_count >= (max_branches := model.config.max_branches):
            raise Overloaded(f"{max_branches} branches are open; the server allows no more")
        if adapter:
            model.check_adapter(adapter)
        sequence = TokenSequence(
            self.namespace(namespace, share),
            self.program(program) if program else "",
            adapter,
            self.asker,
            private=not share,
        )
        self.add(sequence)
        return sequence

    def check_share(self) -> None:
        """Raise Overloaded if this client would take some of the last eighth of all branches. That
        eighth is for clients with fewer branches than the mean."""
        model = self._model
        count, max_branches = model.branch_count, model.config.max_branches
        if not model.plenty_branches <= count < max_branches:
            return
        client_branches, clients = model.branches_of[self.asker.client], len(model.branches_of)
        if kept_for_others(client_branches, clients, count, max_branches):
            raise Overloaded(
                f"{client_branches} branches of this client are open: the last ones are for others"
            )

    def program(self, name: str) -> str:
        """Return the engine's name for the client's program `name`; "" for "". `program_name`
        inverts."""
        return f"{self.number}:{name}" if name else ""

    def namespace(self, name: str, share: bool) -> str:
        """Return the tree's namespace for the client's `name`; a new private one unless `share`."""
        account = self.asker.account
        namespace = name if account is None else account.namespace(name)
        return namespace if share else private(namespace)

    def add(self, sequence: TokenSequence) -> None:
        """Count a sequence as open."""
        self.open.add(sequence)
        self._model.branch_count += 1
        self._model.branches_of[self.asker.client] += 1
        if sequence.program:
            self._programs[sequence.program] += 1
        if sequence.private:
            self._private[sequence.namespace] += 1

    def release(self, sequence: TokenSequence) -> None:
        """Release a sequence; with the last of a program or private namespace, release that too."""
        if sequence not in self.open:
            return
        model, client = self._model, self.asker.client
        self.open.discard(sequence)
        model.branch_count -= 1
        model.branches_of[client] -= 1
        if not model.branches_of[client]:
            del model.branches_of[client]
        sequence.state = SequenceState()
        sequence.closed = True
        if sequence.program:
            self._programs[sequence.program] -= 1
            if not self._programs[sequence.program]:
                del self._programs[sequence.program]
                model.engine.release_program(sequence.program, self._stays_wanted)
        if sequence.private:
            self._private[sequence.namespace] -= 1
            if not self._private[sequence.namespace]:
                del self._private[sequence.namespace]
                model.engine.forget_namespace(sequence.namespace)

    def close(self) -> None:
        """Release all sequences."""
        for sequence in list(self.open):
            self.release(sequence)
        self._model.owners.discard(self)
        self.end = nothing  # the owner may have this


def program_name(program: str) -> str:
    """Return the client's name of a program from the engine's name."""
    return program.partition(":")[2]


def report_for(account: Account | None, report: CacheReport) -> CacheReport:
    """Return a report as an account may see it, without the number in a program's name: the number
    counts programs of all keys."""
    if account is None:
        return report
    return msgspec.structs.replace(report, lost_to=program_name(report.lost_to))


# Growth -------------------------------------------------------------------------------------------
#
# How a sequence grows without sampling: appended parts, settled tokens, prefill.


# Short texts are joined to pieces of up to this many characters: the cost of an append grows with
# the number of pieces, and a program may append word by word.
_JOINED_CHARACTERS = 4096


async def append(
    model: ServedModel,
    sequence: TokenSequence,
    op: Append,
    quotes: Sequence[asyncio.Future[Any]] = (),
) -> Event:
    """Add text (as pending text), ids, or the gained text of quoted branches.

    Raises InvalidRequest for ids outside the vocabulary, text that is not Unicode or a quote of an
    unknown branch. Raises ContextLengthExceeded for a sequence that can never fit.
    """
    state = sequence.state
    waiting = iter(quotes)
    for part in op.parts:
        if isinstance(part, Text):
            if not part.text.isascii():
                _check_unicode(part.text)
            _add_piece(state, Piece(part.text, part.special))
        elif isinstance(part, Quote):
            gained = await sequence.wait(next(waiting))
            if isinstance(gained, RootlaceError):
                raise type(gained)(f"quoted branch {part.branch}: {gained}")
            for piece in gained:
                _add_piece(state, piece)
        elif isinstance(part, Image):
            raise InvalidRequest(f"{model.model_info.name} reads text only: it takes no images")
        else:
            await _add_ids(model, sequence, part.ids)
    # Text that can never fit is refused before tokenizing it costs memory and time.
    await check_text_fits(model, len(state.ids), state.pending_length(), known="at least ")
    return Done(op.op)


async def settle(model: ServedModel, sequence: TokenSequence, everything: bool = False) -> None:
    """Tokenize the stable part of pending text, or `everything` (for `Generate`)."""
    state = sequence.state
    previous, begins = state.before
    if not state.pending and not (everything and previous is None and begins):
        return
    tokenizer = model.tokenizer
    length = state.pending_length()
    if everything:
        ids = await model.tokenize(length, tokenizer.encode_pieces, state.pending, previous, begins)
        rest: tuple[Piece, ...] = ()
    else:
        ids, rest = await model.tokenize(length, tokenizer.settle, state.pending, previous, begins)
    state.ids.extend(ids)
    state.pending = rest


async def prefill(model: ServedModel, sequence: TokenSequence, op: Prefill) -> Event:
    """Compute the KV of the settled tokens."""
    await settle(model, sequence)
    ids = sequence.state.ids
    if not ids:
        return Done(op.op, Usage())
    check_fits(model, len(ids), outputs=0)
    cached = 0

    def note(update: EngineOutput) -> None:
        nonlocal cached
        cached = cached if update.facts is None else update.facts.cached_tokens

    requests = Requests(model.engine, sequence.asker, sequence.paid)
    requests.add(sequence.request(np.array(ids, np.int32), NO_OUTPUT, op.handling), note)
    sequence.paid = len(ids)
    await requests.finish(sequence.wait)
    return Done(op.op, Usage(prompt_tokens=len(ids), cached_tokens=cached))


async def explain(model: ServedModel, sequence: TokenSequence, op: Explain) -> Explained:
    """Report how far the branch is cached, pending text included, without changing the branch."""
    state = sequence.state
    pending = await model.tokenize(
        state.pending_length(), model.tokenizer.encode_pieces, state.pending, *state.before
    )
    prompt = np.array([*state.ids, *pending], np.int32)
    if not len(prompt):
        raise InvalidRequest("the prompt is empty: there is nothing to explain", "prompt")
    report = await model.engine.ask(
        ExplainPrompt, prompt, sequence.namespace, sequence.adapter, model.report_scope()
    )
    report = with_texts(report, prompt, model.tokenizer)
    return Explained(op.op, report_for(sequence.asker.account, report))


def gained_text(model: ServedModel, state: SequenceState) -> tuple[Piece, ...]:
    """Return the branch's additions since it was opened, as text."""
    pieces = []
    for gained in state.gained:
        if isinstance(gained, Piece):
            pieces.append(gained)
        elif text := model.tokenizer.decode(gained):
            pieces.append(Piece(text))
    return tuple(pieces)


def check_fits(model: ServedModel, prompt: int, outputs: int, known: str = "") -> None:
    """Raise ContextLengthExceeded unless `outputs` tokens fit behind a prompt of `prompt` tokens.

    The message puts `known` before the prompt's length."""
    limit = model.max_prompt
    if prompt + outputs <= limit:
        return
    window = model.model_info.context_length
    # Clients recognise the case by these words, which are OpenAI's.
    what = f"this model's maximum context length is {window} tokens"
    if limit < window:
        what += f", of which the KV cache holds {limit}"
    verb = "does not fit" if prompt > limit else "leaves no room for another token"
    raise ContextLengthExceeded(f"the prompt of {known}{prompt} tokens {verb}: {what}")


async def check_text_fits(
    model: ServedModel, tokens: int, characters: int, known: str = ""
) -> None:
    """Call `check_fits` with the fewest tokens that `tokens` and `characters` of text can make."""
    if tokens + characters > model.max_prompt:
        longest = await asyncio.to_thread(getattr, model.tokenizer, "longest_token")
        fewest = tokens + characters // longest
        check_fits(model, fewest, outputs=0, known=known)


def _add_piece(state: SequenceState, piece: Piece) -> None:
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


async def _add_ids(model: ServedModel, sequence: TokenSequence, ids: tuple[int, ...]) -> None:
    vocabulary = model.model_info.vocab_size
    try:
        added = array("i", ids)
    except OverflowError:
        added = None
    # As unsigned numbers, negative ids exceed every vocabulary.
    if added is None or (added and np.frombuffer(added, np.uint32).max() >= vocabulary):
        bad = next(token_id for token_id in ids if not 0 <= token_id < vocabulary)
        raise InvalidRequest(f"{bad} is not a token id (the vocabulary has {vocabulary})")
    state = sequence.state
    if state.begin is None:
        state.begin = False
    await settle(model, sequence, everything=bool(state.pending))
    state.ids.extend(added)
    state.gained.append(added)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text is not valid Unicode: {error}") from error
