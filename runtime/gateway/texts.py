"""What a gateway reads of a model's files: its tokenizer, and how conversations are written."""

from __future__ import annotations

from dataclasses import dataclass

from rootlace.runtime.gateway.tokens.chat import ChatTemplate
from rootlace.runtime.gateway.tokens.tokenizer import Tokenizer
from rootlace.runtime.model.checkpoint.source import ModelSource, model_source


@dataclass(frozen=True)
class ModelTexts:
    """A model's files on texts and tokens, read."""

    source: ModelSource
    tokenizer: Tokenizer
    chat: ChatTemplate
    eos_ids: frozenset[int]

    @classmethod
    def read(cls, model: str) -> ModelTexts:
        source = model_source(model)
        tokenizer = Tokenizer.read(source)
        chat = load_chat(source, tokenizer)
        return cls(source, tokenizer, chat, load_eos_ids(source, tokenizer))


def load_chat(source: ModelSource, tokenizer: Tokenizer) -> ChatTemplate:
    """The model's chat template, knowing the tokenizer's special tokens."""
    special = [token.content for token in tokenizer.added.values() if token.special]
    bos = "".join(tokenizer.content(id_) or "" for id_ in tokenizer.bos_ids)
    return ChatTemplate.read(source, special, bos)


def load_eos_ids(source: ModelSource, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a text: those that the model's files name, and the tokenizer's own."""
    given = source.eos_token_id()
    ids = {given} if isinstance(given, int) else set(given or ())
    token = tokenizer.config.get("eos_token")
    content = token["content"] if isinstance(token, dict) else token
    own = tokenizer.id_of(content) if content else None
    return frozenset(ids if own is None else ids | {own})
