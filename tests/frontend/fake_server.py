"""A gateway without a model: speaks the protocol over a real socket, and answers from a script.

One thread, one ROUTER socket, and the script of `rootlace.testing`, with a token for each
character. `script(text, op)` gives the text of a `Generate`, or raises a `RootlaceError` to fail
the operation. `hold()` stops all generation until `release()`, so that tests can examine a
program in the middle without any timing.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from rootlace.client.channel import Ask, BranchText, Machine
from rootlace.testing.backends import generated, selected
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidRequest, Unauthorized

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
    """Return a word that depends on the whole text before."""
    return f" w{zlib.crc32(text.encode()) % 10_000}"


def default_chooser(text: str, op: protocol.Select) -> int:
    return zlib.crc32(text.encode()) % len(op.choices)


class FakeServer:
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
        self.kept = False
        self.peers: dict[bytes, Machine] = {}
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
        return sum(len(machine.branches) for machine in list(self.peers.values()))

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        def go() -> None:
            self._held = False
            for machine in list(self.peers.values()):
                machine.advance()

        self._commands.append(go)

    def sent(self, kind: type) -> list[Any]:
        """Return the operations of one type received so far."""
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
                    self._receive(identity, msgspec.msgpack.decode(frame, type=list[protocol.Op]))
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
                error = InvalidRequest("who are you?")
                self._reply(identity, protocol.Failed(0, error.code, str(error)))
            else:
                self._take(identity, op)
        if identity in self.peers:
            self.peers[identity].advance()

    def _hello(self, identity: bytes, op: protocol.Hello) -> None:
        if op.api_key != self.api_key:
            error = Unauthorized("the API key is wrong")
            self._reply(identity, protocol.Failed(0, error.code, str(error)))
            return
        self.peers[identity] = Machine(self._answer, lambda event: self._reply(identity, event))
        self._reply(identity, protocol.Welcome(0, protocol.PROTOCOL_VERSION, self.model, self.kept))

    def _take(self, identity: bytes, op: protocol.Op) -> None:
        if isinstance(op, protocol.Ping):
            self._reply(identity, protocol.Done(op.op))
        elif isinstance(op, protocol.Goodbye):
            del self.peers[identity]
        elif isinstance(op, protocol.FlushCache):
            self.flushes += 1
            self._reply(identity, protocol.Done(op.op))
        elif isinstance(op, protocol.GetStatus):
            self._reply(identity, protocol.Status(op.op, {"branches": self.open_branches}))
        else:
            self.peers[identity].take(op)

    def _answer(self, branch: BranchText, op: Ask) -> list[protocol.Event] | None:
        if self._held:
            return None
        if isinstance(op, protocol.Select):
            return selected(op, branch.text, self.chooser(branch.text, op), list)
        written = self.script(branch.text, op)
        samples = [written] * op.params.n if isinstance(written, str) else list(written)
        return generated(op, branch.text, samples, list, chunk=3)
