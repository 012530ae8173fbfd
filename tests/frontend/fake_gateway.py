"""A gateway without a model: it speaks the protocol over a real socket and writes what it is told.

One thread, one ROUTER socket. The order of operations, broken branches, quotes and closing follow
docs/architecture.md; the text of a `Generate` comes from `script(text, op)`, which may raise a
`RootlaceError` to fail the operation. `hold()` stops all generation until `release()`, so that
tests can look at a program in the middle without any timing.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from rootlace.wire import protocol
from rootlace.wire.errors import InvalidRequest, RootlaceError, Unauthorized

Script = Callable[[str, protocol.Generate], Any]
Chooser = Callable[[str, protocol.Select], int]

CHAT = protocol.ChatFormat(
    opening="<s>",
    roles={
        role: protocol.RoleFormat(begin=f"<|{role}|>", end="<|end|>")
        for role in ("system", "user", "assistant")
    },
)


def default_script(text: str, op: protocol.Generate) -> str:
    """A word that depends on everything before it."""
    return f" w{zlib.crc32(text.encode()) % 10_000}"


def default_chooser(text: str, op: protocol.Select) -> int:
    return zlib.crc32(text.encode()) % len(op.choices)


class FakeBranch:
    def __init__(self, parent: FakeBranch | None) -> None:
        self.parent = parent
        self.started = parent is None
        self.text = ""
        self.start = 0
        self.queue: deque[protocol.Op] = deque()
        self.received = 0
        self.finished = 0
        self.broken = ""
        self.parts: list[protocol.Part] = []


class Peer:
    def __init__(self) -> None:
        self.branches: dict[int, FakeBranch] = {}
        self.waits: dict[int, list[tuple[FakeBranch, int]]] = {}


class FakeGateway:
    def __init__(
        self,
        folder: Path,
        script: Script = default_script,
        chooser: Chooser = default_chooser,
        chat: protocol.ChatFormat = CHAT,
        api_key: str = "",
    ) -> None:
        self.script = script
        self.chooser = chooser
        self.api_key = api_key
        self.address = f"ipc://{folder / 'fake.sock'}"
        self.model = protocol.ModelInfo(
            name="fake",
            path="/nowhere/fake",
            context_length=4096,
            vocab_size=1000,
            capacity_tokens=65536,
            block_size=16,
            chat=chat,
        )
        self.ops: list[protocol.Op] = []
        self.frames = 0
        self.flushes = 0
        self.silent = False
        self.peers: dict[bytes, Peer] = {}
        self._held = False
        self._commands: deque[Callable[[], object]] = deque()
        self._stopping = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(self.address)
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for tests

    @property
    def open_branches(self) -> int:
        return sum(len(peer.branches) for peer in list(self.peers.values()))

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        def go() -> None:
            self._held = False
            for identity in list(self.peers):
                self._advance(identity)

        self._commands.append(go)

    def sent(self, kind: type) -> list[Any]:
        """The operations of one type that came so far."""
        return [op for op in list(self.ops) if isinstance(op, kind)]

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(timeout=120)

    # ------------------------------------------------------------ the loop

    def _loop(self) -> None:
        try:
            while not self._stopping:
                if self._socket.poll(5):
                    identity, frame = self._socket.recv_multipart()
                    self.frames += 1
                    self._receive(identity, protocol.decode_ops(frame))
                while self._commands:
                    self._commands.popleft()()
        finally:
            self._socket.close()
            self._context.term()

    def _reply(self, identity: bytes, *events: protocol.Event) -> None:
        if not self.silent:
            self._socket.send_multipart([identity, protocol.encode(list(events))])

    def _receive(self, identity: bytes, ops: list[protocol.Op]) -> None:
        for op in ops:
            self.ops.append(op)
            if isinstance(op, protocol.Hello):
                self._hello(identity, op)
            elif identity not in self.peers:
                self._fail(identity, 0, InvalidRequest("who are you?"))
            else:
                self._take(identity, self.peers[identity], op)
        self._advance(identity)

    def _hello(self, identity: bytes, op: protocol.Hello) -> None:
        if op.api_key != self.api_key:
            self._fail(identity, 0, Unauthorized("the API key is wrong"))
            return
        self.peers[identity] = Peer()
        self._reply(identity, protocol.Welcome(0, protocol.PROTOCOL_VERSION, self.model))

    def _fail(self, identity: bytes, op: int, error: RootlaceError) -> None:
        self._reply(identity, protocol.Failed(op, error.code, str(error)))

    def _take(self, identity: bytes, peer: Peer, op: protocol.Op) -> None:
        if isinstance(op, protocol.Ping):
            self._reply(identity, protocol.Done(op.op))
        elif isinstance(op, protocol.Goodbye):
            del self.peers[identity]
        elif isinstance(op, protocol.FlushCache):
            self.flushes += 1
            self._reply(identity, protocol.Done(op.op))
        elif isinstance(op, protocol.GetStatus):
            self._reply(identity, protocol.Status(op.op, {"branches": self.open_branches}))
        elif isinstance(op, protocol.Open):
            parent = None
            if op.parent is not None:
                parent = peer.branches.get(op.parent)
                if parent is None:
                    self._fail(identity, op.op, InvalidRequest(f"unknown branch {op.parent}"))
                    return
            peer.branches[op.branch] = FakeBranch(parent)
            self._enqueue(parent or peer.branches[op.branch], op)
        elif isinstance(op, protocol.Cancel):
            self._cancel(identity, peer, op)
        else:
            branch = peer.branches.get(op.branch)
            if branch is None:
                self._fail(identity, op.op, InvalidRequest(f"unknown branch {op.branch}"))
                return
            if isinstance(op, protocol.Append):
                quoted = [p.branch for p in op.parts if isinstance(p, protocol.Quote)]
                sources = [peer.branches[b] for b in quoted]
                peer.waits[op.op] = [(source, source.received) for source in sources]
            self._enqueue(branch, op)

    def _enqueue(self, branch: FakeBranch, op: protocol.Op) -> None:
        branch.queue.append(op)
        branch.received += 1

    def _cancel(self, identity: bytes, peer: Peer, op: protocol.Cancel) -> None:
        branch = peer.branches.get(op.branch)
        if branch is None:
            self._fail(identity, op.op, InvalidRequest(f"unknown branch {op.branch}"))
            return
        branch.broken = branch.broken or "cancelled by the client"
        branch.started = True
        self._reply(identity, protocol.Done(op.op))

    def _advance(self, identity: bytes) -> None:
        """Run everything that can run."""
        peer = self.peers.get(identity)
        moved = peer is not None
        while moved and peer is not None:
            moved = False
            for number, branch in list(peer.branches.items()):
                while branch.started and branch.queue:
                    if not self._run(identity, peer, number, branch, branch.queue[0]):
                        break
                    branch.queue.popleft()
                    branch.finished += 1
                    moved = True

    def _run(
        self, identity: bytes, peer: Peer, number: int, branch: FakeBranch, op: protocol.Op
    ) -> bool:
        """One operation; False if it cannot run yet."""
        if isinstance(op, protocol.Close):
            peer.branches.pop(number, None)
            self._reply(identity, protocol.Done(op.op))
            return True
        try:
            if branch.broken:
                if isinstance(op, protocol.Open) and op.branch in peer.branches:
                    child = peer.branches[op.branch]
                    child.started, child.broken = True, branch.broken
                self._reply(identity, protocol.Failed(op.op, "cancelled", branch.broken))
                return True
            events = self._perform(peer, branch, op)
        except RootlaceError as error:
            branch.broken = str(error)
            self._fail(identity, op.op, error)
            return True
        if events is None:
            return False
        self._reply(identity, *events)
        return True

    def _perform(
        self, peer: Peer, branch: FakeBranch, op: protocol.Op
    ) -> list[protocol.Event] | None:
        if isinstance(op, protocol.Open):
            child = peer.branches.get(op.branch)
            if child is not None and child.parent is not None:
                child.text, child.start, child.started = branch.text, len(branch.text), True
            return [protocol.Done(op.op)]
        if isinstance(op, protocol.Append):
            if any(source.finished < count for source, count in peer.waits[op.op]):
                return None
            quoted = iter(peer.waits.pop(op.op))
            for part in op.parts:
                branch.parts.append(part)
                if isinstance(part, protocol.Text):
                    branch.text += part.text
                elif isinstance(part, protocol.Tokens):
                    branch.text += "".join(f"[{token}]" for token in part.ids)
                else:
                    source = next(quoted)[0]
                    if source.broken:
                        raise InvalidRequest(f"the quoted branch is broken: {source.broken}")
                    branch.text += source.text[source.start :]
            return [protocol.Done(op.op)]
        if isinstance(op, protocol.Prefill):
            return [protocol.Done(op.op, usage=protocol.Usage(prompt_tokens=len(branch.text)))]
        if self._held:
            return None
        if isinstance(op, protocol.Generate):
            return self._generate(branch, op)
        assert isinstance(op, protocol.Select)
        index = self.chooser(branch.text, op)
        scores = tuple(-1.0 - abs(i - index) for i in range(len(op.choices)))
        tokens = tuple(
            (protocol.TokenLogprob(7, c, s),) for c, s in zip(op.choices, scores, strict=True)
        )
        choice = op.choices[index]
        branch.text += choice
        usage = protocol.Usage(prompt_tokens=len(branch.text))
        return [protocol.Selected(op.op, choice, index, scores, usage, tokens)]

    def _generate(self, branch: FakeBranch, op: protocol.Generate) -> list[protocol.Event]:
        events: list[protocol.Event] = []
        outputs = []
        written = self.script(branch.text, op)
        samples = [written] * op.params.n if isinstance(written, str) else list(written)
        for index, sample in enumerate(samples):
            text, reason, matched = cut(sample, op.params)
            ids = tuple(range(len(text)))
            logprobs = ()
            if op.params.logprobs:
                logprobs = tuple(protocol.TokenLogprob(i, c, -0.5) for i, c in enumerate(text))
            outputs.append(protocol.Output(text, ids, reason, matched, logprobs))
            if op.stream:
                for start in range(0, len(text), 3):
                    piece = text[start : start + 3]
                    events.append(
                        protocol.Chunk(
                            op.op,
                            index,
                            piece,
                            ids[start : start + 3],
                            logprobs[start : start + 3],
                        )
                    )
        usage = protocol.Usage(
            prompt_tokens=len(branch.text), completion_tokens=sum(len(o.text) for o in outputs)
        )
        branch.text += outputs[0].text
        return [*events, protocol.Generated(op.op, tuple(outputs), usage)]


def cut(text: str, params: protocol.SamplingParams) -> tuple[str, Any, str | None]:
    """Apply stop strings and the token limit (a token is a character here)."""
    found = [(text.find(stop), stop) for stop in params.stop if stop in text]
    if found:
        position, stop = min(found)
        return text[:position], "stop", stop
    if params.max_tokens is not None and len(text) > params.max_tokens:
        return text[: params.max_tokens], "length", None
    return text, "stop", None
