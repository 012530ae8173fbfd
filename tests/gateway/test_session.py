"""Branches, end to end through a session over the fake engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from rootlace.runtime.gateway.tokens.pieces import Piece
from rootlace.runtime.gateway.tokens.tokenizer import Tokenizer
from rootlace.wire.errors import InternalError, Overloaded
from rootlace.wire.protocol import (
    Append,
    Cancel,
    Chunk,
    Close,
    Done,
    Failed,
    FlushCache,
    Generate,
    Generated,
    GetStatus,
    Goodbye,
    Hello,
    Op,
    Open,
    Ping,
    Prefill,
    Quote,
    SamplingParams,
    Select,
    Status,
    Text,
    Tokens,
    Usage,
)
from tests.gateway.conftest import Client, load
from tests.gateway.fake_engine import FakeEngine, score
from tests.waiting import until

MakeClient = Callable[..., Client]


def text(content: str, special: bool = False) -> tuple[Text, ...]:
    return (Text(content, special),)


def prompt_of(client: Client, index: int = -1) -> list[int]:
    return client.engine.submitted[index].token_ids.tolist()


async def test_what_need_not_wait_is_done_at_once(client: MakeClient) -> None:
    c = client()
    c.send(Open(1, 1), Append(2, 1, text("Once")), Open(3, 2, parent=1), Generate(4, 2))
    assert len(c.engine.submitted) == 1, "the fork and its request wait for nobody"
    c.send(Append(5, 2, text("more")), Cancel(6, 2), Close(7, 2))
    assert isinstance(await c.result(4), Failed)
    assert isinstance(await c.result(5), Failed)
    assert isinstance(await c.result(7), Done)
    assert isinstance(await c.result(2), Done)


async def test_open_append_generate_streams(client: MakeClient) -> None:
    c = client()
    words = c.gateway.tokenizer.encode(" there was a little girl", add_special_tokens=False)[1:]
    c.engine.script = lambda _: [*words, 2, 5, 5]
    c.send(
        Open(1, 7),
        Append(2, 7, text("Once upon a")),
        Append(3, 7, text(" time,")),
        Generate(4, 7, stream=True),
        Close(5, 7),
    )
    generated = await c.result(4)
    assert isinstance(generated, Generated)
    assert await c.result(5) == Done(5)
    (output,) = generated.outputs
    assert output.finish_reason == "stop" and output.matched == 2
    assert output.token_ids == (*words, 2)
    chunks = [e for e in c.of(4) if isinstance(e, Chunk)]
    assert len(chunks) > 2
    assert "".join(e.text for e in chunks) == output.text == " there was a little girl"
    assert [i for e in chunks for i in e.token_ids] == [*words, 2]
    assert prompt_of(c) == c.gateway.tokenizer.encode("Once upon a time,")
    assert generated.usage.prompt_tokens == len(prompt_of(c))
    assert generated.usage.completion_tokens == len(words) + 1
    assert [e.op for e in c.events if not isinstance(e, Chunk)] == [1, 2, 3, 4, 5]
    assert c.gateway.branch_count == 0


async def test_generated_ids_are_kept(client: MakeClient) -> None:
    c = client()
    # An unusual tokenization of "hello": never replaced by the usual one.
    ids = [c.gateway.tokenizer.id_of(x) for x in ("h", "e", "l", "l", "o")]
    c.engine.script = lambda _: [i for i in ids if i is not None]
    c.send(
        Open(1, 1),
        Append(2, 1, text("Say")),
        Generate(3, 1, params=SamplingParams(max_tokens=5)),
        Append(4, 1, text(" again")),
        Generate(5, 1),
    )
    await c.result(5)
    tokenizer = c.gateway.tokenizer
    after = tokenizer.encode_pieces((Piece(" again"),), previous=ids[-1])
    assert prompt_of(c) == tokenizer.encode("Say") + ids + after


async def test_many_short_appends_are_one_text(client: MakeClient) -> None:
    c = client()
    words = [f" w{i}" for i in range(2000)]
    c.send(Open(1, 1), *(Append(2 + i, 1, text(word)) for i, word in enumerate(words)))
    await c.result(2001)
    branch = c.session._branches[1]
    assert 1 < len(branch.state.pending) < 10
    assert "".join(piece.text for piece in branch.state.pending) == "".join(words)
    c.send(Append(3000, 1, (Text("<s>", special=True), Text("<s>"), Text("</s>", special=True))))
    await c.result(3000)
    assert branch.state.pending[-3:] == (Piece("<s>", True), Piece("<s>"), Piece("</s>", True))


def ids_of_words(client: Client, words: str) -> list[int]:
    return client.gateway.tokenizer.encode_pieces((Piece(words),), previous=5)


def failed(client: Client, op: int) -> tuple[str, str]:
    event = client.terminal(op)
    assert isinstance(event, Failed), event
    return event.code, event.message


# ---------------------------------------------------------------- order, forks, quotes


async def test_a_child_starts_where_its_parent_stood(client: MakeClient) -> None:
    c = client()
    c.engine.paused = True
    words = ids_of_words(c, " and then")
    c.engine.script = lambda _: list(words)
    c.send(
        Open(1, 1),
        Append(2, 1, text("Once")),
        Open(3, 2, parent=1),
        Generate(4, 1, params=SamplingParams(max_tokens=2)),
        Open(5, 3, parent=1),
        Append(6, 1, text(" later")),
        Open(7, 4, parent=1),
        Append(8, 2, text(" upon")),
        Generate(9, 2, params=SamplingParams(max_tokens=1)),
    )
    await c.settle()
    # The child opened before the Generate runs beside it; the others wait for it.
    assert len(c.engine.running) == 2
    assert c.terminal(3) == Done(3) and c.terminal(5) is None and c.terminal(7) is None
    assert prompt_of(c, 0) == c.gateway.tokenizer.encode("Once")
    assert prompt_of(c, 1) == c.gateway.tokenizer.encode("Once upon")
    c.engine.paused = False
    c.engine._schedule()
    c.send(
        Generate(10, 3, params=SamplingParams(max_tokens=1)),
        Generate(11, 4, params=SamplingParams(max_tokens=1)),
    )
    await c.result(10)
    await c.result(11)
    once = c.gateway.tokenizer.encode("Once")
    prompts = [prompt_of(c, i) for i in range(2, 4)]
    assert once + words in prompts
    assert once + words + ids_of_words(c, " later") in prompts


async def test_forks_share_text_that_may_still_merge(client: MakeClient) -> None:
    c = client(tokenizer=load("gpt2"))
    c.send(Open(1, 1), Append(2, 1, text("The quick brown fo")))
    for n in range(3):
        c.send(
            Open(10 + n, 2 + n, parent=1),
            Append(20 + n, 2 + n, text(("x jumps", "rest", "od")[n])),
            Generate(30 + n, 2 + n),
        )
    for n, word in enumerate(("x jumps", "rest", "od")):
        await c.result(30 + n)
        assert prompt_of(c, n) == load("gpt2").encode("The quick brown fo" + word)


async def test_quotes_wait_and_take_what_was_gained_so_far(client: MakeClient) -> None:
    c = client()
    c.engine.script = lambda m: ids_of_words(c, " cat" if len(c.engine.submitted) == 1 else " dog")
    c.send(
        Open(1, 1),
        Append(2, 1, text("Pets:")),
        Open(3, 2, parent=1),
        Append(4, 2, text(" a")),
        Generate(5, 2, params=SamplingParams(max_tokens=1)),
        Append(6, 1, (Quote(2), Text("."))),
        Append(7, 2, text(" not quoted")),
        Generate(8, 1),
    )
    await c.result(8)
    assert prompt_of(c) == c.gateway.tokenizer.encode("Pets: a cat.")
    assert [e.op for e in c.events if not isinstance(e, Chunk)].index(5) < [
        e.op for e in c.events
    ].index(6)


async def test_quoted_ids_are_spelled(client: MakeClient) -> None:
    c = client(tokenizer=load("gpt2"))
    words = c.gateway.tokenizer.encode(" cats and dogs")
    c.send(
        Open(1, 1),
        Append(2, 1, text("Pets:")),
        Open(3, 2, parent=1),
        Append(4, 2, (Tokens(tuple(words)), Text("!"))),
        Append(5, 1, (Quote(2),)),
        Generate(6, 1),
    )
    await c.result(6)
    assert prompt_of(c) == c.gateway.tokenizer.encode("Pets: cats and dogs!")


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
    """In one piece, one by one, streamed: with a character in parts and a stop token at the end."""
    found = []
    for pieces, stream in ((1, False), (1, True), (3, True), (100, False), (100, True)):
        c = client()
        words = c.gateway.tokenizer.encode(" a € b 中", add_special_tokens=False)
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


async def test_quotes_keep_template_text_special(client: MakeClient) -> None:
    c = client(tokenizer=load("qwen3"))
    c.send(
        Open(1, 1),
        Append(2, 1, text("a")),
        Open(3, 2, parent=1),
        Append(4, 2, (Text("<|im_start|>", True), Text("<|im_end|>"))),
        Append(5, 1, (Quote(2),)),
        Generate(6, 1),
    )
    await c.result(6)
    special = [i for i in prompt_of(c) if c.gateway.tokenizer.is_special(i)]
    assert special == [c.gateway.tokenizer.id_of("<|im_start|>")]


async def test_start_of_a_sequence(client: MakeClient) -> None:
    c = client()
    tokenizer = c.gateway.tokenizer
    word = tokenizer.encode("Once", False)
    for n, (parts, expected) in enumerate(
        [
            ((Text("Once"),), [1, *word]),
            ((Text("Once", True),), word),
            ((Text("<s>Once", True),), [1, *word]),
            ((Text("", True), Text("Once")), [1, *word]),
            ((Text(""), Text("Once", True)), [1, *word]),
            ((Tokens(tuple(word)),), word),
            ((), [1]),
        ]
    ):
        c.send(Open(10 * n + 1, n), Append(10 * n + 2, n, parts), Generate(10 * n + 3, n))
        await c.result(10 * n + 3)
        assert prompt_of(c) == expected, parts


async def test_prefill_computes_what_is_certain(client: MakeClient) -> None:
    c = client(tokenizer=load("gpt2"))
    c.send(Open(1, 1), Append(2, 1, text("The quick brown fo")), Prefill(3, 1))
    event = await c.result(3)
    assert isinstance(event, Done) and event.usage is not None
    assert prompt_of(c) == load("gpt2").encode("The quick brown")
    assert event.usage.prompt_tokens == 3 and event.usage.cached_tokens == 1
    assert c.engine.submitted[0].params.max_tokens == 0
    c.send(Open(4, 2), Prefill(5, 2))
    assert await c.result(5) == Done(5, Usage())


# ---------------------------------------------------------------- what a Generate says


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
    assert generated.usage.prompt_tokens == len(c.gateway.tokenizer.encode("Once"))
    for index, output in enumerate(generated.outputs):
        chunks = [e for e in c.of(3) if isinstance(e, Chunk) and e.index == index]
        assert "".join(e.text for e in chunks) == output.text
        assert sum((e.token_ids for e in chunks), ()) == output.token_ids
    c.send(Generate(4, 1))
    await c.result(4)
    assert prompt_of(c) == [*c.gateway.tokenizer.encode("Once"), *generated.outputs[0].token_ids]


async def test_seeds_are_drawn(client: MakeClient) -> None:
    c = client()
    c.send(Open(1, 1), *(Generate(n, 1) for n in range(2, 5)))
    await c.result(4)
    assert len({m.params.seed for m in c.engine.submitted}) == 3


@pytest.mark.parametrize("keep", [False, True])
async def test_stop_string_cuts_inside_a_token(client: MakeClient, keep: bool) -> None:
    c = client(tokenizer=load("gpt2"))
    ids = load("gpt2").encode(" one two three", False)
    c.engine.script = lambda _: [*ids, *ids]
    params = SamplingParams(stop=("wo th",), max_tokens=50, no_stop_trim=keep)
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
    assert (output.finish_reason, output.matched) == ("stop", "wo th")
    assert output.token_ids == tuple(ids)  # everything that was sampled
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


async def test_half_characters_are_held_back(client: MakeClient) -> None:
    c = client()
    ids = ids_of_words(c, " 🙂 你 x")
    c.engine.script = lambda _: list(ids)
    c.send(Open(1, 1), Append(2, 1, text("Once")), Generate(3, 1, stream=True))
    generated = await c.result(3)
    assert isinstance(generated, Generated) and generated.outputs[0].text == " 🙂 你 x"
    assert all("\ufffd" not in e.text for e in c.of(3) if isinstance(e, Chunk))


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
    prompt = c.gateway.tokenizer.encode("Once upon")
    assert [t.token_id for t in generated.prompt_logprobs] == prompt
    assert generated.prompt_logprobs[0].logprob is None
    assert generated.prompt_logprobs[-1].logprob == score(tuple(prompt))
    assert "".join(t.text for t in generated.prompt_logprobs[1:]) == " Once upon"
    assert generated.timing.total >= generated.timing.first_token > 0
    assert generated.timing.queued == 0.001


async def test_context_length(client: MakeClient, stories: Tokenizer) -> None:
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
    c.send(Open(10, 4), Append(11, 4, text("hello" * 100_000)))
    await c.result(11)
    assert failed(c, 11)[0] == "context_length_exceeded"


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("op", "needle"),
    [
        (Append(2, 1, (Tokens((99999,)),)), "99999 is not a token id"),
        (Append(2, 1, (Tokens((-1,)),)), "-1 is not a token id"),
        (Append(2, 1, (Tokens((5, 2**40)),)), "1099511627776 is not a token id"),
        (Append(2, 1, (Quote(77),)), "quoted branch 77 is not open"),
        (Append(2, 1, (Text("\ud800"),)), "not valid Unicode"),
        (Generate(2, 1, params=SamplingParams(stop_token_ids=(5000,))), "stop_token_ids: 5000"),
        (Generate(2, 1, params=SamplingParams(logit_bias={-3: 1.0})), "logit_bias: -3"),
        (Generate(2, 1, params=SamplingParams(stop=("a", "b" * 2000))), "stop[1] has 2000"),
        (Select(2, 1, ()), "no choices"),
        (Select(2, 1, ("a", "")), "choice 1 is empty"),
    ],
)
async def test_bad_operations_break_their_branch_only(
    client: MakeClient, op: Op, needle: str
) -> None:
    c = client()
    c.send(
        Open(1, 1),
        Open(10, 9, parent=1),
        op,
        Append(3, 1, text("x")),
        Open(4, 2, parent=1),
        Generate(5, 2),
        Close(6, 1),
        Append(11, 9, text("fine")),
        Generate(12, 9),
    )
    assert isinstance(await c.result(12), Generated)
    code, message = failed(c, 2)
    assert code == "invalid_request" and needle in message
    for later in (3, 4, 5):
        assert failed(c, later) == ("cancelled", message)
    assert c.terminal(6) == Done(6)


async def test_empty_branch(client: MakeClient) -> None:
    c = client(tokenizer=load("gpt2"))
    c.send(Open(1, 1), Generate(2, 1))
    await c.result(2)
    assert failed(c, 2)[0] == "invalid_request" and "empty" in failed(c, 2)[1]


async def test_unknown_and_duplicate_branches(client: MakeClient) -> None:
    c = client()
    c.send(
        Generate(1, 5),
        Open(2, 1),
        Open(3, 1),
        Append(4, 1, text("still there")),
        Open(5, 6, parent=44),
        Append(6, 6, text("x")),
        Open(0, 8),
        Hello(7, 1),
        Close(8, 1),
        Close(9, 1),
        Open(10, 1),
    )
    await c.result(10)
    await c.result(6)
    assert failed(c, 1)[1] == "branch 5 is not open"
    assert "open already" in failed(c, 3)[1]
    assert c.terminal(4) == Done(4)
    assert failed(c, 5)[0] == "invalid_request" and failed(c, 6)[0] == "cancelled"
    assert failed(c, 0)[0] == "invalid_request" and failed(c, 7)[0] == "protocol"
    assert c.terminal(8) == Done(8) and failed(c, 9)[0] == "invalid_request"
    assert c.terminal(10) == Done(10)


async def test_engine_errors_keep_their_type(client: MakeClient) -> None:
    c = client()
    c.engine.script = lambda m: Overloaded("too many") if m.rid == 2 else [5] * 1000
    c.send(
        Open(1, 1),
        Append(2, 1, text("x")),
        Generate(3, 1, params=SamplingParams(n=3, max_tokens=1000)),
        Generate(4, 1),
    )
    await c.result(4)
    assert failed(c, 3) == ("overloaded", "too many")
    assert failed(c, 4) == ("cancelled", "too many")
    # The other samples were ended too.
    assert not c.engine.running and sorted(c.engine.aborted) == [1, 3]


async def test_cancel_running_and_queued(client: MakeClient) -> None:
    c = client()
    c.engine.paused = True
    c.send(
        Open(1, 1),
        Append(2, 1, text("x")),
        Open(20, 2, parent=1),
        Generate(3, 1, params=SamplingParams(max_tokens=8), stream=True),
        Append(4, 1, text("y")),
        Open(5, 3, parent=1),
        Generate(21, 2),
        Append(22, 2, (Quote(1),)),
    )
    await c.settle()
    c.engine.step()
    assert len(c.engine.running) == 2
    c.send(Cancel(6, 1), Append(7, 1, text("z")), Close(8, 1))
    await c.settle()
    for op in (3, 4, 5, 7):
        assert failed(c, op) == ("cancelled", "cancelled by the client")
    assert c.terminal(6) == Done(6) and c.terminal(8) == Done(8)
    order = [e.op for e in c.events if e.op in (3, 4, 6, 7, 8) and not isinstance(e, Chunk)]
    assert order == [3, 4, 6, 7, 8]
    assert c.engine.aborted == [1] and list(c.engine.running) == [2]
    c.engine.paused = False
    c.engine._schedule()
    assert isinstance(await c.result(21), Generated)
    await c.result(22)
    assert failed(c, 22)[0] == "cancelled" and "quoted branch 1" in failed(c, 22)[1]


async def test_cancel_behind_a_close(client: MakeClient) -> None:
    c = client()
    c.engine.paused = True
    c.send(Open(1, 1), Append(2, 1, text("x")), Generate(3, 1), Close(4, 1))
    c.send(Open(5, 1), Append(6, 1, text("y")), Generate(7, 1), Close(8, 1))  # the id again
    await c.settle()
    assert len(c.engine.running) == 2
    c.send(Cancel(9, 1))
    await c.settle()
    assert failed(c, 7) == ("cancelled", "cancelled by the client")
    assert c.terminal(8) == Done(8) and c.terminal(9) == Done(9) and c.terminal(3) is None
    c.engine.paused = False
    c.engine._schedule()
    assert isinstance(await c.result(3), Generated)
    await c.settle()
    c.send(Cancel(10, 1))
    await c.settle()
    assert failed(c, 10) == ("invalid_request", "branch 1 is not open")


async def test_cancel_while_waiting_for_a_parent(client: MakeClient) -> None:
    c = client()
    c.engine.paused = True
    c.send(Open(1, 1), Append(2, 1, text("x")), Generate(3, 1), Open(4, 2, parent=1))
    await c.settle()
    c.send(Cancel(5, 2))
    await c.settle()
    assert failed(c, 4)[0] == "cancelled" and c.terminal(5) == Done(5)
    assert c.terminal(3) is None
    c.engine.paused = False
    c.engine._schedule()
    assert isinstance(await c.result(3), Generated)


async def test_close_frees_everything(client: MakeClient) -> None:
    c = client()
    c.engine.paused = True
    c.send(Open(1, 1, program="p"), Append(2, 1, text("x")), Generate(3, 1))
    c.send(Open(4, 2, parent=1, program="ignored"), Open(5, 3, program="q", namespace="n"))
    c.send(Append(6, 3, text("x")), Generate(7, 3))
    await c.settle()
    assert c.engine.submitted[0].program != c.engine.submitted[1].program
    assert [m.namespace for m in c.engine.submitted] == ["", "n"]
    count = len(c.events)
    c.session.close()
    await c.settle()
    assert not c.engine.running and c.gateway.branch_count == 0 and c.gateway.session_count == 0
    assert len(c.events) == count
    assert len(c.engine.released) == 2
    c.send(Ping(8))
    c.session.close()
    await c.settle()
    assert len(c.events) == count


async def test_programs_end_with_their_last_branch(client: MakeClient) -> None:
    c = client()
    c.send(Open(1, 1, program="p"), Open(2, 2, parent=1), Close(3, 1))
    await c.result(3)
    assert c.engine.released == []
    c.send(Close(4, 2))
    await c.result(4)
    assert len(c.engine.released) == 1
    other = Client(c.gateway, c.engine)
    other.send(Open(1, 1, program="p"), Close(2, 1))
    await other.result(2)
    # Another client's program of the same name is another program.
    assert len(set(c.engine.released)) == 2


async def test_branch_bound(client: MakeClient) -> None:
    c = client(max_branches=3)
    c.send(*(Open(n, n) for n in range(1, 9)), Append(20, 4, text("x")))
    await c.settle()
    assert [type(c.terminal(n)) for n in range(1, 4)] == [Done] * 3
    assert all(failed(c, n)[0] == "overloaded" for n in range(4, 9))
    assert failed(c, 20)[0] == "cancelled"
    c.send(*(Close(30 + n, n) for n in range(1, 7)))
    await c.settle()
    assert c.gateway.branch_count == 0
    c.send(Open(40, 1))
    assert await c.result(40) == Done(40)


async def test_operations_of_the_session(client: MakeClient) -> None:
    c = client()
    c.send(Ping(1), FlushCache(2), GetStatus(3))
    await c.result(3)
    assert c.terminal(1) == Done(1) and c.terminal(2) == Done(2) and c.engine.flushes == 1
    status = c.terminal(3)
    assert isinstance(status, Status)
    assert status.values == {"submitted": 0, "sessions": 1, "branches": 0}
    c.send(Open(4, 1), Goodbye(5), Ping(6))
    await c.settle()
    assert c.terminal(5) == Done(5) and c.terminal(6) is None
    assert c.session.closed and c.gateway.branch_count == 0


async def test_long_texts_are_tokenized_in_order(client: MakeClient) -> None:
    """Texts long enough for a thread keep their place among short ones."""
    c = client(engine=FakeEngine(4096, context_length=100_000, capacity_tokens=100_000))
    long = "once upon a time " * 500
    c.send(Open(1, 1), Append(2, 1, text(long)), Generate(3, 1), Append(4, 1, text("x")))
    c.send(Open(5, 2, parent=1), Close(6, 1), Generate(7, 2))
    await until(lambda: c.terminal(7) is not None)
    assert [e.op for e in c.events if e.op in (2, 3, 4, 6)] == [2, 3, 4, 6]
    assert prompt_of(c, 0) == c.gateway.tokenizer.encode(long)


# ---------------------------------------------------------------- fuzz


@pytest.mark.parametrize("seed", range(30))
async def test_one_terminal_event_per_operation(client: MakeClient, seed: int) -> None:
    """Whatever is sent, and whenever branches are cancelled or the engine fails."""
    rng = random.Random(seed)
    c = client(max_branches=12)
    c.engine.tokens_per_step = rng.randrange(1, 4)
    c.engine.script = lambda m: (
        InternalError("boom") if rng.random() < 0.1 else [rng.randrange(3, 4096) for _ in range(6)]
    )
    sent: dict[int, Op] = {}
    for number in range(1, 150):
        branch, other = rng.randrange(8), rng.randrange(8)
        op: Op = rng.choice(
            [
                Open(number, branch),
                Open(number, branch, parent=other, program="p"),
                Append(number, branch, text(rng.choice(("abc", " x", "<s>", "é")))),
                Append(number, branch, (Text("y"), Quote(other), Tokens((rng.randrange(5000),)))),
                Generate(number, branch, stream=True, params=SamplingParams(n=2, stop=("e",))),
                Generate(number, branch),
                Prefill(number, branch),
                Select(number, branch, ("yes", "no")),
                Cancel(number, branch),
                Close(number, branch),
                Ping(number),
                GetStatus(number),
            ]
        )
        sent[number] = op
        c.send(op)
        for _ in range(rng.choice((0, 0, 0, 1, 5, 40))):
            await asyncio.sleep(0)
    for number in sent:
        await c.result(number)
    per_branch: dict[int, list[int]] = {}
    for event in c.events:
        branch_id = getattr(sent[event.op], "branch", None)
        if branch_id is not None and not isinstance(event, Chunk):
            message = getattr(event, "message", "")
            if "is not open" not in message and "open already" not in message:
                per_branch.setdefault(branch_id, []).append(event.op)
    for order in per_branch.values():
        spans = "".join("C" if isinstance(sent[n], Close) else "." for n in order)
        for span, ops in zip(spans.split("C"), _split(order, sent), strict=True):
            assert ops == sorted(ops), span
    assert all(
        e.code != "internal" or e.message == "boom" for e in c.events if isinstance(e, Failed)
    )
    c.session.close()
    await c.settle()
    assert not c.engine.running and c.gateway.branch_count == 0


def _split(order: list[int], sent: dict[int, Op]) -> list[list[int]]:
    """Op numbers of one branch id, one list per branch that bore it."""
    groups: list[list[int]] = [[]]
    for number in order:
        groups[-1].append(number)
        if isinstance(sent[number], Close):
            groups.append([])
    return groups


async def test_what_may_wait_is_bounded(client: MakeClient) -> None:
    c = client(max_message_bytes=100_000)
    c.engine.paused = True
    c.send(Open(1, 1), Append(2, 1, text("x")), Generate(3, 1), Open(4, 2))
    for op in range(5, 105):
        c.send(Append(op, 1, text("y" * 10_000)))
    c.send(Append(200, 2, text("z")))
    await c.settle()
    assert failed(c, 104)[0] == "overloaded" and failed(c, 5)[0] == "cancelled"
    assert "overloaded" in {failed(c, op)[0] for op in range(5, 105)}
    assert c.terminal(200) == Done(200)  # the other branch lives, and there is room again
    assert c.session._waiting_size == 0
