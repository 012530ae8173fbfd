"""Objects that requests leave behind when they end."""

import gc
import weakref

import pytest

from rootlace.runtime.server.http import generation
from rootlace.runtime.server.http.replies import DirectEvents
from rootlace.runtime.server.served_model import Deliveries
from rootlace.wire.errors import DeadlineImpossible, RootlaceError
from rootlace.wire.protocol import Chunk, SamplingParams, Text
from rootlace.wire.sampling import Handling
from tests.server.operations import MakeClient


class OpenEvents(DirectEvents):
    def __init__(self, deliveries: Deliveries) -> None:
        super().__init__(deliveries)
        self.open = True

    def write(self, data: bytes) -> None:
        pass


@pytest.mark.parametrize("fate", ["answered", "streamed", "refused", "late"])
async def test_a_request_of_http_leaves_nothing_to_the_garbage_collector(
    client: MakeClient, fate: str
) -> None:
    """Under overload hundreds of requests a second are refused; collecting garbage delays all."""
    c = client()
    if fate == "refused":
        c.engine.script = lambda request: DeadlineImpossible("not in time")
    c.engine.paused = fate == "late"
    timeout = 0.01 if fate == "late" else None
    job = generation.GenerateRequest(
        (Text("one two"),), SamplingParams(max_tokens=2), handling=Handling(timeout=timeout)
    )
    seen: list[weakref.ref[object]] = []

    async def ask() -> None:
        with generation.GenerationStream(c.model, [job], stream=fate == "streamed") as shots:

            def write(chunk: Chunk) -> bytes:
                assert not shots.keeps
                return b""

            if fate == "streamed":
                shots.divert(OpenEvents(c.model.deliveries), write)
            seen.append(weakref.ref(shots))
            seen.append(weakref.ref(shots.keep()))
            shots._kept = False
            try:
                await shots.results()
            except RootlaceError:
                assert fate in ("refused", "late")
            else:
                assert fate in ("answered", "streamed")

    await ask()  # objects that are made once
    gc.collect()
    gc.disable()
    try:
        seen.clear()
        await ask()
        await c.settle()
        assert len(seen) == 2 and [one() for one in seen] == [None, None]
    finally:
        gc.enable()
