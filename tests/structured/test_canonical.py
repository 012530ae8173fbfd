"""Canonical tokens of forced text, against the tokenizers themselves on finite languages."""

import json
import random
from functools import cache
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from rootlace.runtime.structured.vocabulary.forced_tokens import Canonicalizer
from rootlace.runtime.structured.vocabulary.merges import PreTokenizer
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from tests.structured.canonical_tokens import encode

# What is cut and merged in odd ways: contractions, white space, digits, marks that compose, bytes
# of rare characters, tokens that are looked for first, and what JSON is made of.
PARTS = (
    "a", "s", "'", "'s", "'re", "'R", "ll", "it", "don't", " ", "  ", "\n", " \n", "\r\n", "\t",
    "1", "12", "2024", ".", ",", "...", '"', '":"', '{"name":"', "name", "é", "e\u0301", "\u0301",
    "中文", "한", "\u314f", "\u1161", "<think>", "<thi", "nk>", "</", "<tool_call>", "▁", "😀",
    "\u00a0", "=", "\u0338", "HELLO", "World", "ing", "!\n", "-", "\u0345", "ſ", "\u2028", "tion",
    "://", "))",
)  # fmt: skip

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sample_text(rng: random.Random, at_most: int) -> str:
    return "".join(rng.choice(PARTS) for _ in range(rng.randint(0, at_most)))


def trained(pattern: str, *, ignore_merges: bool = False) -> Tokenizer:
    """Train a byte-level tokenizer of 600 tokens on the samples' words."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(5)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([sample_text(rng, 12) for _ in range(400)], trainer)
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def in_pieces(split: bool) -> Tokenizer:
    """Make a tokenizer like SentencePiece: spaces are letters, rare bytes fall back. Words are cut
    before spaces (`split`) or not at all."""
    rng = random.Random(6)
    texts = [sample_text(rng, 12).replace("中文", "") for _ in range(400)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=split)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fallback = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=fallback, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@cache
def vocabulary_of(name: str, folder: Path | None) -> Vocabulary:
    if folder is not None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    elif "pieces" in name:
        tokenizer = in_pieces(split=name == "like pieces")
    else:
        tokenizer = trained(LLAMA3 if "llama3" in name else O200K, ignore_merges="llama3" in name)
    eos = next(
        token
        for text in ("<eos>", "<|endoftext|>", "</s>")
        if (token := tokenizer.token_to_id(text)) is not None
    )
    return Vocabulary.from_tokenizer(tokenizer, eos_token_ids=[eos])


@cache
def canonicalizer_of(vocabulary: Vocabulary) -> Canonicalizer:
    return Canonicalizer(vocabulary)


NAMES = (
    "demo",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "qwen3")),
    "stories3M",
    "like llama3",
    "like o200k",
    "like pieces",
    "like whole pieces",
)


@pytest.fixture(scope="module", params=NAMES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    name = request.param
    if name.startswith("like"):
        return vocabulary_of(name, None)
    if name == "demo":
        return vocabulary_of(name, request.getfixturevalue("demo_model"))
    data = request.getfixturevalue("shared_dir") / "data"
    return vocabulary_of(name, data / ("models" if name == "stories3M" else "tokenizers") / name)


class Finite:
    """A language of a few texts."""

    def __init__(self, texts: list[bytes]) -> None:
        self.texts = texts

    def forced(self, before: bytes) -> bytes:
        """Return the common continuation of all texts that begin with `before`."""
        rest = [text[len(before) :] for text in self.texts if text.startswith(before)]
        least, most = min(rest), max(rest)
        same = (n for n, byte in enumerate(least) if n == len(most) or byte != most[n])
        return least[: next(same, len(least))]

    def may_follow(self, before: bytes) -> bool:
        return any(text.startswith(before) for text in self.texts)


def random_language(rng: random.Random) -> Finite:
    middle = sample_text(rng, 5)
    opening = sample_text(rng, 6)
    texts = {
        opening * rng.randint(0, 1) + sample_text(rng, 3) + middle + sample_text(rng, 3)
        for _ in range(rng.randint(1, 5))
    }
    return Finite(sorted(text.encode() for text in texts if text) or [b"x"])


def spell(vocabulary: Vocabulary, tokens: list[int]) -> bytes:
    return b"".join(vocabulary.token_bytes[token] for token in tokens)


def forced_tokens(
    canonicalizer: Canonicalizer, language: Finite, before: bytes, context: list[int], forced: bytes
) -> list[int]:
    return canonicalizer.tokens_after(
        canonicalizer.tail(context),
        forced,
        lambda text: language.may_follow(before + forced + text),
        before + forced in language.texts,
    )


@cache
def places(vocabulary: Vocabulary, text: bytes) -> set[tuple[int, int]] | None:
    """Return the canonical tokens of a text with their starts; None if they spell another text."""
    tokens = encode(vocabulary, text)
    if spell(vocabulary, tokens) != text:
        return None
    starts = [len(spell(vocabulary, tokens[:index])) for index in range(len(tokens))]
    return set(zip(starts, tokens, strict=True))


@pytest.mark.slow
def test_forced_tokens_stand_in_every_text_that_may_come(vocabulary: Vocabulary) -> None:
    canonicalizer = canonicalizer_of(vocabulary)
    rng = random.Random(1)
    positions = forced_count = 0
    for _ in range(12):
        language = random_language(rng)
        for text in language.texts:
            if rng.random() < 0.3:  # as a model that cuts where the tokenizer would not
                text = text[: rng.randint(0, len(text))]
            context = encode(vocabulary, text)
            if spell(vocabulary, context) != text:
                continue
            for index in range(len(context)):
                before = spell(vocabulary, context[:index])
                forced = language.forced(before)
                if rng.random() < 0.3:
                    forced = forced[: rng.randint(0, len(forced))]
                tokens = forced_tokens(canonicalizer, language, before, context[:index], forced)
                assert forced.startswith(spell(vocabulary, tokens))
                positions += 1
                forced_count += len(tokens)
                for whole in language.texts:
                    found = places(vocabulary, whole) if whole.startswith(before) else None
                    at = len(before)
                    for token in tokens if found is not None else ():
                        assert (at, token) in found, (whole, before, forced, tokens)
                        at += len(vocabulary.token_bytes[token])
    assert positions > 60
    assert forced_count > positions  # and not because nothing is forced


def test_a_short_tail_says_as_much_as_the_whole_context(vocabulary: Vocabulary) -> None:
    canonicalizer = canonicalizer_of(vocabulary)
    rng = random.Random(2)
    shorter = tried = 0
    while tried < 150:
        text = (" ".join(sample_text(rng, 2) for _ in range(4)) + "x").encode()
        cut = rng.randint(0, len(text))
        context = encode(vocabulary, text[:cut])
        if spell(vocabulary, context) != text[:cut] or len(context) > 200:
            continue
        tried += 1
        language = Finite([text])
        tail = canonicalizer.tail(context)
        assert tail is not None and text[:cut].endswith(tail)
        shorter += len(tail) < cut
        short = forced_tokens(canonicalizer, language, text[:cut], context, text[cut:])
        whole = canonicalizer.tokens_after(text[:cut], text[cut:], lambda text: False, True)
        assert short == whole, text
    assert shorter > 50


def test_the_whole_text_is_forced_where_there_is_only_one(vocabulary: Vocabulary) -> None:
    canonicalizer = canonicalizer_of(vocabulary)
    for text in ('{"name":"it\'s","age":12}', "  two  spaces\n\n", "naïve 中文 😀", " x"):
        data = text.encode()
        assert canonicalizer.tokens_after(
            canonicalizer.tail([]), data, lambda text: False, True
        ) == encode(vocabulary, data)


def test_text_around_an_added_token_that_nothing_cuts() -> None:
    """This tokenizer has no pre-tokenizer."""
    tokenizer = in_pieces(split=False)
    tokenizer.pre_tokenizer = None
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    data = b"one<think>two"
    ids = tokenizer.encode(data.decode()).ids
    assert tokenizer.token_to_id("<think>") in ids[1:-1]
    canonicalizer = Canonicalizer(Vocabulary.from_tokenizer(tokenizer, eos_token_ids=[1]))
    tail = canonicalizer.tail([])
    assert list(canonicalizer.tokens_after(tail, data, lambda text: False, True)) == ids


@pytest.fixture(scope="module")
def gpt2(shared_dir: Path) -> Vocabulary:
    return vocabulary_of("gpt2", shared_dir / "data" / "tokenizers" / "gpt2")


@pytest.fixture(scope="module")
def qwen3(shared_dir: Path) -> Vocabulary:
    return vocabulary_of("qwen3", shared_dir / "data" / "tokenizers" / "qwen3")


@pytest.fixture(scope="module")
def stories(shared_dir: Path) -> Vocabulary:
    return vocabulary_of("stories3M", shared_dir / "data" / "models" / "stories3M")


def forced_words(vocabulary: Vocabulary, texts: list[str], before: str = "") -> list[str]:
    """Return the forced text in a language of these texts, behind the canonical tokens of
    `before`."""
    language = Finite([text.encode() for text in texts])
    context = encode(vocabulary, before.encode())
    forced = language.forced(before.encode())
    tokens = forced_tokens(canonicalizer_of(vocabulary), language, before.encode(), context, forced)
    return [vocabulary.token_bytes[token].decode(errors="replace") for token in tokens]


def test_contractions_wait_for_the_letters_that_decide(gpt2: Vocabulary) -> None:
    assert forced_words(gpt2, ["it's", "it's all"]) == ["it", "'s"]
    assert forced_words(gpt2, ["they're", "they'red"]) == ["they", "'re"]
    # ' alone is a token before x, and part of one before r (where re or else r comes).
    assert forced_words(gpt2, ["they'x", "they're"]) == ["they"]
    assert forced_words(gpt2, ["they'ra", "they're"]) == ["they"]
    assert forced_words(gpt2, ["they'xa", "they'xe"]) == ["they", "'"]


def test_white_space_waits_for_what_ends_it(gpt2: Vocabulary, qwen3: Vocabulary) -> None:
    assert forced_words(gpt2, ["a  b", "a  c"]) == ["a", " "]
    assert forced_words(gpt2, ["a\n\nb", "a\n\n\nb"]) == ["a"]
    assert forced_words(gpt2, ["a\n\n", "a\n\nb"]) == ["a"]
    assert forced_words(gpt2, ["a\n\nb", "a\n\nc"]) == ["a", "\n", "\n"]
    assert forced_words(qwen3, ["a  b", "a  \n"]) == ["a"]
    assert forced_words(qwen3, ["a.\n", "a.\nb"]) == ["a", ".\n"]
    assert forced_words(qwen3, ["a.\n\n", "a.\nb"]) == ["a"]


def test_a_mark_that_composes_takes_its_letter_along(qwen3: Vocabulary, gpt2: Vocabulary) -> None:
    texts = ["to be", "to be\u0301", "to be\u0316\u0301"]
    assert forced_words(qwen3, texts) == ["to"]
    assert forced_words(gpt2, texts) == ["to", " be"]
    assert forced_words(qwen3, ["so a=", "so a=\u0338"]) == ["so"]
    assert forced_words(qwen3, ['a"', 'a"\u0338']) == ["a", '"']
    # What the tokenizer would change is left to the model, and everything behind it that is one
    # text with it; behind what the model has spelled, the tokenizer's own tokens come again.
    assert forced_words(qwen3, ["is e\u0301 it is"]) == ["is"]
    assert forced_words(qwen3, ["is é it is"]) == ["is", " é", " it", " is"]


def test_tokens_that_are_looked_for_first(qwen3: Vocabulary) -> None:
    assert forced_words(qwen3, ["<think>\nHm", "<think>\nSo"]) == ["<think>", "\n"]
    assert forced_words(qwen3, ["a <think>", "a <thin"]) == ["a"]
    assert forced_words(qwen3, ["a  <think>", "a  x"]) == ["a"]


def test_what_the_model_cut_elsewhere_is_left_to_it(gpt2: Vocabulary) -> None:
    language = Finite([b'{"name":"Ann","age":3}'])
    quote = encode(gpt2, b'"')
    before = b'{"name":"Ann"'
    context = encode(gpt2, b'{"name":"Ann') + quote
    assert spell(gpt2, context) == before
    canonicalizer = canonicalizer_of(gpt2)
    # The tokenizer has "," in one.
    assert forced_tokens(canonicalizer, language, before, context, b',"age":3}') == []
    after = context + encode(gpt2, b',"')
    tokens = forced_tokens(canonicalizer, language, before + b',"', after, b'age":3}')
    assert tokens == encode(gpt2, b'{"name":"Ann","age":3}')[-len(tokens) :]
    assert spell(gpt2, tokens) == b'age":3}'


def test_no_space_is_put_before_pieces(stories: Vocabulary) -> None:
    words = forced_words(stories, ["Once upon a time, a", "Once upon a time, b"])
    assert "".join(words) == "Once upon a time,"
    expected = encode(stories, b"Once upon a time,")
    assert words == [stories.token_bytes[token].decode() for token in expected]


def test_half_a_character_is_not_forced_further(gpt2: Vocabulary) -> None:
    assert forced_words(gpt2, ["(é)", "(è)"]) == ["("]
    language = Finite(["é!".encode()])
    context = encode(gpt2, "é".encode())
    assert len(context) == 1
    first = encode(gpt2, b"\xc3")
    assert spell(gpt2, first) == b"\xc3"
    canonicalizer = canonicalizer_of(gpt2)
    # Inside a token of the tokenizer's nothing is forced.
    assert forced_tokens(canonicalizer, language, b"\xc3", first, b"\xa9!") == []


def test_tokenizers_that_cannot_be_foreseen_force_nothing() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "<eos>": 2}, merges=[]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, eos_token_ids=[2])
    canonicalizer = Canonicalizer(vocabulary)
    assert "Lowercase" in canonicalizer.unsupported
    assert canonicalizer.tail([0]) is None
    assert canonicalizer.tokens_after(canonicalizer.tail([]), b"ab", lambda text: False, True) == []


@pytest.mark.parametrize("pattern", [LLAMA3, O200K])
def test_sure_cuts_are_cuts_in_every_text(pattern: str) -> None:
    pre_tokenizer = PreTokenizer(json.loads(trained(pattern).to_str()))
    rng = random.Random(3)
    sure = 0
    for _ in range(2000):
        text = sample_text(rng, 6)
        ends = pre_tokenizer.ends(text)
        for position in range(1, len(text)):
            if pre_tokenizer.is_sure(text[position - 1], text[position]):
                assert position in ends, (text, position)
                sure += 1
    assert sure > 2000
