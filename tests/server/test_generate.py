"""`Generate`: samples, stops, scores, lengths."""

import threading
from typing import Any

import pytest

from rootlace.runtime.server.auth import Account, new_key
from rootlace.runtime.server.session import Session
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.errors import Overloaded
from rootlace.wire.protocol import (
    Append,
    Chunk,
    Generate,
    Generated,
    Open,
    SamplingParams,
    Tokens,
)
from tests.server.conftest import load
from tests.server.fake_engine import FakeEngine, score
from tests.server.operations import MakeClient, failed, prompt_of, text


async def test_single_tokens_are_asked_for_where_somebody_looks_at_them(
    client: MakeClient,
) -> None:
    c = client()
    c.send(
        Open(1, 1),
        Append(2, 1, text("Once")),
        Generate(3, 1, params=SamplingParams(max_tokens=2)),
        Generate(4, 1, params=SamplingParams(max_tokens=2), stream=True),
        Generate(5, 1, params=SamplingParams(max_tokens=2, stop=("never",))),
    )
    await c.result(5)
    quiet, streamed, checked = (message.emit_every for message in c.engine.submitted)
    assert quiet > 1 and streamed == checked == 1


@pytest.mark.parametrize("stop", [(), ("never said",)])
@pytest.mark.parametrize("no_stop_trim", [False, True])
async def test_text_is_the_same_however_tokens_come(
    client: MakeClient, stop: tuple[str, ...], no_stop_trim: bool
) -> None:
    """In one piece, one by one, streamed: with a split character and a stop token at the end."""
    found = []
    for pieces, stream in ((1, False), (1, True), (3, True), (100, False), (100, True)):
        c = client()
        words = c.model.tokenizer.encode(" a € b 中", add_special_tokens=False)
        c.engine.tokens_per_step = pieces
        c.engine.script = lambda _, words=words: [*words, 2]  # type: ignore[misc]
        params = SamplingParams(max_tokens=50, stop=stop, no_stop_trim=no_stop_trim)
        c.send(
            Open(1, 1),
            Append(2, 1, text("Once")),
            Generate(3, 1, params=params, stream=stream),
            Generate(4, 1),
        )
        generated = await c.result(3)
        assert isinstance(generated, Generated)
        await c.result(4)
        output = generated.outputs[0]
        found.append((output.text, output.token_ids, output.matched, prompt_of(c)))
        chunks = [event for event in c.of(3) if isinstance(event, Chunk)]
        if stream:
            assert "".join(chunk.text for chunk in chunks) == output.text
            assert tuple(i for chunk in chunks for i in chunk.token_ids) == output.token_ids
    assert "a € b 中" in found[0][0]
    assert all(one == found[0] for one in found)


async def test_samples_have_their_own_seeds_and_the_first_continues(client: MakeClient) -> None:
    c = client()
    params = SamplingParams(n=3, seed=2**63 - 2, max_tokens=4, ignore_eos=True)
    c.send(Open(1, 1), Append(2, 1, text("Once")), Generate(3, 1, params=params, stream=True))
    generated = await c.result(3)
    assert isinstance(generated, Generated)
    seeds = [m.params.seed for m in c.engine.submitted]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [m.params.stop_token_ids for m in c.engine.submitted] == [()] * 3
    assert generated.usage.completion_tokens == 12
    assert generated.usage.prompt_tokens == len(c.model.tokenizer.encode("Once"))
    for index, output in enumerate(generated.outputs):
        chunks = [e for e in c.of(3) if isinstance(e, Chunk) and e.index == index]
        assert "".join(e.text for e in chunks) == output.text
        assert sum((e.token_ids for e in chunks), ()) == output.token_ids
    c.send(Generate(4, 1))
    await c.result(4)
    assert prompt_of(c) == [*c.model.tokenizer.encode("Once"), *generated.outputs[0].token_ids]


async def test_seeds_are_drawn(client: MakeClient) -> None:
    c = client()
    c.send(Open(1, 1), *(Generate(n, 1) for n in range(2, 5)))
    await c.result(4)
    assert len({m.params.seed for m in c.engine.submitted}) == 3


async def test_what_comes_behind_a_stop_string_was_not_predicted_and_is_not_charged(
    client: MakeClient,
) -> None:
    c = client(tokenizer=load("gpt2"))
    used: list[tuple[str, str, int]] = []
    entry = new_key("somebody", tokens_per_minute=100)[1]
    account = Account(entry, lambda *given: used.append(given), lambda: None)
    c.session = Session(c.model, c.events.extend, account=account)
    ids = load("gpt2").encode(" one two three four five six", False)
    assert len(ids) == 6
    c.engine.script = lambda _: ids
    c.engine.tokens_per_step, c.engine.accepted = 4, frozenset({1, 2, 3})
    params = SamplingParams(stop=("three",), max_tokens=50)
    c.send(Open(1, 1), Append(2, 1, text("Count:")), Generate(3, 1, params=params))
    generated = await c.result(3)
    assert isinstance(generated, Generated)
    assert generated.outputs[0].token_ids == tuple(ids[:3])
    usage = generated.usage
    assert (usage.completion_tokens, usage.accepted, usage.rejected) == (3, 2, 4)
    assert [one for one in used if one[1] == "completion_tokens"] == [
        ("somebody", "completion_tokens", 3)
    ]


async def test_a_prediction_has_as_many_tokens_as_fit_the_context(client: MakeClient) -> None:
    c = client(engine=FakeEngine(32000, context_length=50))
    words = " a b c" * 100
    c.send(
        Open(1, 1),
        Append(2, 1, text("Once")),
        Generate(3, 1, params=SamplingParams(max_tokens=1, n=2), prediction=words),
    )
    await c.result(3)
    one, other = (request.prediction for request in c.engine.submitted)
    assert one is other
    assert one.tolist() == c.model.tokenizer.encode(words, add_special_tokens=False)[:50]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stops", [{"stop": ("wo th",)}, {"stop_regex": (r"w.\sth|X$",)}])
async def test_stop_string_cuts_inside_a_token(
    client: MakeClient, keep: bool, stops: dict[str, Any]
) -> None:
    c = client(tokenizer=load("gpt2"))
    ids = load("gpt2").encode(" one two three", False)
    c.engine.script = lambda _: [*ids, *ids]
    params = SamplingParams(**stops, max_tokens=50, no_stop_trim=keep)
    c.send(
        Open(1, 1),
        Append(2, 1, text("Count:")),
        Generate(3, 1, params=params, stream=True),
        Append(4, 1, text("x")),
        Generate(5, 1),
    )
    generated = await c.result(3)
    await c.result(5)
    assert isinstance(generated, Generated)
    (output,) = generated.outputs
    assert output.text == (" one two th" if keep else " one t")
    assert "".join(e.text for e in c.of(3) if isinstance(e, Chunk)) == output.text
    ((matched,),) = stops.values()
    assert (output.finish_reason, output.matched) == ("stop", matched)
    assert output.token_ids == tuple(ids)  # all sampled tokens
    assert c.engine.aborted == [1]
    kept = 2 if keep else 1
    rest = " thx" if keep else " tx"
    assert prompt_of(c) == (
        load("gpt2").encode("Count:") + ids[:kept] + load("gpt2").encode(rest, False)
    )


async def test_stop_strings_do_not_count_before_min_tokens(client: MakeClient) -> None:
    c = client(tokenizer=load("gpt2"))
    c.engine.script = lambda _: load("gpt2").encode(" a b a b a", False)
    params = SamplingParams(stop=(" a",), min_tokens=3, max_tokens=9)
    c.send(Open(1, 1), Append(2, 1, text("x")), Generate(3, 1, params=params))
    generated = await c.result(3)
    assert isinstance(generated, Generated)
    assert generated.outputs[0].text == " a b"


async def test_stop_tokens(client: MakeClient) -> None:
    c = client(tokenizer=load("gpt2"))
    ids = load("gpt2").encode(" one two three", False)
    c.engine.script = lambda _: list(ids)
    for n, keep in enumerate((False, True)):
        params = SamplingParams(stop_token_ids=(ids[1],), no_stop_trim=keep)
        c.send(
            Open(10 * n + 1, n),
            Append(10 * n + 2, n, text("x")),
            Generate(10 * n + 3, n, params=params),
            Append(10 * n + 4, n, text(" y")),
            Generate(10 * n + 5, n),
        )
        generated = await c.result(10 * n + 3)
        await c.result(10 * n + 5)
        assert isinstance(generated, Generated)
        (output,) = generated.outputs
        assert output.token_ids == tuple(ids[:2]) and output.matched == ids[1]
        assert output.text == (" one two" if keep else " one")
        assert prompt_of(c) == load("gpt2").encode("x" + output.text + " y")


async def test_logprobs(client: MakeClient) -> None:
    c = client()
    params = SamplingParams(logprobs=True, top_logprobs=1, prompt_logprobs_from=0, max_tokens=3)
    c.send(Open(1, 1), Append(2, 1, text("Once upon")), Generate(3, 1, params=params, stream=True))
    generated = await c.result(3)
    assert isinstance(generated, Generated)
    (output,) = generated.outputs
    assert [t.token_id for t in output.logprobs] == list(output.token_ids)
    assert all(t.top == ((t.token_id, -0.5, t.text),) for t in output.logprobs)
    chunks = [e for e in c.of(3) if isinstance(e, Chunk)]
    assert sum((e.logprobs for e in chunks), ()) == output.logprobs
    prompt = c.model.tokenizer.encode("Once upon")
    assert [t.token_id for t in generated.prompt_logprobs] == prompt
    assert generated.prompt_logprobs[0].logprob is None
    assert generated.prompt_logprobs[-1].logprob == score(tuple(prompt))
    assert "".join(t.text for t in generated.prompt_logprobs[1:]) == " Once upon"
    assert generated.timing.total >= generated.timing.first_token > 0
    assert generated.timing.queued == 0.001


async def test_context_length(
    client: MakeClient, stories: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = client(engine=FakeEngine(stories.vocab_size, context_length=12))
    c.engine.script = lambda _: [7] * 100
    c.send(
        Open(1, 1),
        Append(2, 1, (Tokens(tuple(range(3, 13))),)),
        Generate(3, 1, params=SamplingParams(max_tokens=None)),
        Generate(4, 1),
    )
    generated = await c.result(3)
    assert isinstance(generated, Generated)
    assert generated.outputs[0].finish_reason == "length"
    assert len(generated.outputs[0].token_ids) == 2
    await c.result(4)
    code, message = failed(c, 4)
    assert code == "context_length_exceeded" and "12" in message
    c.send(Open(5, 2), Append(6, 2, (Tokens(tuple(range(3, 20))),)))
    await c.result(6)
    code, message = failed(c, 6)
    assert code == "context_length_exceeded" and "17" in message and "12" in message
    c.send(Open(7, 3), Append(8, 3, text("a b " * 10)), Generate(9, 3))
    await c.result(9)
    code, message = failed(c, 9)
    assert code == "context_length_exceeded" and "22" in message and "12" in message
    # A scan of all tokens runs in another thread; others are answered meanwhile.
    looked: list[int] = []

    def look(tokenizer: Tokenizer) -> int:
        looked.append(threading.get_ident())
        return 16

    monkeypatch.setattr(Tokenizer, "longest_token", property(look))
    c.send(Open(10, 4), Append(11, 4, text("hello" * 100_000)))
    await c.result(11)
    assert failed(c, 11)[0] == "context_length_exceeded"
    assert looked and threading.get_ident() not in looked


async def test_where_one_sample_finds_no_place_none_is_computed(client: MakeClient) -> None:
    """The engine is away, and the queue is full."""
    c = client()
    c.engine.paused = True
    submit, given = c.engine.submit, 0

    def full(*args: Any) -> None:
        nonlocal given
        given += 1
        if given == 3:
            raise Overloaded("no more may wait")
        submit(*args)

    c.engine.submit = full  # type: ignore[method-assign]
    c.send(Open(1, 1), Append(2, 1, text("Once")), Generate(3, 1, params=SamplingParams(n=4)))
    await c.result(3)
    assert failed(c, 3)[0] == "overloaded" and given == 3
    assert len(c.engine.aborted) == 2 and not c.engine.running
