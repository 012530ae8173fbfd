"""One server with the embedded model, which real clients talk to unmodified."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rootlace as rl


@pytest.fixture(scope="session")
def url(demo_model: object) -> Iterator[str]:
    with rl.Runtime(http_port=0, dtype="float32", threads=1, served_name="demo") as runtime:
        assert runtime.url is not None
        yield runtime.url
