"""Canonical tokens of a text, as llguidance finds them with the tokenizer itself."""

import json
import re
import zlib
from functools import lru_cache

from llguidance import LLTokenizer

from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary


def encode(vocabulary: Vocabulary, text: bytes) -> list[int]:
    """No BOS, and special tokens are not recognised in the text."""
    tokenizer, special = _tokenizer(vocabulary)
    ids: list[int] = []
    start = 0
    for match in special.finditer(text) if special else ():
        cut = match.start() + 1  # no special token is seen in either part
        ids += tokenizer.tokenize_bytes(text[start:cut])
        start = cut
    return ids + tokenizer.tokenize_bytes(text[start:])


@lru_cache(maxsize=8)
def _tokenizer(vocabulary: Vocabulary) -> tuple[LLTokenizer, re.Pattern[bytes] | None]:
    """The tokenizer, and the pattern of special tokens: llguidance makes them of text that is
    spelled like one."""
    source = zlib.decompress(vocabulary.tokenizer_json).decode()
    tokenizer = LLTokenizer(
        source, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids), slices=[]
    )
    added = json.loads(source).get("added_tokens", [])
    special = [token["content"].encode() for token in added if token["special"]]
    contents = sorted(special, key=len, reverse=True)
    return tokenizer, re.compile(b"|".join(map(re.escape, contents))) if contents else None
