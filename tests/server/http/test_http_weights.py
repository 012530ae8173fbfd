"""Memory for a large body before its contents are known."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from rootlace.runtime.server.http.batch_runner import custom_id_of
from tests.server.http.conftest import Served

LISTS = b"[" + b"[]," * 60_000 + b"[]]"
"""Made, they take more than 3 MB."""


@contextmanager
def little_memory(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


async def test_an_explanation_is_told_by_one_field(served: Served) -> None:
    headers = {"Content-Type": "application/json"}
    for start in (b'{"prompt":"hi"', b'{"messages":[{"role":"user"}]'):
        body = start + b',"x":' + LISTS + b"}"
        with little_memory(2_000_000):
            async with served.http.post("/cache/explain", data=body, headers=headers) as reply:
                error = (await reply.json())["error"]
        assert (reply.status, error["param"]) == (400, "x")
    for body in (b"[1]", b"{", b'{"messages":'):
        assert (await served.post("/cache/explain", data=body, headers=headers)).status == 400


def test_a_wrong_row_is_told_by_one_field() -> None:
    named, nameless = (b'{"body":' + LISTS + end for end in (b',"custom_id":"a"}', b"}"))
    with little_memory(100_000):
        assert custom_id_of(named) == "a" and custom_id_of(nameless) is None
    for line in (b"{", b"[]", b'{"custom_id":1}', b"\xff", b"[" * 10_000):
        assert custom_id_of(line) is None
