from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rootlace as rl
from tests.frontend.fake_gateway import FakeGateway


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGateway]:
    fake = FakeGateway(tmp_path)
    yield fake
    fake.stop()


@pytest.fixture
def backend(gateway: FakeGateway) -> Iterator[rl.RuntimeEndpoint]:
    """An endpoint that sends frames only when a reader waits, so that frames can be counted."""
    endpoint = rl.RuntimeEndpoint(gateway.address, coalesce=60.0)
    rl.set_default_backend(endpoint)
    yield endpoint
    rl.set_default_backend(None)
    endpoint.close()
