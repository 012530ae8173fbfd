"""Constraints compiled with llguidance, and the state machine of one constrained request."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from rootlace.errors import InvalidConstraint
from rootlace.protocol import Constraint

# Bounds on one constraint: beyond them it is refused instead of slowing everybody down.
MAX_SOURCE_BYTES = 2**20
MAX_CHOICES = 65536


class GrammarMatcher:
    """Where one request stands in its grammar. Not thread-safe; one per request."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fill_bitmask(self, out: np.ndarray) -> None:
        """Write the allowed tokens into `out`: contiguous int32, bit i of word w = token 32w+i.

        End-of-sequence tokens are allowed exactly where the text so far is complete.
        """
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)

    def advance(self, token_id: int) -> bool:
        """Consume a sampled token; False if the grammar forbids it."""
        return self._matcher.consume_token(token_id)

    def is_accepting(self) -> bool:
        """Whether the text so far is complete."""
        return self._matcher.is_accepting()

    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def error(self) -> str:
        """Why the matcher can go no further; empty where it can."""
        return self._matcher.get_error() if self._matcher.is_error() else ""


class Grammar:
    """A compiled constraint; shared by requests through `matcher()`."""

    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._prototype.deep_copy())


class _TextTokenizer:
    """What llguidance asks of a tokenizer; text never becomes a special token.

    llguidance tokenizes text that must follow. Its own tokenizer makes a special token of text that
    is spelled like one, which its grammars then refuse: the request could not go on.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        added = json.loads(tokenizer_json).get("added_tokens", [])
        special = [token for token in added if token["special"] and token["id"] < vocab_size]
        self._own = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token_ids)
        self.eos_token_id = self._own.eos_token
        self.bos_token_id = None
        self.tokens = [self._bytes(i) for i in range(vocab_size)]
        self.special_token_ids = [token["id"] for token in special]
        # llguidance calls some added tokens special that are not, such as <tool_call>: as text they
        # are themselves.
        contents = sorted((token["content"].encode() for token in special), key=len, reverse=True)
        self._special = re.compile(b"|".join(map(re.escape, contents))) if contents else None

    def _bytes(self, token_id: int) -> bytes:
        """What a token stands for; nothing where the vocabulary is padded."""
        data = self._own.decode_bytes([token_id])
        return b"" if data == b"<[%d]>" % token_id else data

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._special.finditer(text) if self._special else ():
            cut = match.start() + 1  # no special token is seen in either part
            ids += self._own.tokenize_bytes(text[start:cut])
            start = cut
        return ids + self._own.tokenize_bytes(text[start:])


class GrammarCompiler:
    """Compiles constraints for one tokenizer; the latest `cache_size` grammars are kept.

    `vocab_size` is the model's (masks have ceil(vocab_size / 32) words), `eos_token_ids` the tokens
    that end a complete text.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: list[int], cache_size: int = 256
    ) -> None:
        text = _TextTokenizer(tokenizer_json, vocab_size, eos_token_ids)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(text), n_vocab=vocab_size, eos_token=eos_token_ids
        )
        self._cache: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._cache_size = cache_size

    @classmethod
    def from_folder(
        cls, folder: Path, vocab_size: int, eos_token_ids: list[int]
    ) -> GrammarCompiler:
        """For the tokenizer of a model folder. Raises InvalidConstraint if it has none."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidConstraint(f"constraints need {path}, which does not exist")
        return cls(path.read_text(encoding="utf-8"), vocab_size, eos_token_ids)

    def compile(self, constraint: Constraint) -> Grammar:
        """Raises InvalidConstraint with the reason (for a schema: what in it) if it cannot hold."""
        cached = self._cache.get(constraint)
        if cached is not None:
            self._cache.move_to_end(constraint)
            return cached
        source = grammar_source(constraint)
        prototype = LLMatcher(self._tokenizer, source, log_level=0)
        if prototype.is_error():
            raise InvalidConstraint(f"{constraint.kind}: {prototype.get_error().strip()}")
        grammar = Grammar(prototype)
        self._cache[constraint] = grammar
        if len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return grammar


def grammar_source(constraint: Constraint) -> str:
    """The llguidance grammar of a constraint. Raises InvalidConstraint where it is malformed."""
    if len(constraint.source) > MAX_SOURCE_BYTES:
        raise InvalidConstraint(
            f"{constraint.kind}: {len(constraint.source)} characters exceed the bound of "
            f"{MAX_SOURCE_BYTES}"
        )
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.source)
    if constraint.kind == "ebnf":
        return LLMatcher.grammar_from_lark(constraint.source)
    if constraint.kind == "choices":
        return LLMatcher.grammar_from_regex(_choices_regex(constraint.source))
    return _schema_grammar(constraint)


def _choices_regex(source: str) -> str:
    try:
        choices = json.loads(source)
    except ValueError as error:
        raise InvalidConstraint(f"choices: not a JSON array: {error}") from None
    if not isinstance(choices, list) or not choices or len(choices) > MAX_CHOICES:
        raise InvalidConstraint(f"choices: must be a JSON array of 1 to {MAX_CHOICES} strings")
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise InvalidConstraint(f"choices[{index}]: must be a string of at least one character")
    # One regular expression: alternatives of the grammar's own are bounded to about 2,000.
    return "|".join("".join(map(_escaped, choice)) for choice in choices)


def _escaped(character: str) -> str:
    """A character as a regular expression."""
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):X}}}"


def _schema_grammar(constraint: Constraint) -> str:
    try:
        schema = json.loads(constraint.source)
    except (ValueError, RecursionError) as error:
        raise InvalidConstraint(f"json_schema: not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise InvalidConstraint("json_schema: must be a JSON object or boolean")
    if schema is False:
        raise InvalidConstraint("json_schema: the schema false allows nothing")
    flexible = constraint.whitespace == "flexible"
    options = {
        "whitespace_flexible": flexible,
        "item_separator": "," if not flexible else ", ",
        "key_separator": ":" if not flexible else ": ",
    }
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps({} if schema is True else schema), overrides=options
        )
    except ValueError as error:
        raise InvalidConstraint(f"json_schema: {error}") from None
