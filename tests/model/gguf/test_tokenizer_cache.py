"""Tokenizers kept for the next start equal the file's; a damaged one counts as missing."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path
from typing import Any

import pytest

from rootlace.runtime.model.gguf import config, tokenizer_cache
from rootlace.runtime.model.gguf.config import GgufSource
from rootlace.runtime.model.gguf.file import GgufFile, Texts
from rootlace.runtime.model.gguf.tokenizer import Vocabulary

TOKENS = ["a", "b", "ab", "<|im_end|>", "<x>"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of kept tokenizers, with small ones kept too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tokenizer_cache, "LEAST_BYTES", 0)
    return tmp_path / "rootlace" / "tokenizers"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Gains a path whenever a vocabulary is read."""
    found: list[Path] = []
    original = Vocabulary.read

    def counted(file: GgufFile) -> Vocabulary:
        found.append(file.path)
        return original(file)

    monkeypatch.setattr(config.Vocabulary, "read", counted)
    return found


def source(**changed: Any) -> GgufSource:
    """A start's: nothing is known yet of its file."""
    texts = b"".join(struct.pack("<Q", len(token)) + token.encode() for token in TOKENS)
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": Texts(Path("m.gguf"), texts, len(TOKENS), "tokens"),
        "tokenizer.ggml.token_type": array("i", [1, 1, 1, 4, 4]),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.bos_token_id": 2**32 - 1,
    }
    return GgufSource(GgufFile(Path("m.gguf"), keys | changed, {}))


def asked(given: GgufSource) -> tuple[Any, ...]:
    return given.eos_token_id(), given.tokenizer_config(), given.tokenizer_json()


def test_the_next_start_reads_no_vocabulary(
    folder: Path, read: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    first, told = asked(source()), caplog.text
    assert first[0] == [4, 3]
    assert "bos_token_id 4294967295 is passed over" in told
    assert len(read) == 1
    assert folder.stat().st_mode & 0o77 == 0
    caplog.clear()
    assert asked(source()) == first
    assert caplog.text == told
    assert len(read) == 1
    (path,) = folder.iterdir()
    path.unlink()
    assert asked(source()) == first
    assert len(read) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"tokenizer.ggml.eos_token_id": 3},
        {"tokenizer.ggml.token_type": array("i", [1, 1, 1, 4, 3])},
        {"tokenizer.ggml.tokens": [*TOKENS[:-1], "<y>"]},
        {"general.name": "phi-3"},
    ],
)
def test_another_file_has_another_tokenizer(
    folder: Path, read: list[Path], changed: dict[str, Any]
) -> None:
    before, after = asked(source()), asked(source(**changed))
    assert before != after
    assert len(read) == 2
    assert asked(source(**changed)) == after
    assert len(read) == 2


def test_other_code_makes_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(source())
    original = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: original(path).replace(b"Kind.USER_DEFINED", b"Kind.BYTE")
    )
    asked(source())
    assert len(list(folder.iterdir())) == 2


def test_a_damaged_file_is_made_again(folder: Path, read: list[Path]) -> None:
    first = asked(source())
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    header = struct.Struct("<III")
    behind_facts = header.size + header.unpack(whole[: header.size])[1]
    edges = {behind_facts - 1, behind_facts, len(whole) - 1}
    places = sorted({*range(header.size + 1), *edges, *range(0, len(whole), 11)})
    for at in places:
        flipped = whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :]
        for damaged in (flipped, whole[:at]):
            path.write_bytes(damaged)
            assert asked(source()) == first, at
            assert path.read_bytes() == whole, at
    assert len(read) == 1 + 2 * len(places)


def test_where_none_can_be_kept(
    folder: Path, read: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.write_text("no folder")
    first = asked(source())
    assert "the tokenizer is not kept for the next start" in caplog.text
    assert asked(source()) == first
    assert len(read) == 2


def test_few_are_kept(folder: Path) -> None:
    for number in range(tokenizer_cache.MOST_FILES + 3):
        asked(source(**{"general.name": str(number)}))
    assert len(list(folder.iterdir())) == tokenizer_cache.MOST_FILES


def test_small_ones_are_made_at_each_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parents[1]))
    asked(source())
    assert not folder.exists()
