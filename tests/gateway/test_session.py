"""Branches, end to end through a session over the fake engine."""

from __future__ import annotations

from collections.abc import Callable

from rootlace.protocol import (
    Append,
    Chunk,
    Close,
    Done,
    Generate,
    Generated,
    Open,
    SamplingParams,
    Text,
)
from rootlace.runtime.engine.messages import unpack_ids
from rootlace.runtime.gateway.pieces import Piece
from tests.gateway.conftest import Client

MakeClient = Callable[..., Client]


def text(content: str, special: bool = False) -> tuple[Text, ...]:
    return (Text(content, special),)


def prompt_of(client: Client, index: int = -1) -> list[int]:
    return unpack_ids(client.engine.submitted[index].token_ids).tolist()


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
