"""Operations for a session, and their events."""

from collections.abc import Callable

from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.protocol import (
    Failed,
    Text,
)
from tests.server.conftest import Client

MakeClient = Callable[..., Client]
"""The fixture `client`: makes a client of a new served model."""


def text(content: str, special: bool = False) -> tuple[Text, ...]:
    return (Text(content, special),)


def prompt_of(client: Client, index: int = -1) -> list[int]:
    return client.engine.submitted[index].token_ids.tolist()


def ids_of_words(client: Client, words: str) -> list[int]:
    return client.model.tokenizer.encode_pieces((Piece(words),), previous=5)


def failed(client: Client, op: int) -> tuple[str, str]:
    event = client.terminal(op)
    assert isinstance(event, Failed), event
    return event.code, event.message
