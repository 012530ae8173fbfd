"""A real gateway and engine on the embedded model, and a client that speaks the bare protocol."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

import rootlace as rl
from rootlace.runtime.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    GatewayConfig,
    SchedulerConfig,
)
from rootlace.wire import protocol
from rootlace.wire.protocol import Event, Op
from tests.real_model import SMOLLM2, WITHOUT_SMOLLM2
from tests.waiting import PATIENCE

END_SECONDS = 100.0
"""Until a process that was told to end counts as one that does not."""


class Server:
    """A gateway process, started as `rootlace.Runtime` starts it."""

    def __init__(self, gateway: GatewayConfig, engine: EngineConfig) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rootlace.runtime.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = msgspec.json.encode({"gateway": gateway, "engine": engine})
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()
        self.ready: dict[str, Any] = json.loads(self.process.stdout.readline())

    @property
    def address(self) -> str:
        return self.ready["program_address"]

    @property
    def url(self) -> str:
        return self.ready["http_address"]

    def engine(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def end(self) -> None:
        """Close standard input; the process outlives this for a moment."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def stop(self) -> int:
        self.end()
        try:
            return self.process.wait(END_SECONDS)
        finally:
            self.process.kill()


class RawClient:
    """One blocking ZeroMQ connection, which keeps all its events."""

    def __init__(self, address: str, **hello: Any) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self.events: list[Event] = []
        self._last_op = 0
        greeting = {"op": 0, "version": protocol.PROTOCOL_VERSION, **hello}
        self.send(protocol.Hello(**greeting))
        self.greeting = self.receive()[0]

    def op(self) -> int:
        self._last_op += 1
        return self._last_op

    def send(self, *ops: Op) -> None:
        self.send_frame(protocol.encode(list(ops)))

    def send_frame(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> list[Event]:
        """The next non-empty frame of events."""
        while True:
            # Many short waits instead of a long one: see tests/waiting.py. Four times the usual
            # patience, because an event may wait for the start of a process.
            if not any(self._socket.poll(100) for _ in range(int(4 * PATIENCE / 0.1))):
                raise TimeoutError(f"nothing came; so far {self.events[-3:]}")
            events = protocol.decode_events(self._socket.recv())
            self.events += events
            if events:
                return events

    def wait(self, op: int) -> Event:
        """The terminal event of `op`."""
        while True:
            for event in self.events:
                if event.op == op and not isinstance(event, protocol.Chunk):
                    return event
            self.receive()

    def status(self) -> dict[str, Any]:
        op = self.op()
        self.send(protocol.GetStatus(op))
        event = self.wait(op)
        assert isinstance(event, protocol.Status), event
        return event.values

    def close(self) -> None:
        self._context.destroy(linger=0)


def engine_config(model: Path, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        executor=ExecutorConfig(model=str(model), dtype="float32", device="cpu", threads=1),
        cache=CacheConfig(block_size=16, num_blocks=1024),
        scheduler=SchedulerConfig(check_invariants=True, **scheduler),
    )


@pytest.fixture(scope="session")
def smollm2() -> Iterator[rl.Runtime]:
    """A runtime with a real model, as a user starts it, but on one core: another worker uses the
    other core."""
    if SMOLLM2 is None:
        pytest.skip(WITHOUT_SMOLLM2)
    with rl.Runtime("smollm2", threads=1, http_port=0, launch_timeout=240) as started:
        yield started


@pytest.fixture(scope="session")
def start_server(demo_model: Path) -> Iterator[Callable[..., Server]]:
    """Start servers (keywords go to GatewayConfig); stop them at the end."""
    servers: list[Server] = []

    def start(engine: EngineConfig | None = None, **gateway: Any) -> Server:
        settings = {
            "program_address": "tcp://127.0.0.1:0",
            "http_port": 0,
            # A bare client sends no pings; it must not be dropped while it waits on a slow machine.
            "client_timeout": 3600.0,
            **gateway,
        }
        config = GatewayConfig(**{"model": str(demo_model), **settings})
        servers.append(Server(config, engine or engine_config(demo_model)))
        return servers[-1]

    yield start
    for server in servers:  # in parallel
        with contextlib.suppress(OSError):
            server.end()
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server()


@pytest.fixture
def client(server: Server) -> Iterator[RawClient]:
    client = RawClient(server.address)
    assert isinstance(client.greeting, protocol.Welcome), client.greeting
    yield client
    client.close()
