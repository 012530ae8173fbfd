"""Who computes a prompt, who decodes it, and what becomes of the slots between the two."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from rootlace.runtime.cache.journal import PrefixDigests, told_blocks
from rootlace.runtime.contracts.messages import (
    CacheChanged,
    EngineOutput,
    EngineRequest,
    HandOver,
    Offered,
    Ready,
)
from rootlace.runtime.engine.client.restarts import Death, PendingRequest
from rootlace.runtime.replicas import handover
from rootlace.runtime.replicas.dispatch import Dispatch
from rootlace.runtime.replicas.handover import Apart, Handover
from rootlace.wire.errors import ServerUnavailable
from rootlace.wire.protocol import RequestFacts, SamplingParams
from rootlace.wire.sampling import Cache, Handling
from tests.waiting import until

INFO = Ready(0, 640, 16, 5120, 10240, 300, "cpu", "float32", handed_slots=40)
TOKENS = np.arange(400, dtype=np.int32)
BLOCKS = (len(TOKENS) - 1) // 16


class Client:
    """An engine's client, whose engine says what the test has it say."""

    info = INFO

    def __init__(self) -> None:
        self.running: dict[int, tuple[EngineRequest, Callable[[EngineOutput], None]]] = {}
        self.sent: list[Any] = []
        self.asked: list[tuple[Any, ...]] = []
        self.answer: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()

    def submit(self, request: EngineRequest, on_update: Callable[[EngineOutput], None]) -> None:
        self.running[request.rid] = request, on_update

    def send(self, message: object) -> None:
        self.sent.append(message)

    async def ask(self, kind: object, *fields: Any, patient: bool) -> tuple[int, ...]:
        assert kind is HandOver and patient
        self.asked.append(fields)
        return await self.answer

    def says(self, update: EngineOutput) -> None:
        on_update = self.running[update.rid][1]
        if update.finish is not None:
            del self.running[update.rid]
        on_update(update)


class Pair:
    """Engine 0 decodes, engine 1 computes prompts; request 1 is under way."""

    def __init__(self, held: int = 0, tokens: np.ndarray = TOKENS, **fields: Any) -> None:
        self.dispatch = Dispatch(2, INFO, lambda at: None, prefill=1)
        self.clients = self.decoder, self.prefiller = Client(), Client()
        self.handover = Handover(Apart(1, 100, 1 << 20), self.dispatch, self.clients, 16)  # type: ignore[arg-type]
        digests = PrefixDigests().reported("", tokens, 16)[: len(told_blocks(0, held))]
        self.dispatch.reported(0, CacheChanged(1, digests, np.empty(0, np.uint64), True))
        fields = {"params": SamplingParams(max_tokens=9, seed=1), **fields}
        self.request = EngineRequest(1, tokens, **fields)
        self.heard: list[EngineOutput] = []

    @property
    def slots(self) -> list[int]:
        """Free ones."""
        return self.handover._free_slots_of(INFO)

    def begin(self) -> None:
        assert self.handover.takes(self.request)
        self.handover.submit(self.request, self.heard.append)
        ((prompt, _),) = self.prefiller.running.values()
        assert prompt.params.max_tokens == 0 and not self.decoder.running

    async def computed(self, finish: str = "length", **fields: Any) -> None:
        self.prefiller.says(EngineOutput(1, facts=RequestFacts(32, 0.5), finish=finish, **fields))
        await turns()

    async def answered(self, checksums: tuple[int, ...]) -> None:
        self.prefiller.answer.set_result(checksums)
        await turns()

    def decoded(self) -> None:
        """The request ends as ever, and nothing is left of it."""
        self.decoder.says(EngineOutput(1, token_ids=(7,), facts=RequestFacts(399, 0.25)))
        self.decoder.says(EngineOutput(1, finish="stop"))
        assert self.heard[-1].finish == "stop"
        self.nothing_left()

    def nothing_left(self) -> None:
        assert sorted(self.slots) == list(range(40))
        assert not self.handover._under_way and not self.dispatch._running
        assert not self.dispatch._router._sent


async def turns() -> None:
    """What is ready to go on does."""
    for _ in range(6):
        await asyncio.sleep(0)


async def test_what_the_decoder_lacks_is_handed_over() -> None:
    pair = Pair(held=10)
    pair.begin()
    await pair.computed()
    ((tokens, first, slots, *_),) = pair.prefiller.asked
    assert (first, len(slots), len(tokens)) == (10, BLOCKS - 10, 16 * BLOCKS)
    assert not pair.decoder.running, "it waits for the blocks"
    await pair.answered((5, 6, 7))
    (offered,) = pair.decoder.sent
    assert isinstance(offered, Offered) and offered.first == 10
    assert offered.places == tuple(zip(slots[:3], (5, 6, 7), strict=True))
    assert pair.decoder.running[1][0] is pair.request
    pair.decoded()
    assert pair.heard[0].facts == RequestFacts(32, 0.75)
    assert pair.handover.counters() == {
        "prompts_apart": 1, "handed_over_blocks": 3, "not_handed_over": 0
    }  # fmt: skip


@pytest.mark.parametrize("why", ["refused", "lost", "nothing", "broken"])
async def test_the_decoder_computes_what_does_not_come(why: str) -> None:
    pair = Pair()
    pair.begin()
    if why == "refused":
        await pair.computed("error", code="overloaded", error="too many")
    else:
        await pair.computed()
        if why == "nothing":
            await pair.answered(())
        else:
            pair.prefiller.answer.set_exception(ServerUnavailable("it died"))
    await turns()
    assert not pair.decoder.sent
    pair.decoded()
    assert pair.handover.counters()["not_handed_over"] == 1


@pytest.mark.parametrize("ends", ["it answers", "it dies"])
async def test_slots_are_nobody_elses_until_their_engine_has_answered_or_is_dead(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(handover, "HAND_OVER_SECONDS", 0.0)
    pair = Pair()
    pair.begin()
    await pair.computed()
    await until(lambda: bool(pair.decoder.running))
    assert not pair.decoder.sent, "it computes all of it"
    pair.decoder.says(EngineOutput(1, finish="stop"))
    assert len(pair.slots) == 40 - BLOCKS
    if ends == "it answers":
        await pair.answered((1, 2))
    else:
        pair.prefiller.answer.set_exception(ServerUnavailable("it died"))
        await turns()
    pair.nothing_left()


async def test_each_engine_has_slots_of_its_own_where_it_says_so() -> None:
    pair = Pair()
    pair.prefiller.info = msgspec.structs.replace(INFO, handed_at=b"first")
    pair.begin()
    await pair.computed()
    ((_, _, slots, *_),) = pair.prefiller.asked
    # It is started again meanwhile: what it says next is of other slots.
    pair.prefiller.info = msgspec.structs.replace(INFO, handed_at=b"second", handed_slots=7)
    await pair.answered((5, 6))
    (offered,) = pair.decoder.sent
    assert offered.source == b"first" and offered.places[0] == (slots[0], 5)
    assert len(pair.handover._free_slots_of(pair.prefiller.info)) == 7
    assert pair.handover._free.keys() == {b"second"}
    pair.decoded()


async def test_what_killed_engines_is_not_tried_again() -> None:
    pair = Pair()
    pair.begin()
    await pair.computed("error", code="ends_engine", error="the engine died twice")
    assert [update.finish for update in pair.heard] == ["error"]
    pair.nothing_left()


@pytest.mark.parametrize("when", ["computing", "computed", "handing over"])
async def test_an_aborted_request_ends_once(when: str) -> None:
    pair = Pair()
    pair.begin()
    if when == "computing":
        pair.handover.abort(1)
        await pair.computed("abort")
    elif when == "computed":
        pair.prefiller.says(EngineOutput(1, finish="length"))
        pair.handover.abort(1)
        await turns()
    else:
        await pair.computed()
        pair.handover.abort(1)
        await pair.answered((1, 2))
    assert [(update.rid, update.finish) for update in pair.heard] == [(1, "abort")]
    assert not pair.decoder.running
    pair.nothing_left()


async def test_when_the_first_engine_dies_the_others_get_the_request_as_it_came() -> None:
    pair = Pair()
    pair.begin()
    prompt, on_update = pair.prefiller.running.pop(1)
    pair.dispatch.down(1)
    deaths = [Death()]
    died = PendingRequest(prompt, on_update, engines=1, deaths=deaths)
    found = pair.handover.instead(died)
    assert found.request is pair.request and (found.engines, found.deaths) == (1, deaths)
    assert pair.dispatch.place(found.resumed()) == 0
    pair.decoder.submit(found.request, found.on_update)
    pair.decoded()
    assert not pair.handover.takes(pair.request), "nobody is left to compute prompts"


async def test_when_the_second_engine_dies_before_it_has_the_request_another_one_gets_it() -> None:
    pair = Pair()
    pair.begin()
    await pair.computed()
    pair.dispatch.down(0)
    await pair.answered((1, 2))
    # The only one left is that which computed it.
    assert pair.prefiller.running.keys() == {1} and not pair.decoder.sent
    pair.prefiller.says(EngineOutput(1, token_ids=(7,), finish="stop"))
    pair.nothing_left()


async def test_where_the_memory_is_full_less_is_handed_over() -> None:
    pair = Pair()
    kept, pair.slots[4:] = pair.slots[4:], []
    pair.begin()
    await pair.computed()
    ((tokens, first, slots, *_),) = pair.prefiller.asked
    assert (first, len(slots), len(tokens)) == (0, 4, 64)
    await pair.answered((1, 2, 3, 4))
    pair.slots.extend(kept)
    pair.decoded()


async def test_what_is_not_computed_apart() -> None:
    pair = Pair()
    plain = SamplingParams(max_tokens=9, seed=1)
    replace = msgspec.structs.replace
    for changed in (
        replace(pair.request, token_ids=TOKENS[:100]),
        replace(pair.request, params=replace(plain, max_tokens=0)),
        replace(pair.request, params=replace(plain, prompt_logprobs_from=3)),
        replace(pair.request, handling=Handling(timeout=1.0)),
        replace(pair.request, handling=Handling(cache=Cache(ttl=1.0))),
        replace(pair.request, pooling="last", params=replace(plain, max_tokens=0)),
    ):
        assert not pair.handover.takes(changed)
    assert pair.handover.takes(replace(pair.request, handling=Handling(priority=3)))
    assert not Pair(held=19).handover.takes(pair.request), "it lacks 96 tokens"

    long = np.arange(16 * 2048, dtype=np.int32)
    assert not Pair(held=2040, tokens=long).handover.takes(Pair(2040, long).request), (
        "blocks behind the last told end may be cached"
    )
    assert Pair(held=1900, tokens=long).handover.takes(Pair(1900, long).request)


async def test_a_stop_ends_all_that_is_on_its_way() -> None:
    pair = Pair()
    pair.begin()
    await pair.computed()
    pair.handover.close()
    await turns()
    assert [update.finish for update in pair.heard] == ["error"]
    assert not pair.handover._under_way and not pair.decoder.running
