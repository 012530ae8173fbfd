from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rootlace as rl
from tests.frontend.fake_server import FakeServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    fake = FakeServer(tmp_path)
    yield fake
    fake.stop()


@pytest.fixture
def backend(server: FakeServer) -> Iterator[rl.RuntimeEndpoint]:
    """An endpoint that sends frames only when a reader waits, so that frames can be counted."""
    endpoint = rl.RuntimeEndpoint(server.address, coalesce=60.0)
    rl.set_default_backend(endpoint)
    yield endpoint
    rl.set_default_backend(None)
    endpoint.close()
