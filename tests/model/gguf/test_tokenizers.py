"""Tokenizers from GGUF files give the ids of those that they were made of, and of llama.cpp's way.

llama.cpp's own SentencePiece merging is written out here once more, slowly, to compare with.
"""

from __future__ import annotations

import functools
import json
import unicodedata
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.runtime.model.gguf.config import GgufSource
from rootlace.runtime.model.gguf.file import GgufFile
from rootlace.runtime.model.gguf.tokenizer import PATTERNS, Kind, Vocabulary, tokenizer_json
from rootlace.runtime.server.model_texts import load_chat, load_eos_ids
from rootlace.runtime.server.tokenizer import Piece, Tokenizer
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary as Tokens
from rootlace.wire.errors import UnsupportedModel
from tests.model.gguf.converting import finish, gguf, write_tokenizer
from tests.model.gguf.llama_cpp_ids import KEPT
from tests.real_model import SMOLLM2, needs_smollm2

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
FOLDERS = {
    "gpt2": (DATA / "tokenizers" / "gpt2", "gpt-2"),
    "qwen3": (DATA / "tokenizers" / "qwen3", "qwen2"),
    "stories3M": (DATA / "models" / "stories3M", "default"),
    "stories260K": (DATA / "models" / "stories260K", "default"),
}
TEXTS = (
    "corpora/tinyshakespeare.txt",
    "corpora/tinystories_excerpt.txt",
    "corpora/gutenberg/pg11.txt",
    "eval/gsm8k/test.jsonl",
    "eval/boolq/*.jsonl",
    "prompts/mt_bench_question.jsonl",
    "json-schema-test-suite/tests/draft2020-12/*.json",
    "README.md",
)
ODD = (
    "",
    " ",
    "\n\n \t x",
    "Hello,   world!\r\n\r\n  'S it's IT'S",
    "1234567 ½ ٣٤ Ⅷ",
    "é naïve Ünïcödé ß 北京，好。 日本語カナ ไทย हिन्दी עברית",
    "😀👩‍👩‍👧 \u200b\ufeff\u00a0x\u3000y",
    "a▁b <s> </s> <unk> <0x41> <|endoftext|>",
    " " * 37 + "x" + " " * 5,
    "aaaaaaaaaaaaaaaaaaaaaaa bananananana",
    "\x00\x01\x7f\ud7ff\ue000\U0010ffff",
)


def written(name: str, path: Path) -> GgufFile:
    folder, pre = FOLDERS[name]
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    writer = gguf.GGUFWriter(path, "llama")
    write_tokenizer(writer, folder, pre)
    return GgufFile.read(finish(writer, path))


class ReadOnce(GgufSource):
    """Writing the tokenizer of a large vocabulary takes half a second."""

    @functools.cached_property
    def _json(self) -> str:
        return super().tokenizer_json()

    def tokenizer_json(self) -> str:
        return self._json


@pytest.fixture(scope="module", params=FOLDERS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[GgufSource, FolderSource]:
    """The model's own tokenizer and the file's."""
    file = written(request.param, tmp_path_factory.mktemp("gguf") / "m.gguf")
    return ReadOnce(file), FolderSource(FOLDERS[request.param][0])


def texts() -> list[str]:
    """Paragraphs of all sorts of text, and oddities, as NFC: files say nothing of a normaliser, and
    llama.cpp has none."""
    found = list(ODD)
    for pattern in TEXTS:
        for file in sorted(DATA.glob(pattern)):
            found += (part[:500] for part in file.read_text("utf-8").split("\n\n"))
    return [unicodedata.normalize("NFC", text) for text in found]


@pytest.mark.slow
def test_the_ids_of_the_original(pair: tuple[GgufSource, FolderSource]) -> None:
    ours, theirs = (FastTokenizer.from_str(source.tokenizer_json()) for source in pair)
    some = [*ODD, *texts()[len(ODD) :: 12]]
    assert len(some) > 500
    for special, part in ((False, some), (True, [text for text in some if "<" in text])):
        for one in (ours, theirs):
            one.encode_special_tokens = special
        for text, our, their in zip(
            part, ours.encode_batch(part), theirs.encode_batch(part), strict=True
        ):
            assert our.ids == their.ids, text


@pytest.mark.slow
def test_everything_else_that_a_tokenizer_says(pair: tuple[GgufSource, FolderSource]) -> None:
    ours, theirs = (Tokenizer.read(source) for source in pair)
    assert ours.bos_ids == theirs.bos_ids
    assert ours.vocab_size == theirs.vocab_size
    assert ours.added == theirs.added
    for index in (*range(0, ours.vocab_size, 7), *ours.added):
        assert ours.token_bytes[index] == theirs.token_bytes[index]
        assert ours.visible_bytes[index] == theirs.visible_bytes[index]
    for text in (*ODD, *texts()[:40]):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    our, their = (load_chat(source, ours) for source in pair)
    assert our.format == their.format
    # A file names one token, and others are known by their names; generation_config.json is not
    # in it.
    assert load_eos_ids(pair[0], ours) >= load_eos_ids(pair[1], theirs) - {1}
    if ours.vocab_size < 100_000:  # a large vocabulary takes seconds
        our_tokens, their_tokens = (
            Tokens(source.tokenizer_json(), ours.vocab_size, [2]) for source in pair
        )
        assert our_tokens.token_bytes == their_tokens.token_bytes


# ---------------------------------------------------------------- SentencePiece's merges


@functools.cache
def ids_of(tokens: tuple[str, ...]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def merged_by_score(vocabulary: Vocabulary, text: str) -> list[int]:
    """Return SentencePiece's tokens: of all neighbours that make a token, those of the best score
    are merged, the leftmost first."""
    ids = ids_of(tuple(vocabulary.tokens))
    parts = list((" " * vocabulary.space_prefix + text).replace(" ", "\u2581")) if text else []
    while True:
        best: tuple[float, int] | None = None
        for at in range(len(parts) - 1):
            index = ids.get(parts[at] + parts[at + 1])
            if index is None or vocabulary.kinds[index] not in (Kind.NORMAL, Kind.USER_DEFINED):
                continue
            if best is None or vocabulary.scores[index] > best[0]:
                best = vocabulary.scores[index], at
        if best is None:
            break
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
    found: list[int] = []
    for part in parts:
        if part in ids:
            found.append(ids[part])
        else:
            found += [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Vocabulary, FastTokenizer]:
    vocabulary = Vocabulary.read(written("stories3M", tmp_path_factory.mktemp("gguf") / "m.gguf"))
    fast = FastTokenizer.from_str(tokenizer_json(vocabulary))
    fast.encode_special_tokens = True
    return vocabulary, fast


def test_words_are_merged_as_sentencepiece_does(
    stories: tuple[Vocabulary, FastTokenizer],
) -> None:
    vocabulary, fast = stories
    lines = "\n".join(texts()).split("\n")[::40]
    for text in (*ODD, *(line[:120] for line in lines)):
        assert fast.encode(text, add_special_tokens=False).ids == merged_by_score(vocabulary, text)


@settings(max_examples=200)
@given(text=st.text(st.sampled_from("ab an\u2581 \n'é😀0"), max_size=40))
def test_made_up_texts_too(stories: tuple[Vocabulary, FastTokenizer], text: str) -> None:
    vocabulary, fast = stories
    assert fast.encode(text, add_special_tokens=False).ids == merged_by_score(vocabulary, text)


def test_runs_of_one_score_grow_from_the_left() -> None:
    """Llama 2 has 15 tokens of spaces, all of the score -1e9."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "x"]
    runs = ["\u2581" * length for length in (2, 3, 4, 5, 8)]
    scores = [0.0] * len(tokens) + [-1e9] * len(runs)
    kinds = [Kind.UNKNOWN, Kind.CONTROL, Kind.CONTROL, *[Kind.BYTE] * 256]
    kinds += [Kind.NORMAL] * (2 + len(runs))
    vocabulary = Vocabulary(
        Path("m.gguf"),
        {},
        "llama",
        "default",
        tokens + runs,
        kinds,
        scores,
        1,
        2,
        0,
        (2,),
        True,
        False,
    )
    # Other tokens say in which order, so that not most of them have one score.
    more = [f"x{'x' * n}" for n in range(1, 9)]
    vocabulary = Vocabulary(
        Path("m.gguf"),
        {},
        "llama",
        "default",
        vocabulary.tokens + more,
        [*kinds, *[Kind.NORMAL] * len(more)],
        scores + [-float(n) for n in range(len(more))],
        *(1, 2, 0, (2,), True, False),
    )
    fast = FastTokenizer.from_str(tokenizer_json(vocabulary))
    for length in range(40):
        text = " " * length + "x"
        assert fast.encode(text, add_special_tokens=False).ids == merged_by_score(vocabulary, text)


# ---------------------------------------------------------------- what files say


def bpe(**changed: Any) -> GgufFile:
    """A file of a small vocabulary."""
    tokens = ["a", "b", "ab", "<|im_end|>", "<x>", "[PAD5]", "[PAD6]"]
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": array("i", [1, 1, 1, 4, 4, 5, 5]),
        "merges": ["a b"],
        "eos_token_id": 4,
    }
    keys = {f"tokenizer.ggml.{k}": v for k, v in (metadata | changed).items() if v is not None}
    return GgufFile(Path("m.gguf"), keys, {})


def test_what_ends_and_begins_a_text() -> None:
    source = GgufSource(bpe(add_bos_token=True, bos_token_id=4, eot_token_id=2))
    tokenizer = Tokenizer.read(source)
    # The name of a token says that it ends a turn, and so that it is special.
    assert source.eos_token_id() == [4, 2, 3]
    assert [token.id for token in tokenizer.added.values() if token.special] == [3]
    assert tokenizer.bos_ids == () or tokenizer.bos_ids == (4,)
    assert tokenizer.vocab_size == 5, "what fills the vocabulary up is left out"
    assert source.tokenizer_config() == {"bos_token": "<x>", "eos_token": "<x>"}
    assert source.chat_templates() == {}


@pytest.mark.parametrize(
    ("tokens", "kinds", "ends"),
    [
        (["<eos>", "<turn|>", "<|flush|>", "[e~[", "x"], [1] * 5, [0, 1, 2, 3]),
        (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_middle|>"], [4] * 4, [0, 1, 2]),
        (["<fim_pad>", "<reponame>", "<fim_prefix>", "[PAD]"], [3] * 4, [0, 1, 3]),
        (["<s>", "</s>"], [3, 3], [1]),
        (["<s>", "</s>"], [4, 4], []),  # tags of HTML in Gemma's vocabulary
        (["</s>", "<|tool_response>"], [3, 3], [1]),
        (["<|end|>", "<|call|>"], [3, 3], [0, 1]),
        (["<|end|>", "<|call|>", "<|return|>"], [3, 3, 3], [1, 2]),
        (["<|end|>", "<|calls|>", "<|flush|>"], [3, 3, 3], [1, 2]),
    ],
)
def test_ends_that_are_known_by_name(tokens: list[str], kinds: list[int], ends: list[int]) -> None:
    file = bpe(tokens=tokens, token_type=array("i", kinds), merges=[], eos_token_id=None)
    assert list(Vocabulary.read(file).ends) == ends


def test_ends_that_are_stated() -> None:
    """Tokens of filling in can be ends; the end of Harmony's messages is never one."""
    tokens = ["a", "b", "c", "<|end|>", "<|call|>", "<|return|>"]
    stated = {"eot": 3, "eom": 0, "fim_pad": 1, "fim_rep": 2, "fim_sep": 1}
    keys = {f"{name}_token_id": token for name, token in stated.items()}
    file = bpe(tokens=tokens, token_type=None, merges=[], eos_token_id=5, **keys)
    assert Vocabulary.read(file).ends == (5, 0, 1, 2, 4)


def test_tags_are_single_tokens_whatever_they_are_written_in() -> None:
    """DeepSeek's have characters that no byte-level vocabulary writes a text in."""
    tags = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜tool▁sep｜>", "<think>"]
    kinds = array("i", [1, 3, 4, 3, 4])
    file = bpe(tokens=["a", *tags], token_type=kinds, merges=[], eos_token_id=None)
    encode = FastTokenizer.from_str(GgufSource(file).tokenizer_json()).encode
    assert encode("a".join(tags), add_special_tokens=False).ids == [1, 0, 2, 0, 3, 0, 4]


@pytest.mark.parametrize("wrong", [7, 2**32 - 1, -1])
def test_ids_of_no_token_are_passed_over(wrong: int, caplog: pytest.LogCaptureFixture) -> None:
    """Converters have written 2^32 - 1 for a token that the model does not have."""
    names = ("bos", "eos", "unknown", "eot", "fim_pad")
    file = bpe(**{f"{name}_token_id": wrong for name in names})
    found = Vocabulary.read(file)
    GgufSource(file).tokenizer_json()
    assert (found.bos, found.eos, found.unknown, found.begins) == (None, None, None, False)
    assert found.ends == (3,), "what is known by its name ends a text still"
    for name in names:
        assert f"m.gguf: tokenizer.ggml.{name}_token_id {wrong} is passed over" in caplog.text
    # SentencePiece's models have tokens for these where a file says nothing.
    keys = {"model": "llama", "scores": array("f", range(7)), "bos_token_id": wrong}
    assert Vocabulary.read(bpe(**keys)).bos == 1


def test_a_file_without_types_says_what_becomes_of_markers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokens = ["<", "|", "x", ">", "<html>", "<|x|>", "<|y|>", "<|im_end|>", "<0x0A>"]
    given: dict[str, Any] = {"tokens": tokens, "merges": [], "eos_token_id": None}
    typed = GgufSource(bpe(**given, token_type=array("i", [1, 1, 1, 1, 1, 3, 3, 3, 6])))
    assert FastTokenizer.from_str(typed.tokenizer_json()).encode("<|x|>").ids == [5]
    assert caplog.text == ""
    source = GgufSource(bpe(**given, token_type=None))
    ids = FastTokenizer.from_str(source.tokenizer_json()).encode("<|x|>").ids
    assert ids == [0, 1, 2, 1, 3]
    assert "m.gguf: tokenizer.ggml.token_type is missing" in caplog.text
    assert "Markers (3: <html>, <|x|>, <|y|>) are read as text" in caplog.text
    # Those that conversations are written with are named, where there are some.
    caplog.clear()
    keys = source.file.metadata | {"tokenizer.chat_template": "{{ '<|x|>' + text + '<|im_end|>' }}"}
    GgufSource(GgufFile(Path("m.gguf"), keys, {})).tokenizer_json()
    assert "Markers (1: <|x|>) are read as text" in caplog.text
    # Where there are none, nothing goes wrong.
    caplog.clear()
    given["tokens"] = [*"<|x>abcd"]
    GgufSource(bpe(**given, token_type=None)).tokenizer_json()
    assert caplog.text == ""


def test_tokens_of_filling_in_stay_what_the_file_says() -> None:
    """These tokens are parts of prompts; only special tokens are ordinary text there."""
    tokens = ["a", "<|file_sep|>", "<|im_end|>"]
    source = GgufSource(
        bpe(tokens=tokens, token_type=array("i", [1, 4, 4]), merges=[], eos_token_id=2)
    )
    added = Tokenizer.read(source).added.values()
    assert {token.id: token.special for token in added} == {1: False, 2: True}


@pytest.mark.parametrize("length", [512, 513])
def test_the_longest_token_that_is_merged(length: int) -> None:
    """A token has as many cuts as characters, and each takes equally long."""
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "a" * (length - 1), "a" * length]
    types = array("i", [2, 3, 3, 1, 1, 1, 1])
    scores = array("f", [0, 0, 0, 0, 0, -1, -2])
    source = GgufSource(
        bpe(model="llama", tokens=tokens, token_type=types, scores=scores, merges=None)
    )
    if length > 512:
        with pytest.raises(UnsupportedModel, match=r"tokens: 'a{20}'\.\.\. has 513 characters"):
            source.tokenizer_json()
    else:
        merges = json.loads(source.tokenizer_json())["model"]["merges"]
        assert merges == [["a", "a" * 511], ["a" * 511, "a"]]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "bert"}, "ggml.model: 'bert' is not supported"),
    "no model": ({"model": None}, "ggml.model: it is missing"),
    "pre": ({"pre": "marvel"}, "ggml.pre: 'marvel' is not supported"),
    "no pre": ({"pre": None}, "ggml.pre: it is missing: an old file"),
    "no tokens": ({"tokens": None}, "ggml.tokens: it is missing"),
    "numbers": ({"tokens": array("i", [1])}, "ggml.tokens: it is not of type list"),
    "twice": ({"tokens": list("abcdeaf")}, "ggml.tokens: 'a' is there twice"),
    "types": ({"token_type": array("i", [1])}, "ggml.token_type: there are 1 for 7 tokens"),
    "no bos": ({"add_bos_token": True}, "ggml.add_bos_token: there is no bos_token_id"),
    "no merges": ({"merges": None}, "ggml.merges: it is not a list"),
    "merges": ({"merges": ["a c"]}, "ggml.merges: 'a c' are not two tokens that make a third"),
    "scores": (
        {
            "model": "llama",
            "scores": array("f", [-1000.0] * 7),
            "tokens": [*"abc", "ab", "bc", "ca", "x"],
            "token_type": None,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        "ggml.scores: 3 tokens have the same one, -1000",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    changed, words = REFUSED[name]
    with pytest.raises(UnsupportedModel) as caught:
        source = GgufSource(bpe(**changed))
        source.tokenizer_json()
    assert str(caught.value).startswith("m.gguf: tokenizer.") and words in str(caught.value)


@pytest.mark.parametrize("pre", sorted(PATTERNS))
def test_every_pattern_can_be_built(pre: str) -> None:
    text = GgufSource(bpe(pre=pre, add_bos_token=False)).tokenizer_json()
    fast = FastTokenizer.from_str(text)
    assert fast.pre_tokenizer is not None
    for one in ODD:
        pieces = [piece for piece, _ in fast.pre_tokenizer.pre_tokenize_str(one)]
        assert sum(map(len, pieces)) == len(one.encode()), "nothing of a text is lost"
    assert json.loads(text)["model"]["vocab"].keys() >= {"a", "b", "ab"}


@needs_smollm2
def test_the_ids_of_llama_cpp() -> None:
    """The ids of SmolLM2's file were recorded by `python -m tests.model.gguf.llama_cpp_ids`."""
    assert SMOLLM2 is not None
    recorded = json.loads(KEPT.read_text("utf-8"))
    assert SMOLLM2.name == recorded["model"] and len(recorded["rows"]) >= 300
    tokenizer = Tokenizer.read(ModelConfig.read(SMOLLM2).source)
    for text, plain, special in recorded["rows"]:
        for is_special, ids in ((False, plain), (True, special)):
            pieces = (Piece(text, special=is_special),)
            assert tokenizer.encode_pieces(pieces) == [*map(int, ids.split())], text
