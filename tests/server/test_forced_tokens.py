"""Forced tokens in the usage: exactly those that are part of the output."""

from collections.abc import Callable

import pytest

from rootlace.wire.protocol import Append, Chunk, Generate, Generated, Open, SamplingParams, Text
from tests.server.conftest import Client

MakeClient = Callable[..., Client]
TEXT = " there was a little girl who lived"


async def generate(c: Client, at_once: int, *, stream: bool = False, **params: object) -> Generated:
    """Generate `TEXT`, with tokens 1 to 5 marked as forced."""
    ids = c.model.tokenizer.encode(TEXT, add_special_tokens=False)
    c.engine.script = lambda _: ids
    c.engine.tokens_per_step = at_once
    c.engine.forced = frozenset(range(1, 6))
    wanted = SamplingParams(ignore_eos=True, **params)  # type: ignore[arg-type]
    c.send(Open(1, 7), Append(2, 7, (Text("Once"),)), Generate(3, 7, params=wanted, stream=stream))
    generated = await c.result(3)
    assert isinstance(generated, Generated)
    return generated


@pytest.mark.parametrize("at_once", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
async def test_forced_tokens_of_all_samples_count(client: MakeClient, at_once, stream) -> None:
    for n in (1, 3):
        c = client()
        generated = await generate(c, at_once, stream=stream, n=n)
        usage = generated.usage
        assert [output.forced_at for output in generated.outputs] == [(1, 2, 3, 4, 5)] * n
        progress = generated.timing.progress
        assert progress[-1][1] == len(generated.outputs[0].token_ids)
        assert list(progress) == sorted(progress) and len(set(progress)) == len(progress)
        assert progress[0][0] == generated.timing.first_token <= generated.timing.total
        ids = c.model.tokenizer.encode(TEXT, add_special_tokens=False)
        assert usage.completion_tokens == n * len(ids)
        assert usage.forced_tokens == n * 5


@pytest.mark.parametrize("at_once", [1, 3, 100])
async def test_tokens_behind_a_stop_string_do_not_count(client: MakeClient, at_once) -> None:
    c = client()
    encode = c.model.tokenizer.encode
    kept = 0
    ids = encode(TEXT, add_special_tokens=False)
    while "a li" not in c.model.tokenizer.fast.decode(ids[:kept]):
        kept += 1
    assert 1 < kept < len(ids), "the stop string ends inside the output"
    generated = await generate(c, at_once, stop=("a li",), stream=True, logprobs=True)
    (output,) = generated.outputs
    assert output.finish_reason == "stop" and output.matched == "a li"
    assert output.token_ids == tuple(ids[:kept]) and len(output.logprobs) == kept
    assert generated.usage.completion_tokens == kept
    assert generated.usage.forced_tokens == min(kept - 1, 5)
    chunks = [event for event in c.of(3) if isinstance(event, Chunk)]
    assert [token for chunk in chunks for token in chunk.token_ids] == ids[:kept]


async def test_a_limit_cuts_forced_tokens_too(client: MakeClient) -> None:
    usage = (await generate(client(), 100, max_tokens=3)).usage
    assert (usage.completion_tokens, usage.forced_tokens) == (3, 2)
