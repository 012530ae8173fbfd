"""Operations of programs as requests to a server without programs.

Prompts are sent as token ids, with the server's own output in between. That favours the server over
text: the text of a random model's answer would have other tokens, of another number, that its cache
does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

Tokens = list[int]
Prompt = Sequence[str | Tokens]
"""Text, and what was generated."""


class Client(Protocol):
    async def complete(self, prompt: Prompt, tokens: int, regex: str | None = None) -> Tokens:
        """Complete with exactly so many tokens, greedily; with `regex`, a text that matches it."""

    async def choose(self, prompt: Prompt, choices: Sequence[str]) -> int:
        """Return the number of a choice: each is one token."""

    async def rank(self, prompt: Prompt, choices: Sequence[str]) -> int:
        """Return the number of the choice that is likeliest as a whole."""

    async def write_json(self, prompt: Prompt, schema: dict[str, Any]) -> str:
        """Write a record that fits the schema."""


class Encoder:
    """A model's tokenizer."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.size: int = self._tokenizer.get_vocab_size()
        self._known: dict[str, Tokens] = {}

    def ids(self, prompt: Prompt) -> Tokens:
        """Tokenize adjacent texts as one text."""
        ids: Tokens = []
        text = ""
        for part in (*prompt, []):
            if isinstance(part, str):
                text += part
                continue
            if text:
                ids += self._encode(text)
            ids += part
            text = ""
        return ids

    def _encode(self, text: str) -> Tokens:
        """Remember encoded texts: a user who sends text lets the server tokenize."""
        known = self._known.get(text)
        if known is None:
            known = self._tokenizer.encode(text, add_special_tokens=False).ids
            self._known[text] = known
        return known
