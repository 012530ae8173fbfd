"""Incremental decoding against the library's decoding of the whole."""

import random

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from rootlace.runtime.server.tokenizer import Detokenizer, Tokenizer
from tests.server.conftest import load

TEXT = "Once upon a time 🙂👩‍👩‍👧 there — was «naïve» 你好，世界 é e\u0301 \n\n\t x"


def chunks(detokenizer: Detokenizer, ids: list[int], rng: random.Random) -> list[str]:
    texts, position = [], 0
    while position < len(ids):
        step = rng.randrange(1, 4)
        texts.append(detokenizer.feed(ids[position : position + step]))
        position += step
    return [*texts, detokenizer.flush()]


@pytest.mark.parametrize("skip", [True, False])
def test_random_ids(tokenizer: Tokenizer, skip: bool) -> None:
    rng = random.Random(1)
    for _ in range(150):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 40))]
        texts = chunks(Detokenizer(tokenizer, skip_special_tokens=skip), ids, rng)
        whole = tokenizer.fast.decode(ids, skip_special_tokens=skip)
        if tokenizer.token_bytes.kind == "byte_level" or "\ufffd" not in whole:
            assert "".join(texts) == whole
        assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_never_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT * 3)
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.feed([i]) for i in ids] + [detokenizer.flush()]
    assert all("\ufffd" not in text for text in texts)
    assert "".join(texts) == tokenizer.fast.decode(ids) == tokenizer.decode(ids)


def test_text_after_a_context_is_what_the_whole_gains(tokenizer: Tokenizer) -> None:
    rng, ids = random.Random(2), tokenizer.encode(TEXT)
    for _ in range(60):
        at = rng.randrange(len(ids))
        before = tokenizer.decode(ids[:at]) if at else ""
        text = "".join(chunks(Detokenizer(tokenizer, ids[:at]), ids[at:], rng))
        if "\ufffd" not in before:
            assert before + text == tokenizer.fast.decode(ids)
        else:  # the context ends within a character: its rest comes with the next token
            assert text in tokenizer.fast.decode(ids)


def test_sentencepiece_space() -> None:
    tokenizer = load("stories3M")
    ids = tokenizer.encode("Once upon")
    assert Detokenizer(tokenizer, ids[:1]).feed(ids[1:]) == "Once upon"
    assert (
        Detokenizer(tokenizer, ids[:2]).feed(ids[2:])
        == tokenizer.decode(ids)[len(tokenizer.decode(ids[:2])) :]
    )
    (again,) = tokenizer.encode(" Once", False)[-1:]
    assert Detokenizer(tokenizer, ids).feed([again]).startswith((" ", "Once"))


def test_unfinished_character_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🜁")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed(ids[:-1]) == "a" and not detokenizer.clean
    assert set(detokenizer.flush()) == {"\ufffd"} and detokenizer.clean


def test_whole_characters_stay_beside_a_broken_one() -> None:
    """tokenizers 0.23.3 gives U+FFFD for the whole run of bytes, but only at its end."""
    bytes_ = {f"<0x{byte:02X}>": byte for byte in range(256)}
    fast = FastTokenizer(models.BPE(bytes_ | {"x": 256}, [], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = Tokenizer(fast)
    for data in ("é".encode() + b"\xc3", "😀é".encode() + b"\xe4\xb8", b"\xc3" + "é".encode()):
        ids = [*data, 256]
        expected = data.decode(errors="replace") + "x"
        detokenizer = Detokenizer(tokenizer)
        pieces = [*(detokenizer.feed([token]) for token in ids), detokenizer.flush()]
        assert "".join(pieces) == tokenizer.decode(ids) == expected


def test_other_decoders() -> None:
    """A decoder that is not byte-faithful goes through the library, a window at a time."""
    words = ["[UNK]", "play", "##ing", "##ed", "the", "game", "!", ",", "dog"]
    fast = FastTokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(FastTokenizer.from_str(fast.to_str()))
    rng = random.Random(3)
    for _ in range(100):
        ids = [rng.randrange(len(words)) for _ in range(30)]
        texts = chunks(Detokenizer(tokenizer), ids, rng)
        assert "".join(texts) == tokenizer.decode(ids) == fast.decode(ids)
    assert [tokenizer.token_text(id_) for id_ in (1, 2)] == ["play", "##ing"]


def test_token_texts(tokenizer: Tokenizer) -> None:
    for content in ("hello", " world"):
        ids = tokenizer.encode(content, False)
        assert "".join(map(tokenizer.token_text, ids)).strip() == content.strip()
    assert tokenizer.token_text(tokenizer.vocab_size + 10) == ""
