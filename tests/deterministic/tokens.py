"""A small tokenizer, constraints on its tokens, and a function in place of a model."""

import codecs
import json
from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.runtime.structured import GrammarCompiler
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.protocol import Constraint

POISON = "<poison>"
"""Special token that kills the engine that computes it."""
THORN = "<thorn>"
"""Special token that makes its step raise."""
_MERGES = (
    *("t h", "th e", "Ġ the", "Ġ a", "i n", "e r", "o n", "Ġ t", "a n", "an d", "Ġ and", "r e"),
    *("Ã ©", "Ġ {", '" :', '{ "', "n a", "m e", "na me", "a g", "ag e", "y e", "ye s", "2 3"),
    *("Ġ b", "l u", "lu e", "g re", "e n", "gre en", "re d", "Ġ c", "a t", "Ġc at"),
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz .,0123456789"
_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15 | 1


@cache
def fast_tokenizer() -> FastTokenizer:
    """Byte-level BPE with a handful of merges; `<s>` begins a text, `</s>` ends one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split() for merge in _MERGES)]
    pieces = [*alphabet, *dict.fromkeys(left + right for left, right in merges)]
    fast = FastTokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = ("<s>", "</s>", POISON, THORN)
    fast.add_special_tokens([AddedToken(content, special=True) for content in special])
    bos = fast.token_to_id("<s>")
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return fast


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(FastTokenizer.from_str(fast_tokenizer().to_str()))


@cache
def eos() -> int:
    return int(fast_tokenizer().token_to_id("</s>"))


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.from_tokenizer(fast_tokenizer(), eos_token_ids=[eos()])


def grammar_compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary())


@cache
def _likely() -> tuple[int, ...]:
    """Return the model's tokens without a constraint: mostly letters and words, seldom the end."""
    tok = fast_tokenizer()
    letters = [tok.encode(char, add_special_tokens=False).ids[0] for char in _LETTERS]
    words = [tok.token_to_id("".join(merge.split())) for merge in _MERGES]
    halves = [tok.token_to_id("Ã"), tok.token_to_id("©")]
    return (*letters, *words, *halves, eos(), eos(), eos())


def next_token(
    history: int,
    seed: int,
    temperature: float,
    allowed: np.ndarray | None = None,
    banned: Collection[int] = (),
) -> int:
    """Return the token behind a sequence with hash `history` (`hash_of`), -1 if there is none.

    With a temperature it depends on the seed. `allowed` (bool [vocab_size]) and `banned` narrow it.
    """
    mixed = _mix(history ^ _mix(seed & _MASK) if temperature > 0 else history)
    if allowed is None:
        likely = _likely()
        choices: Sequence[int] = [t for t in likely if t not in banned] if banned else likely
        return choices[mixed % len(choices)]
    found = np.flatnonzero(allowed)
    if banned:
        found = np.setdiff1d(found, list(banned))
    return int(found[mixed % len(found)]) if len(found) else -1


def hashes(tokens: Sequence[int]) -> list[int]:
    """Return the hash after each token, which `SimulatedExecutor` keeps as KV."""
    found, value, power = [], 0, 1
    for token in tokens:
        value = (value + (token + 1) * power) & _MASK
        power = power * _BASE & _MASK
        found.append(value)
    return found


def _mix(value: int) -> int:
    """splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def text_of(context: Sequence[int], tokens: Sequence[int]) -> list[tuple[str, bool]]:
    """Return the texts of the first 0, 1, 2, ... of `tokens` behind `context`, and whether each
    ends with a whole character; half ones are held back. The last entry has all of it."""
    table = tokenizer().visible_bytes
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(table[token] for token in context[-8:]))
    texts = [("", True)]
    for token in tokens:
        text = texts[-1][0] + decoder.decode(table[token])
        texts.append((text, not decoder.getstate()[0]))
    texts.append((texts[-1][0] + decoder.decode(b"", True), True))
    return texts


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [1, 23, 235]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHECKED = {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 3}
CONSTRAINTS = {
    "word": Constraint("regex", "[a-z]{3,9}"),
    "answer": Constraint("regex", "(yes|the (red|green|blue) cat) and [0-9]{2}"),
    "choices": Constraint("choices", '["red", "green", "the blue cat"]'),
    "schema": Constraint("json_schema", json.dumps(SCHEMA)),
    "plain": Constraint("json_schema", json.dumps(SCHEMA), jump_forward="off"),
    "checked": Constraint("json_schema", json.dumps(CHECKED)),
    "slow": Constraint("regex", "(the |and )+[a-z]{2}"),
    "explodes": Constraint("regex", "(a|b)*a(a|b){99}"),
}
"""By the names that scenarios know them by. "slow" takes seconds to compile, and "explodes" is
given up (see `engine.Compiler`)."""
