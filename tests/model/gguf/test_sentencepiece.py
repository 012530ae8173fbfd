"""Folders with SentencePiece's own file give the ids that SentencePiece gives."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rootlace.runtime.model.checkpoint.source import FolderSource
from rootlace.wire.errors import UnsupportedModel
from tests.model.gguf.test_tokenizers import ODD, texts

LIKE_LLAMA: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": 700,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "character_coverage": 0.99,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}
CORPUS = ["Once upon a time there was a 27 year old bear.", "The  bear said: na naïve banana!"] * 20
CORPUS += [f"{word}ing {word}ed un{word}able  {word}" for word in ("walk", "talk", "call", "open")]
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 420},
    "gemma": {
        "add_dummy_prefix": False,
        "vocab_size": 430,
        "user_defined_symbols": ["<start_of_turn>", "▁▁", "▁▁▁▁▁", "▁bear", "\n\n"],
        "control_symbols": ["<mask>"],
        "bos_id": 2,
        "eos_id": 1,
        "pad_id": 0,
        "unk_id": 3,
    },
    "without bytes": {"byte_fallback": False, "vocab_size": 150},
}


def trained(folder: Path, **changed: Any) -> sentencepiece.SentencePieceProcessor:
    """Writes a tokenizer.model; SentencePiece's own reading of it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        minloglevel=2,
        **LIKE_LLAMA | changed,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module", params=SETTINGS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    folder = tmp_path_factory.mktemp("folder")
    theirs = trained(folder, **SETTINGS[request.param])
    ours = Tokenizer.from_str(FolderSource(folder).tokenizer_json())
    ours.encode_special_tokens = True  # in content they are ordinary text
    return ours, theirs


def same(pair: tuple[Tokenizer, sentencepiece.SentencePieceProcessor], text: str) -> None:
    ours, theirs = pair
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == theirs.encode(text)
    assert ours.encode(text).ids == [theirs.bos_id(), *ids]


def test_texts(pair: tuple[Tokenizer, sentencepiece.SentencePieceProcessor]) -> None:
    found = texts()
    for text in (*ODD, *CORPUS, *found[len(ODD) :: 40]):
        same(pair, text)


@settings(max_examples=60)
@given(text=st.text(st.sampled_from("abnwlkd \n▁é<s>27北"), max_size=40))
def test_any_text(pair: tuple[Tokenizer, sentencepiece.SentencePieceProcessor], text: str) -> None:
    same(pair, text)


def test_what_the_folder_adds(tmp_path: Path) -> None:
    size = trained(tmp_path, vocab_size=420).get_piece_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size}))
    config = {
        "add_bos_token": False,
        "added_tokens_decoder": {str(size + 1): {"content": "<tool>", "special": False}},
    }
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"eos_token": "<|im_end|>"})
    )
    source = FolderSource(tmp_path)
    assert source.tokenizer_config()["bos_token"] == "<s>"
    assert source.tokenizer_config()["eos_token"] == "<|im_end|>"
    tokenizer = Tokenizer.from_str(source.tokenizer_json())
    ids = tokenizer.encode("bear<|im_end|><tool>").ids
    assert ids[-2:] == [size, size + 1] and ids[0] != 1
    assert tokenizer.decode(ids, skip_special_tokens=True).endswith("bear<tool>")
    config["added_tokens_decoder"] = {"5": {"content": "not the piece"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="added tokens"):
        source.tokenizer_json()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"model_type": "unigram", "vocab_size": 300}, "unigram"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalises"),
        ({"remove_extra_whitespaces": True}, "extra spaces"),
        ({"treat_whitespace_as_suffix": True}, "behind words"),
        ({"user_defined_symbols": ["<tool>"]}, "user-defined symbols .'<tool>'"),
    ],
)
def test_what_is_refused(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    trained(tmp_path, **{"vocab_size": 420} | changed)
    with pytest.raises(UnsupportedModel, match=why):
        FolderSource(tmp_path).tokenizer_json()


def test_a_vocabulary_of_tiktoken(tmp_path: Path) -> None:
    """Llama 3's original folders have one under this name."""
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    with pytest.raises(UnsupportedModel, match=r"of tiktoken.*tokenizer\.json is needed"):
        FolderSource(tmp_path).tokenizer_json()


def test_damaged_files(tmp_path: Path) -> None:
    trained(tmp_path, vocab_size=420)
    file = tmp_path / "tokenizer.model"
    data = file.read_bytes()
    for damaged in (b"", data[:1000], b"\xff" * 40, data[:-3], bytes(100)):
        file.write_bytes(damaged)
        with pytest.raises(UnsupportedModel):
            FolderSource(tmp_path).tokenizer_json()
