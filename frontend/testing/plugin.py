"""Fixtures for pytest, which finds them if the package is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rootlace.testing import Recorded, Scripted


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("rootlace").addoption(
        "--rootlace-record",
        metavar="URL",
        help="ask the server at URL what the cassettes of the tests do not have yet",
    )


@pytest.fixture
def scripted(_default_backend: Callable[[Any], None]) -> Callable[..., Scripted]:
    """Return a function that makes a `rootlace.testing.Scripted` the test's backend."""

    def make(*replies: Any, **options: Any) -> Scripted:
        from rootlace.testing import Scripted

        backend = Scripted(*replies, **options)
        _default_backend(backend)
        return backend

    return make


@pytest.fixture
def cassette(request: pytest.FixtureRequest, _default_backend: Callable[[Any], None]) -> Recorded:
    """Run the test's programs on the recordings in `cassettes/` beside its file; see
    --rootlace-record."""
    from rootlace.client.endpoint import RuntimeEndpoint
    from rootlace.testing import Recorded

    url = request.config.getoption("--rootlace-record")
    name = f"{request.path.stem}-{request.node.name}.json".replace("/", "-")
    path = request.path.parent / "cassettes" / name
    backend = Recorded(path, RuntimeEndpoint(url) if url else None)
    _default_backend(backend)
    return backend


@pytest.fixture
def _default_backend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Set the default backend until the end of the test."""
    from rootlace.client import endpoint

    monkeypatch.setattr(endpoint, "_default", [*endpoint._default])
    return endpoint.set_default_backend
