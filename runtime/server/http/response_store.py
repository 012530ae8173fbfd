"""Store of responses for later requests to go on from, bounded, optionally also on a disk."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rootlace.runtime.server.full_disk import Retry, file_to_read, open_file
from rootlace.runtime.server.http.batch_store import PageQuery
from rootlace.runtime.server.http.body import ignored, refused
from rootlace.runtime.server.http.chat_request import Begin, Block, BlockEvent, CachedPrefix, More
from rootlace.runtime.server.http.errors import NotFound
from rootlace.runtime.server.http.logprobs import ChosenToken, in_parts
from rootlace.wire.errors import InvalidRequest

# Response disk ------------------------------------------------------------------------------------
#
# Kept responses in a SQLite file, so that they outlive the server.
#
# A change is marked, and a thread commits marked changes; `flush` waits for the commit. On a full
# disk the changes stay marked: memory has the responses, and the file gets them when there is room.


VERSION = 1
_SETTINGS = """
pragma journal_mode = wal;
pragma synchronous = normal;
pragma secure_delete = on;
"""
_TABLES = f"""
create table messages (number integer primary key, message blob not null);
create table responses (
    place integer primary key, id text not null, owner text not null, salt text not null,
    response blob not null, messages blob not null
);
create unique index of_owner on responses (owner, id);
pragma user_version = {VERSION};
"""


class ResponseRow(msgspec.Struct, frozen=True):
    """Row of a kept response, oldest first. Messages have numbers, which conversations share."""

    id: str
    owner: str
    salt: str
    response: Mapping[str, Any]
    numbers: Sequence[int]


_Key = tuple[int] | tuple[str, str]
"""Number of a message, or owner and id of a response."""
_Rows = dict[_Key, tuple[Any, ...] | None]
"""Rows that the file lacks; None deletes a row."""


class ResponseDisk:
    """File of kept responses. Raises InvalidRequest where the file cannot be used.

    A full disk is no such error: it is logged once, and writing is retried later (`Retry`), with or
    without further changes.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._retry = Retry(path, "responses", clock)
        self._lock = threading.Lock()
        """Guards `_changed`, which two threads replace."""
        self._changed: _Rows = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._later: threading.Timer | None = None
        """Timer of the next attempt to write."""
        self._file = self._open()

    def _open(self) -> sqlite3.Connection | None:
        """Open the file; None where the disk is too full. Raises InvalidRequest."""
        try:
            return open_file(self._path, self._prepare, self._retry)
        except (sqlite3.Error, OSError) as error:
            raise InvalidRequest(f"{self._path} cannot keep responses: {error}") from error

    def _prepare(self, file: sqlite3.Connection) -> None:
        file.executescript(_SETTINGS)
        (version,) = file.execute("pragma user_version").fetchone()
        if version == 0:
            file.executescript(f"begin; {_TABLES} commit;")
        elif version != VERSION:
            raise InvalidRequest(f"{self._path} has version {version} of the format, not {VERSION}")

    def read(self) -> tuple[dict[int, dict[str, Any]], list[ResponseRow]]:
        """Return the messages by number, and the responses with all of their messages. Raises
        InvalidRequest."""
        try:
            with file_to_read(self._path, self._file) as file:
                messages, row = ({}, []) if file is None else _read(file)
        except (sqlite3.Error, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{self._path} cannot be read: {error}") from error
        return messages, [one for one in row if messages.keys() >= set(one.numbers)]

    def put(self, row: ResponseRow, new: dict[int, dict[str, Any]]) -> None:
        """Keep a response, and the messages that no other response has."""
        rows: _Rows = {(number,): (number, _json(message)) for number, message in new.items()}
        lists = _json(row.response), _json(list(row.numbers))
        rows[row.owner, row.id] = (row.id, row.owner, row.salt, *lists)
        self._change(rows)

    def remove(self, response_id: str, owner: str, unused: Sequence[int]) -> None:
        """Forget a response, and the messages that no other response has any more."""
        gone: _Rows = {(number,): None for number in unused}
        self._change(gone | {(owner, response_id): None})

    def _change(self, rows: _Rows) -> None:
        with self._lock:
            self._changed |= rows
        self._thread.submit(self._commit)

    async def flush(self) -> None:
        """Wait until the operating system has all changes, so that they outlive this process. On a
        full disk, return at once."""
        await asyncio.wrap_future(self._thread.submit(lambda: None))

    def close(self) -> None:
        self._retry.hurry()
        self._thread.submit(self._commit)
        self._thread.shutdown()
        if self._later is not None:
            self._later.cancel()
        if self._file is not None:
            self._file.close()

    def _commit(self) -> None:
        """Write all changes in one transaction, or none."""
        if not self._retry.due:
            return
        with self._lock:
            changed, self._changed = self._changed, {}
        if not changed:
            return
        try:
            if self._file is None:
                self._file = self._open()
            if self._file is not None:
                _write(self._file, changed)
                self._retry.succeeded()
                return
        except Exception as error:  # after any error the changes stay marked
            self._retry.failed(error)
        with self._lock:
            self._changed = changed | self._changed
        self._later = threading.Timer(self._retry.seconds, self._try_again)
        self._later.daemon = True
        self._later.start()

    def _try_again(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._thread.submit(self._commit)


def _read(file: sqlite3.Connection) -> tuple[dict[int, dict[str, Any]], list[ResponseRow]]:
    columns = "id, owner, salt, response, messages"
    rows = file.execute("select number, message from messages")
    messages = {number: msgspec.json.decode(message) for number, message in rows}
    found = file.execute(f"select {columns} from responses order by place")
    return messages, [ResponseRow(*row[:3], *map(msgspec.json.decode, row[3:])) for row in found]


_MESSAGES = "messages", "number = ?", "(?, ?)"
_RESPONSES = "responses", "owner = ? and id = ?", "(null, ?, ?, ?, ?, ?)"
"""Tables: the name, the condition for a key, and the values of a row."""


def _write(file: sqlite3.Connection, changed: _Rows) -> None:
    with file:  # commits, or rolls back
        file.execute("begin")
        for key, row in changed.items():
            table, where, columns = _MESSAGES if len(key) == 1 else _RESPONSES
            if row is None:
                file.execute(f"delete from {table} where {where}", key)
            else:
                file.execute(f"insert or replace into {table} values {columns}", row)


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


# Response items -----------------------------------------------------------------------------------


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text for the user."""

    text: str
    annotations: tuple[()] = ()
    logprobs: Sequence[ChosenToken] = ()


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Text of the model's thoughts."""

    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """Message of the model."""

    id: str
    status: str
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """Thoughts of the model."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: tuple[()] = ()


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call", omit_defaults=True):
    """Call of a function, with its arguments as JSON."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


OutputItem = OutputMessage | OutputReasoning | OutputCall

_PREFIXES = {"text": "msg", "thoughts": "rs", "call": "fc"}
_NAMES = {"text": "output_text", "thoughts": "reasoning_text", "call": "function_call_arguments"}


def qualified(namespace: str | None, name: str) -> str:
    """Return the model's name for a function of a namespace."""
    return f"{namespace}__{name}" if namespace else name


_Names = dict[str, tuple[str, str | None]]
"""(own name, namespace) of a function, by `qualified` name."""


def _names(tools: Sequence[Mapping[str, Any]]) -> _Names:
    """Return the names of functions in the namespaces among a response's tools."""
    spaces = [tool for tool in tools if tool["type"] == "namespace"]
    return {
        qualified(space["name"], one["name"]): (one["name"], space["name"])
        for space in spaces
        for one in space["tools"]
    }


def _known(names: _Names, name: str) -> tuple[str, str | None]:
    """Return the own name and the namespace of a function that the model calls `name`."""
    return names.get(name, (name, None))


class Items:
    """Writer of blocks as items. An item keeps its ids from its first event to the whole response.

    `tools`: the response's tools.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._ids: dict[int, tuple[str, str]] = {}
        self._names = _names(tools)

    def item(self, block: Block, status: str = "completed") -> OutputItem:
        """Return the item of a block; without content while it is in progress."""
        item_id, call_id = self._of(block)
        written = status != "in_progress"
        if block.kind == "call":
            arguments = block.text if written else ""
            name, namespace = _known(self._names, block.name)
            return OutputCall(item_id, status, call_id, name, arguments, namespace)
        if block.kind == "thoughts":
            return OutputReasoning(item_id, status, [ReasoningText(block.text)] if written else [])
        return OutputMessage(item_id, status, [_output_text(block)] if written else [])

    def events(self, change: BlockEvent, status: str = "completed") -> list[dict[str, Any]]:
        """Return the events of a change, without their numbers. `status` applies to an item that
        ends."""
        block = change.block
        at: dict[str, Any] = {"item_id": self._of(block)[0], "output_index": block.index}
        inside = at if block.kind == "call" else {**at, "content_index": 0}
        name = f"response.{_NAMES[block.kind]}"
        if isinstance(change, More):
            more = {"logprobs": change.logprobs} if block.kind == "text" else {}
            return [{"type": f"{name}.delta", **inside, "delta": change.text, **more}]
        if isinstance(change, Begin):
            item = self.item(block, "in_progress")
            events = [_item_event("response.output_item.added", block, item)]
            if block.kind != "call":
                part = _part(Block(block.index, block.kind))
                events.append({"type": "response.content_part.added", **inside, "part": part})
            return events
        ended = _item_event("response.output_item.done", block, self.item(block, status))
        if block.kind == "call":
            own, _ = _known(self._names, block.name)
            whole = {"arguments": block.text, "name": own}
            return [{"type": f"{name}.done", **inside, **whole}, ended]
        logprobs = {"logprobs": in_parts(block.logprobs)} if block.kind == "text" else {}
        part = _part(block)
        return [
            {"type": f"{name}.done", **inside, "text": block.text, **logprobs},
            {"type": "response.content_part.done", **inside, "part": part},
            ended,
        ]

    def call_id(self, block: Block) -> str:
        return self._of(block)[1]

    def _of(self, block: Block) -> tuple[str, str]:
        if block.index not in self._ids:
            self._ids[block.index] = (
                f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}",
                f"call_{uuid.uuid4().hex[:24]}",
            )
        return self._ids[block.index]


def _item_event(kind: str, block: Block, item: OutputItem) -> dict[str, Any]:
    return {"type": kind, "output_index": block.index, "item": item}


def _output_text(block: Block) -> OutputText:
    return OutputText(block.text, logprobs=in_parts(block.logprobs))


def _part(block: Block) -> OutputText | ReasoningText:
    return _output_text(block) if block.kind == "text" else ReasoningText(block.text)


# Response inputs ----------------------------------------------------------------------------------
#
# Conversation before a response, as a list of items, and the queries about kept responses.


PAGE = 20
_ALL = ignored("all there is is included")


class ResponseQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Options for showing a kept response."""

    stream: Annotated[bool | None, refused("a kept response is given whole")] = None
    starting_after: Annotated[int | None, refused("a kept response is given whole")] = None
    include: Annotated[str | None, _ALL] = None
    includes: Annotated[str | None, _ALL] = msgspec.field(name="include[]", default=None)
    include_obfuscation: Annotated[bool | None, ignored("nothing is obfuscated")] = None


class InputQuery(PageQuery, forbid_unknown_fields=True):
    """Page of a response's input items."""

    include: Annotated[str | None, _ALL] = None
    includes: Annotated[str | None, _ALL] = msgspec.field(name="include[]", default=None)


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text for the model."""

    text: str


class InputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """Message of any role."""

    id: str
    role: str
    content: list[InputText | OutputText]
    status: str = "completed"


class CallOutput(msgspec.Struct, tag_field="type", tag="function_call_output"):
    """Result of a function."""

    id: str
    call_id: str
    output: str
    status: str = "completed"


InputItem = InputMessage | OutputReasoning | OutputCall | CallOutput


def input_items(
    response_id: str, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[InputItem]:
    """Return the messages as items with reproducible ids. `tools`: the response's tools."""
    number, names = response_id.removeprefix("resp_"), _names(tools)
    items: list[InputItem] = []
    for message in messages:
        for item in _items(message, names):
            item.id += f"_{number}_{len(items)}"
            items.append(item)
    return items


def _items(message: dict[str, Any], names: _Names) -> Iterator[InputItem]:
    role, content = message["role"], message["content"]
    if role == "tool":
        yield CallOutput("fco", message["tool_call_id"], content)
        return
    if thoughts := message.get("reasoning_content"):
        yield OutputReasoning("rs", "completed", [ReasoningText(thoughts)])
    calls = message.get("tool_calls", ())
    if content or not calls:
        text = OutputText(content) if role == "assistant" else InputText(content)
        yield InputMessage("msg", role, [text])
    for call in calls:
        function = call["function"]
        raw = function["arguments"]
        source = raw if isinstance(raw, str) else msgspec.json.encode(raw).decode()
        name, namespace = _known(names, function["name"])
        yield OutputCall("fc", "completed", call["id"], name, source, namespace)


# Response store -----------------------------------------------------------------------------------


MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20


class Stored(msgspec.Struct, frozen=True):
    """Stored response, and the conversation up to its end.

    Messages are shared with earlier responses; `size` is in bytes without them. `salt` names the
    namespace with the conversation's KV. `held` is the kept branch; `let_go` releases it in the
    cache.
    """

    response: Mapping[str, Any]
    messages: tuple[dict[str, Any], ...]
    size: int
    salt: str = ""
    held: CachedPrefix | None = None
    let_go: Callable[[], None] = lambda: None


class ResponseStore:
    """Latest responses by id. Beyond the bounds, the key with most responses loses its least
    recently used one. So no key displaces responses of a key with fewer."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._of: dict[str, _Responses] = {}
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._disk: ResponseDisk | None = None
        self._numbers = count(1)

    def open(self, disk: ResponseDisk) -> None:
        """Take responses of an earlier server from the disk, and keep new ones there."""
        messages, responses = disk.read()
        self._numbers = count(max(messages, default=0) + 1)
        for row in responses:
            conversation = [(number, messages[number]) for number in row.numbers]
            self._add(row.response, conversation, row.owner, row.salt)
        self._disk = disk
        self._shorten_all()

    async def flush(self) -> None:
        """Wait until the disk, if there is one, has all responses."""
        if self._disk is not None:
            await self._disk.flush()

    def __len__(self) -> int:
        return sum(len(one.stored) for one in self._of.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all responses."""
        return sum(one.nbytes for one in self._of.values())

    def put(
        self,
        response: Mapping[str, Any],
        before: tuple[dict[str, Any], ...],
        new: list[dict[str, Any]],
        owner: str = "",
        salt: str = "",
        held: CachedPrefix | None = None,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Store a response to the messages `before` and `new`, the last of which is its answer.

        Only its `owner` finds the response, and only requests with the same `salt` go on from it.
        """
        responses = self._of.setdefault(owner, _Responses())
        numbers = [(responses.number(message), message) for message in (*before, *new)]
        fresh = {id(message): next(self._numbers) for number, message in numbers if not number}
        messages = [(number or fresh[id(message)], message) for number, message in numbers]
        self._add(response, messages, owner, salt, held, let_go)
        if self._disk is not None:
            unknown = set(fresh.values())
            row = ResponseRow(
                response["id"], owner, salt, response, [number for number, _ in messages]
            )
            self._disk.put(row, {n: message for n, message in messages if n in unknown})
        self._shorten_all()

    def _add(
        self,
        response: Mapping[str, Any],
        messages: list[tuple[int, dict[str, Any]]],
        owner: str,
        salt: str,
        held: CachedPrefix | None = None,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        # A tuple of references beside the response takes eight bytes a message.
        size = len(msgspec.json.encode(response)) + 8 * len(messages)
        size += 0 if held is None else held.size
        conversation = tuple(message for _, message in messages)
        new = Stored(response, conversation, size, salt, held, let_go)
        self._of.setdefault(owner, _Responses()).add(response["id"], new, messages)

    def get(
        self, response_id: str, param: str | None = None, owner: str = "", salt: str | None = None
    ) -> Stored:
        """Return a response. Raises NotFound, about the field `param`, for one that is not kept.
        `salt`: the salt it was made with; None takes any."""
        responses = self._of.get(owner)
        stored = responses.stored.get(response_id) if responses else None
        if responses is None or stored is None or salt not in (None, stored.salt):
            raise NotFound(f"the response {response_id!r} is not kept here (any more)", param)
        responses.stored.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, owner: str = "") -> None:
        """Delete a response. Raises NotFound for one that is not kept."""
        self.get(response_id, owner=owner)
        self._forget(owner, response_id)

    def _shorten_all(self) -> None:
        while len(self) > self._max_responses:
            self._shorten(max(self._of, key=lambda name: len(self._of[name].stored)))
        while self.nbytes > self._max_bytes:
            self._shorten(max(self._of, key=lambda name: self._of[name].nbytes))

    def _shorten(self, owner: str) -> None:
        self._forget(owner, next(iter(self._of[owner].stored)))

    def _forget(self, owner: str, response_id: str) -> None:
        responses = self._of[owner]
        unused = responses.remove(response_id)
        if self._disk is not None:
            self._disk.remove(response_id, owner, unused)
        if not responses.stored:
            del self._of[owner]


@dataclass
class _Message:
    """Count of responses with a message, the message's bytes, and its number on the disk."""

    responses: int
    size: int
    number: int


class _Responses:
    """Responses of one key, least recently used first, and their bytes."""

    def __init__(self) -> None:
        self.stored: OrderedDict[str, Stored] = OrderedDict()
        # A message is counted once, for as long as a response has it: a conversation may outlive
        # its first responses.
        self._shared: dict[int, _Message] = {}
        self.nbytes = 0

    def number(self, message: dict[str, Any]) -> int:
        """Return a message's number; 0 for one that no response has."""
        number = self._shared.get(id(message))
        return 0 if number is None else number.number

    def add(
        self, response_id: str, new: Stored, messages: list[tuple[int, dict[str, Any]]]
    ) -> None:
        self.stored[response_id] = new
        self.nbytes += new.size
        for number, message in messages:
            shared = self._shared.get(id(message))
            if shared is None:
                size = len(msgspec.json.encode(message))
                shared = self._shared[id(message)] = _Message(0, size, number)
                self.nbytes += size
            shared.responses += 1

    def remove(self, response_id: str) -> list[int]:
        """Remove a response; return the numbers of messages that no other response has."""
        stored = self.stored.pop(response_id)
        stored.let_go()
        self.nbytes -= stored.size
        unused = []
        for message in stored.messages:
            shared = self._shared[id(message)]
            shared.responses -= 1
            if not shared.responses:
                del self._shared[id(message)]
                self.nbytes -= shared.size
                unused.append(shared.number)
        return unused
