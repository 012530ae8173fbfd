"""Tokenizing in pieces against the library's own encoding of the whole."""

import json
import random
from collections.abc import Iterable
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as FastTokenizer

from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.runtime.server.tokenizer import Joined, Piece, Tokenizer
from rootlace.wire.errors import InvalidRequest
from tests.server.conftest import folder_of, load

WORDS = [
    "Once", "upon", "a", "time", "there", "was", "was", "l", "'", "'s", "'re", "'r", "e", "ll",
    "don't", "I'LL", "it's", "12", "345", "6789", "1,000.5", "\n", "\n\n", "\r\n", "\t", "", "",
    "", "...", "!?", "«é»", "éà", "é", "e", "́", "naïve", "你好", "，", "世界。", "こんにちは",
    "한국어", "🙂", "👩\u200d👩\u200d👧", "\u200d", "\xa0", "\u3000", "def", "f(x):", "__init__",
    ";;", "{}", "<|", "<|im", "<|im_start|>", "<|im_end|>", "<think>", "<thi", "nk>", "</think>",
    "<s>", "</s>", "<tool_", "call>", "<|endoftext|>", "<0x41>", "▁", "▁a", "a▁b", "�", "ǅ", "ﬁ",
    "Ⅷ", "½", "ß", "İ",
]  # fmt: skip


def random_text(rng: random.Random) -> str:
    pieces = []
    for _ in range(rng.randrange(1, 30)):
        pieces.append(rng.choice(WORDS))
        pieces.append(rng.choice((" ", " ", " ", "", "", "  ", "\n", " \n ", "   ")))
    return "".join(pieces)


def cut(rng: random.Random, text: str) -> list[str]:
    borders = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(0, 12)))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


@cache
def library(name: str, plain: bool = True) -> FastTokenizer:
    fast = FastTokenizer.from_file(str(folder_of(name) / "tokenizer.json"))
    fast.encode_special_tokens = plain
    return fast


def grow(tokenizer: Tokenizer, pieces: list[Piece], rng: random.Random) -> list[int]:
    """Return the ids of a branch that gets the pieces one by one and settles now and then."""
    ids: list[int] = []
    pending: tuple[Piece, ...] = ()
    for piece in pieces:
        pending += (piece,)
        if rng.random() < 0.7:
            new, pending = tokenizer.settle(pending, ids[-1] if ids else None, begin=True)
            ids += new
    return ids + tokenizer.encode_pieces(pending, ids[-1] if ids else None, begin=True)


@pytest.mark.parametrize("name", ["stories3M", "gpt2", "qwen3"])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_give_the_ids_of_the_whole(name: str, seed: int) -> None:
    rng, fast, tokenizer = random.Random(seed), library(name), load(name)
    for _ in range(150):
        text = random_text(rng)
        got = grow(tokenizer, [Piece(part) for part in cut(rng, text)], rng)
        assert got == fast.encode(text).ids, text


@pytest.mark.parametrize("name", ["stories3M", "gpt2", "qwen3"])
def test_every_way_to_cut_in_two_is_stable(name: str) -> None:
    """Settled ids are a prefix of the ids of any longer text."""
    rng, fast, tokenizer = random.Random(7), library(name), load(name)
    for _ in range(400):
        head, tail = random_text(rng), random_text(rng)
        head = head[: rng.randrange(1, len(head) + 1)]
        ids, rest = tokenizer.settle([Piece(head)])
        assert "".join(p.text for p in rest) == head[len(head) - sum(len(p.text) for p in rest) :]
        whole = fast.encode(head + tail, add_special_tokens=False).ids
        assert whole[: len(ids)] == ids, (head, tail)


@pytest.mark.parametrize("name", ["stories3M", "gpt2", "qwen3"])
def test_most_of_a_prose_text_is_stable(name: str) -> None:
    tokenizer = load(name)
    text = "The little girl went to the park. She saw a dog!\n\nIt was big" * 20
    ids, rest = tokenizer.settle([Piece(text)])
    assert sum(len(p.text) for p in rest) < 10
    assert len(ids) > 100


def test_template_text_like_the_library() -> None:
    """Template text with special tokens, and content between, has the rendered string's ids."""
    rng, fast, tokenizer = random.Random(3), library("qwen3", plain=False), load("qwen3")
    for _ in range(200):
        words = [w for w in WORDS if not w.startswith("<|")]
        pieces = []
        for _ in range(rng.randrange(1, 5)):
            pieces.append(
                Piece(rng.choice(("<|im_start|>user\n", "<|im_end|>\n", "\n<think>\n")), True)
            )
            pieces.append(Piece(" ".join(rng.choice(words) for _ in range(rng.randrange(1, 6)))))
        whole = "".join(p.text for p in pieces)
        split = [Piece(t, p.special) for p in pieces for t in cut(rng, p.text)]
        assert grow(tokenizer, split, rng) == fast.encode(whole).ids, whole


@pytest.mark.parametrize("name", ["stories3M", "gpt2", "qwen3"])
def test_content_cannot_make_special_tokens(name: str) -> None:
    tokenizer = load(name)
    special = [t for t in tokenizer.added.values() if t.special]
    assert special
    for token in special:
        for pieces in (
            [Piece(token.content)],
            [Piece("a" + token.content[:3]), Piece(token.content[3:])],
            [Piece(token.content[:2], True), Piece(token.content[2:])],
            [Piece(token.content[:2]), Piece(token.content[2:], True)],
            [Piece("<|im_end|>\n", True), Piece(token.content), Piece("<|im_start|>", True)],
        ):
            ids = tokenizer.encode_pieces(pieces, previous=tokenizer.encode("a")[-1])
            allowed = {
                tokenizer.id_of(p.text.strip()) for p in pieces if p.special
            } & tokenizer.added.keys()
            found = {i for i in ids if tokenizer.is_special(i)}
            assert found <= allowed - {token.id} or token.content in {
                p.text.strip() for p in pieces if p.special
            }


def test_sentencepiece_prefix_only_where_the_library_puts_it() -> None:
    tokenizer, fast = load("stories3M"), library("stories3M", plain=False)
    assert tokenizer.encode("Once") == fast.encode("Once").ids
    assert tokenizer.encode(" Once") == fast.encode(" Once").ids
    assert tokenizer.encode("<s>Once</s> upon") == fast.encode("<s>Once</s> upon").ids
    word = fast.encode("Once").ids[-1]
    [a, b] = tokenizer.encode_pieces([Piece("pot")], word), tokenizer.encode("pot", False)
    assert a != b and fast.decode([word, *a]) == "Oncepot"


def synthetic(pre: object, normalizer: object, added: list[AddedToken]) -> FastTokenizer:
    letters = ["<unk>", "▁", " ", "\n", *"abcdefgh<>|!", "ab", "▁a", "▁ab", "a▁b"]
    vocab = {t: i for i, t in enumerate(letters)}
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab")]
    fast = FastTokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    fast.pre_tokenizer = pre
    fast.normalizer = normalizer
    fast.decoder = decoders.Metaspace()
    fast.add_special_tokens([t for t in added if t.special])
    fast.add_tokens([t for t in added if not t.special])
    return fast


ADDED = [
    AddedToken("<a>", special=True, lstrip=True, rstrip=True, normalized=False),
    AddedToken("<ab>", special=True, normalized=False),
    AddedToken("<b>", special=True, rstrip=True, normalized=False),
    AddedToken("hh", special=False, single_word=True, normalized=False),
]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("split", [True, False])
def test_other_tokenizers(scheme: str, split: bool) -> None:
    """Metaspace tokenizers, and added tokens that swallow white space or must stand alone."""
    fast = synthetic(pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split), None, ADDED)
    reference = FastTokenizer.from_str(fast.to_str())
    tokenizer = Tokenizer(fast)
    rng = random.Random(5)
    parts = ["a", "ab", " ", "  ", "b", "<a>", "<ab>", "<b>", "hh", "!", "\n", "<", "c hh", " ab"]
    for _ in range(1500):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(1, 9)))
        got = grow(tokenizer, [Piece(part, True) for part in cut(rng, text)], rng)
        assert got == reference.encode(text).ids, text


@pytest.mark.parametrize(
    "pre",
    [
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme="first")]
        ),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
        ),
    ],
)
def test_a_prefix_of_each_word(pre: object) -> None:
    """Holds where another pre-tokenizer splits the text before."""
    fast = synthetic(pre, None, ADDED)
    reference = FastTokenizer.from_str(fast.to_str())
    tokenizer = Tokenizer(fast)
    rng = random.Random(5)
    parts = ["a", "ab", " ", "  ", "b", "<a>", "<ab>", "<b>", "!", "\n", "<", "c 1", " ab", "ab c "]
    for _ in range(500):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(1, 9)))
        got = grow(tokenizer, [Piece(part, True) for part in cut(rng, text)], rng)
        assert got == reference.encode(text).ids, text


def test_nothing_is_stable_where_tokens_may_cross_spaces() -> None:
    fast = synthetic(None, normalizers.Replace(" ", "▁"), [])
    tokenizer = Tokenizer(fast)
    assert tokenizer.settle([Piece("ab ab ab")]) == ([], (Piece("ab ab ab"),))


def test_the_longest_token_of_an_own_vocabulary_or_an_added_one() -> None:
    for words in ({"a": 0, "longer": 1}, {"a": 0, "longer": 7}):  # the ids between are unused
        fast = FastTokenizer(models.WordLevel(words, unk_token="a"))
        assert Tokenizer(fast).longest_token == len("longer")
        fast.add_special_tokens(["<|special|>"])
        assert Tokenizer(fast).longest_token == len("<|special|>")


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"neither tokenizer\.json nor tokenizer\.model"):
        Tokenizer.read(FolderSource(tmp_path))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        Tokenizer.read(FolderSource(tmp_path))


def test_added_tokens_that_would_get_another_id_are_refused(tmp_path: Path) -> None:
    """tokenizers 0.23.3 numbers them by order (findings/tokenizers_numbers_by_order.sh)."""
    fast = FastTokenizer(models.BPE({"a": 0, "b": 1}, []))
    fast.add_special_tokens(["<x>", "</s>"])
    file = json.loads(fast.to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    assert Tokenizer.read(FolderSource(tmp_path)).id_of("</s>") == 3
    for number in (8, 1):
        file["added_tokens"][1]["id"] = number
        (tmp_path / "tokenizer.json").write_text(json.dumps(file))
        with pytest.raises(InvalidRequest, match=f"'</s>' has id {number}, .* gives it 3"):
            Tokenizer.read(FolderSource(tmp_path))


def test_what_the_post_processor_puts_around_a_text() -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    fast.add_special_tokens(["<s>", "</s>"])
    for template, begin, end in (("<s> $A </s>", (1,), (2,)), ("$A </s> </s>", (), (2, 2))):
        ends = [("<s>", 1), ("</s>", 2)]
        fast.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
        tokenizer = Tokenizer(fast)
        assert (tokenizer.bos_ids, tokenizer.end_ids) == (begin, end)


def test_a_bos_that_the_configuration_asks_for_and_the_file_leaves_out() -> None:
    """DeepSeek's: transformers 4 and llama.cpp add BOS, transformers 5 does not."""
    fast = FastTokenizer(models.WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    fast.add_special_tokens(["<s>"])
    asked = {"add_bos_token": True, "bos_token": {"content": "<s>"}}
    llama = {"tokenizer_class": "LlamaTokenizerFast"}
    for config, ids in (
        (asked | llama, [1, 0]),
        (asked | llama | {"add_bos_token": False}, [0]),
        (asked | llama | {"bos_token": None}, [0]),
        (asked | {"tokenizer_class": "PreTrainedTokenizerFast"}, [0]),
        (asked, [0]),
    ):
        fast.post_processor = processors.ByteLevel()
        assert Tokenizer(fast, config).encode("a") == ids
    fast.post_processor = processors.ByteLevel()
    assert Tokenizer(fast, asked | llama).encode_pair("a", "a") == [1, 0, 1, 0]
    for odd in ("<s:1>", "$A"):  # texts with a meaning in a template of the library
        fast.add_special_tokens([odd])
        found = Tokenizer(fast, asked | llama | {"bos_token": odd})
        assert found.bos_ids == (fast.token_to_id(odd),)
    fast.post_processor = processors.TemplateProcessing(
        single="$A <s>", pair="$A <s> $B <s>", special_tokens=[("<s>", 1)]
    )
    found = Tokenizer(fast, asked | llama)
    assert (found.bos_ids, found.end_ids) == ((1,), (1,))  # tokens that the file appends stay
    assert found.encode_pair("a", "a") == [1, 0, 1, 1, 0, 1]
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    assert Tokenizer(fast, asked | llama).encode("a") == [1, 0]


@pytest.mark.parametrize("name", ["stories3M", "gpt2", "qwen3"])
def test_a_pair_of_texts_like_the_library(name: str) -> None:
    tokenizer = Tokenizer(library(name))
    for one, other in (("What?", "That one."), (" a", "b "), ("你好", "<s> </s> é"), ("a", "")):
        assert tokenizer.encode_pair(one, other) == library(name).encode(one, other).ids


def test_what_the_post_processor_puts_around_a_pair() -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, unk_token="a"))
    fast.add_special_tokens(["<s>", "</s>"])
    ends = [("<s>", 2), ("</s>", 3)]
    for pair in ("<s> $A </s> </s> $B </s>", "<s> $A <s> $B", "$A $B </s>", "$A </s> $B"):
        fast.post_processor = processors.TemplateProcessing(
            single="$A", pair=pair, special_tokens=ends
        )
        wanted = fast.encode("a", "b").ids
        assert Tokenizer(fast).encode_pair("a", "b") == wanted


def test_joined_pieces_are_cut_and_compared_by_character() -> None:
    def characters(pieces: Iterable[Piece]) -> list[tuple[str, bool]]:
        return [(char, piece.special) for piece in pieces for char in piece.text]

    rng = random.Random(3)
    for _ in range(300):
        one, other = (
            [Piece("ab"[: rng.randrange(3)] * rng.randrange(3), rng.random() < 0.5) for _ in "abc"]
            for _ in range(2)
        )
        first, second = Joined.of(one), Joined.of(other)
        pairs = zip(characters(one), characters(other), strict=False)
        same = [*takewhile(lambda pair: pair[0] == pair[1], pairs)]
        assert first.common(second) == second.common(first) == len(same)
        begin, end = sorted(rng.randrange(len(first.text) + 1) for _ in range(2))
        assert characters(first.cut(begin, end)) == characters(one)[begin:end]
        assert characters(first.cut(begin)) == characters(one)[begin:]
