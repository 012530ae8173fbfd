"""Branches: the tokens a child starts with, quotes of others, the start of a sequence."""

from rootlace.wire.protocol import (
    Append,
    Chunk,
    Close,
    Done,
    Generate,
    Image,
    Open,
    Prefill,
    Quote,
    SamplingParams,
    Text,
    Tokens,
    Usage,
)
from tests.server.conftest import Client, load
from tests.server.operations import MakeClient, failed, ids_of_words, prompt_of, text


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
    assert prompt_of(c, 0) == c.model.tokenizer.encode("Once")
    assert prompt_of(c, 1) == c.model.tokenizer.encode("Once upon")
    c.engine.paused = False
    c.engine._schedule()
    c.send(
        Generate(10, 3, params=SamplingParams(max_tokens=1)),
        Generate(11, 4, params=SamplingParams(max_tokens=1)),
    )
    await c.result(10)
    await c.result(11)
    once = c.model.tokenizer.encode("Once")
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
    assert prompt_of(c) == c.model.tokenizer.encode("Pets: a cat.")
    assert [e.op for e in c.events if not isinstance(e, Chunk)].index(5) < [
        e.op for e in c.events
    ].index(6)


async def test_images_break_the_branch_of_a_model_that_reads_text(client: MakeClient) -> None:
    c = client()
    c.send(Open(1, 1), Append(2, 1, (Image(data=b"x"),)), Generate(3, 1))
    await c.settle()
    assert failed(c, 2) == ("invalid_request", "model reads text only: it takes no images")
    assert failed(c, 3)[0] == "cancelled"


async def test_quoted_ids_are_spelled(client: MakeClient) -> None:
    c = client(tokenizer=load("gpt2"))
    words = c.model.tokenizer.encode(" cats and dogs")
    c.send(
        Open(1, 1),
        Append(2, 1, text("Pets:")),
        Open(3, 2, parent=1),
        Append(4, 2, (Tokens(tuple(words)), Text("!"))),
        Append(5, 1, (Quote(2),)),
        Generate(6, 1),
    )
    await c.result(6)
    assert prompt_of(c) == c.model.tokenizer.encode("Pets: cats and dogs!")


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
    special = [i for i in prompt_of(c) if c.model.tokenizer.is_special(i)]
    assert special == [c.model.tokenizer.id_of("<|im_start|>")]


async def test_start_of_a_sequence(client: MakeClient) -> None:
    c = client()
    tokenizer = c.model.tokenizer
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


async def test_programs_end_with_their_last_branch(client: MakeClient) -> None:
    c = client()
    c.send(Open(1, 1, program="p"), Open(2, 2, parent=1), Close(3, 1))
    await c.result(3)
    assert c.engine.released == []
    c.send(Close(4, 2))
    await c.result(4)
    assert len(c.engine.released) == 1
    other = Client(c.model, c.engine)
    other.send(Open(1, 1, program="p"), Close(2, 1))
    await other.result(2)
    # A program of the same name from another client is separate.
    assert len(set(c.engine.released)) == 2


async def test_one_client_leaves_branches_for_others(client: MakeClient) -> None:
    c = client(max_branches=16)
    c.send(*(Open(n, n) for n in range(1, 20)))
    await c.settle()
    assert [type(c.terminal(n)) for n in range(1, 15)] == [Done] * 14
    assert all(failed(c, n)[0] == "overloaded" for n in range(15, 20))
    # Operations sent to the broken branch fail with its reason, until the id is used again.
    c.send(Append(30, 16, text("x")), Generate(31, 16), Close(32, 16), Append(33, 77, text("x")))
    await c.settle()
    for op in (30, 31, 32):
        assert failed(c, op)[0] == "cancelled" and "last ones are for others" in failed(c, op)[1]
    assert failed(c, 33) == ("invalid_request", "branch 77 is not open")
    other = Client(c.model, c.engine)
    other.send(Open(1, 1), Open(2, 2))
    assert [await other.result(1), await other.result(2)] == [Done(1), Done(2)]
    c.send(Close(20, 1))
    await c.settle()
    c.send(Open(21, 1))
    await c.settle()
    assert failed(c, 21)[0] == "overloaded"
    c.send(Close(22, 2), Close(23, 3), Open(24, 16), Append(25, 16, text("x")))
    await c.settle()
    assert [c.terminal(n) for n in (24, 25)] == [Done(24), Done(25)]
    c.session.close()
    other.session.close()
    assert not c.model.branches_of
