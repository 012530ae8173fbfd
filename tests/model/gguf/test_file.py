"""GGUF files are read as by the `gguf` package; malformed parts are refused with their place."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.model.gguf import file as gguf_file
from rootlace.runtime.model.gguf.file import TYPES, GgufFile
from rootlace.wire.errors import UnsupportedModel
from tests.model.gguf.writing import Entry, gguf_bytes, text, u32, u64, write

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "a.flag": True,
    "a.negative": -3,
    "a.number": 0.5,
    "tokens": ["a", "ü", "", "\u2581"],
    "types": [1, 2, 3, 1],
    "scores": [0.5, -1.0],
    "flags": [True, False],
}
ENTRIES = [Entry("one", (4, 2), 0, 0), Entry("two", (32,), 8, 32), Entry("three", (3, 1, 2), 1, 96)]
DATA = bytes(range(96)) + bytes(12)


def read(tmp_path: Path, data: bytes) -> GgufFile:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    return GgufFile.read(path)


def test_a_file(tmp_path: Path) -> None:
    file = read(tmp_path, gguf_bytes(METADATA, ENTRIES, DATA))
    assert {key: v.tolist() if hasattr(v, "tolist") else v for key, v in file.metadata.items()} == (
        METADATA
    )
    assert {name: (t.type.name, t.shape) for name, t in file.tensors.items()} == {
        "one": ("F32", (2, 4)),
        "two": ("Q8_0", (32,)),
        "three": ("F16", (2, 1, 3)),
    }
    assert bytes(file.tensors["two"].data) == DATA[32 : 32 + 34]


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux refuses to give locked pages back")
def test_pages_that_are_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that uses the runtime may have called mlockall()."""
    mapped, libc = gguf_file._mapped, ctypes.CDLL(None, use_errno=True)
    locked: list[int] = []

    def lock(path: Path) -> mmap.mmap:
        mapping = mapped(path)
        begin = np.frombuffer(mapping, np.uint8).ctypes.data
        locked.append(libc.mlock(ctypes.c_void_p(begin), ctypes.c_size_t(len(mapping))))
        return mapping

    monkeypatch.setattr(gguf_file, "_mapped", lock)
    file = read(tmp_path, gguf_bytes(METADATA, ENTRIES, DATA))
    assert bytes(file.tensors["two"].data) == DATA[32 : 32 + 34]
    if locked != [0]:
        pytest.skip("no pages may be locked here")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_alignment(version: int, alignment: int, tmp_path: Path) -> None:
    metadata = {"general.alignment": alignment, "k": "x" * 7}
    entries = [Entry("one", (2,), 0, 0), Entry("two", (2,), 0, alignment)]
    data = b"ABCDEFGH".ljust(alignment, b"\0") + b"IJKLMNOP"
    made = gguf_bytes(metadata, entries, data, version=version, alignment=alignment)
    file = read(tmp_path, made)
    assert bytes(file.tensors["one"].data) == b"ABCDEFGH"
    assert bytes(file.tensors["two"].data) == b"IJKLMNOP"


def test_every_type_of_value(tmp_path: Path) -> None:
    forms = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    metadata: dict[str, bytes] = {}
    for kind, form in forms.items():
        one, two = struct.pack(f"<{form}", 7), struct.pack(f"<{form}", 100)
        metadata[f"one.{kind}"] = u32(kind) + one
        metadata[f"many.{kind}"] = u32(9) + u32(kind) + u64(2) + one + two
    file = read(tmp_path, gguf_bytes(metadata))
    for kind in forms:
        assert file.metadata[f"one.{kind}"] == 7
        assert list(file.metadata[f"many.{kind}"]) == [7, 100]


def test_as_the_gguf_package_writes(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(3)
    writer.add_rope_freq_base(1e6)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_token_scores([0.5, 0.25, -7.0])
    writer.add_token_types([1, 3, 6])
    writer.add_add_bos_token(False)
    writer.add_string("empty", "")
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal((4, 64)).astype(np.float16),
        "c": rng.standard_normal(7).astype(np.float64),
    }
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    quantised = gguf.quantize(
        rng.standard_normal((6, 64), np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("q", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    ours, theirs = GgufFile.read(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    assert set(ours.metadata) == {k for k in theirs.fields if not k.startswith("GGUF.")}
    for key, found in ours.metadata.items():
        expected = theirs.fields[key].contents()
        assert (found.tolist() if hasattr(found, "tolist") else found) == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        our = ours.tensors[tensor.name]
        assert our.type.name == tensor.tensor_type.name
        assert our.shape == tuple(reversed(tensor.shape.tolist()))
        assert bytes(our.data) == tensor.data.tobytes()


def test_the_types_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    sizes = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType
    }
    assert {n: (t.name, t.numbers, t.bytes) for n, t in TYPES.items()} == sizes


# ---------------------------------------------------------------- files in parts


def parts(tmp_path: Path, count: int = 3, **changed: Any) -> Path:
    """A split model; `changed` are metadata of the second part."""
    for index in range(count):
        more = {"general.architecture": "llama"} if index == 0 else {}
        metadata = more | {"split.no": index, "split.count": count, "split.tensors.count": count}
        if index == 1:
            metadata |= changed
        entry = Entry(f"t{index}", (2,), 0, 0)
        write(tmp_path / f"m-{index + 1:05}-of-{count:05}.gguf", metadata, [entry], b"x" * 8)
    return tmp_path / f"m-00001-of-{count:05}.gguf"


def test_a_split_file(tmp_path: Path) -> None:
    file = GgufFile.read(parts(tmp_path))
    assert list(file.tensors) == ["t0", "t1", "t2"]
    assert file.tensors["t1"].file.name == "m-00002-of-00003.gguf"
    assert file.metadata["general.architecture"] == "llama"


def test_a_part_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    """The old model may be open meanwhile."""
    first = parts(tmp_path)
    held, second = GgufFile.read(first), tmp_path / "m-00002-of-00003.gguf"
    metadata = {"split.no": 1, "split.count": 3, "split.tensors.count": 3}
    other = write(tmp_path / "other", metadata, [Entry("t1", (2,), 0, 0)], b"y" * 8)
    other.replace(second)
    assert bytes(GgufFile.read(first).tensors["t1"].data) == b"y" * 8
    assert bytes(held.tensors["t1"].data) == b"x" * 8


def test_what_a_merge_leaves(tmp_path: Path) -> None:
    """`gguf-split --merge` writes one file, which claims to have 0 parts."""
    metadata = {
        "general.architecture": "llama",
        "split.no": 0,
        "split.tensors.count": 1,
        "split.count": u32(2) + (0).to_bytes(2, "little"),
    }
    merged = write(tmp_path / "merged.gguf", metadata, [Entry("t0", (2,), 0, 0)], b"x" * 8)
    assert list(GgufFile.read(merged).tensors) == ["t0"]


def test_a_first_part_without_tensors(tmp_path: Path) -> None:
    """`gguf-split --no-tensor-first-split` writes such a first part."""
    first = tmp_path / "m-00001-of-00002.gguf"
    about = {"general.architecture": "llama", "split.no": 0, "split.count": 2}
    write(first, about | {"split.tensors.count": 1})
    second = {"split.no": 1, "split.count": 2, "split.tensors.count": 1}
    write(tmp_path / "m-00002-of-00002.gguf", second, [Entry("t0", (2,), 0, 0)], b"x" * 8)
    file = GgufFile.read(first)
    assert list(file.tensors) == ["t0"] and file.metadata["general.architecture"] == "llama"


def test_faults_of_split_files(tmp_path: Path) -> None:
    first = parts(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"name the first one, m-00001-of-00003\.gguf"):
        GgufFile.read(tmp_path / "m-00003-of-00003.gguf")
    first.rename(tmp_path / "other.gguf")
    with pytest.raises(UnsupportedModel, match=r"does not end in -00001-of-00003\.gguf"):
        GgufFile.read(tmp_path / "other.gguf")
    (tmp_path / "other.gguf").rename(first)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(UnsupportedModel, match=r"parts are missing: m-00002-of-00003\.gguf"):
        GgufFile.read(first)
    with pytest.raises(
        UnsupportedModel, match=r"split\.no and split\.count are not those of part 2"
    ):
        GgufFile.read(parts(tmp_path, **{"split.no": 2}))
    parts(tmp_path)
    write(
        tmp_path / "m-00003-of-00003.gguf",
        {"split.no": 2, "split.count": 3},
        [Entry("t0", (2,), 0, 0)],
        b"x" * 8,
    )
    with pytest.raises(UnsupportedModel, match="t0 is also in another part"):
        GgufFile.read(first)


# ---------------------------------------------------------------- what is refused

ONE = Entry("one", (4,), 0, 0)
FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin with GGUF"),
    "other": (b"PK\3\4 an archive", "does not begin with GGUF"),
    "short": (b"GGUF\3\0", "the version would take 4 bytes, of which 2 are left"),
    "version 1": (gguf_bytes({}, version=1), "GGUF version 1 is not supported"),
    "version 4": (gguf_bytes({}, version=4), "GGUF version 4 is not supported"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
    "many keys": (gguf_bytes({}, counts=(0, 1 << 60)), "metadata of"),
    "many tensors": (gguf_bytes({}, counts=(1 << 60, 0)), "a table of"),
    "long text": (gguf_bytes({"k": u32(8) + u64(1 << 62) + b"x"}), "'k' would take"),
    "long list": (gguf_bytes({"k": u32(9) + u32(4) + u64(1 << 62)}), "'k' would take"),
    "long texts": (gguf_bytes({"k": u32(9) + u32(8) + u64(1 << 61)}), "'k' would take"),
    "long text of a list": (
        gguf_bytes({"k": u32(9) + u32(8) + u64(2) + text(b"a") + u64(99)}),
        "'k'[1] would take 99 bytes",
    ),
    "long flags": (gguf_bytes({"k": u32(9) + u32(7) + u64(1 << 63)}), "'k' would take"),
    "list of lists": (gguf_bytes({"k": u32(9) + u32(9) + u64(1)}), "a list of lists"),
    "type": (gguf_bytes({"k": u32(13)}), "'k' has a value of unknown type 13"),
    "types": (gguf_bytes({"k": u32(9) + u32(99) + u64(1)}), "values of unknown type 99"),
    "flag": (gguf_bytes({"k": u32(7) + b"\2"}), "neither 0 nor 1"),
    "not utf-8": (gguf_bytes({"k": u32(8) + text(b"\xff\xfe")}), "'k' is not UTF-8"),
    "key twice": (
        b"GGUF" + u32(3) + u64(0) + u64(2) + (text("k") + u32(4) + u32(1)) * 2,
        "metadata 'k' is there twice",
    ),
    "alignment": (gguf_bytes({"general.alignment": 3}), "general.alignment 3 is no power of two"),
    "no alignment": (gguf_bytes({"general.alignment": 0}), "general.alignment 0"),
    "alignment of text": (gguf_bytes({"general.alignment": "x"}), "is not an integer"),
    "no dimensions": (gguf_bytes({}, [Entry("one", (), 0, 0)]), "has 0 dimensions"),
    "five dimensions": (gguf_bytes({}, [Entry("one", (1,) * 5, 0, 0)]), "has 5 dimensions"),
    "huge": (gguf_bytes({}, [Entry("one", (1 << 32, 1 << 32), 0, 0)]), "has a shape of"),
    "nothing in it": (gguf_bytes({}, [Entry("one", (4, 0), 0, 0)]), "has a shape of"),
    "removed type": (gguf_bytes({}, [Entry("one", (32,), 4, 0)]), "has a type of number 4"),
    "half a block": (gguf_bytes({}, [Entry("one", (48,), 8, 0)]), "not of whole blocks of Q8_0"),
    "crooked": (gguf_bytes({}, [Entry("one", (4,), 0, 8)], bytes(64)), "no multiple of 32"),
    "cut short": (gguf_bytes({}, [ONE], bytes(15)), "it may have been cut short"),
    "overlap": (
        gguf_bytes({}, [Entry("one", (9,), 0, 0), Entry("two", (1,), 0, 32)], bytes(64)),
        "'two' overlaps",
    ),
    "tensor twice": (
        gguf_bytes({}, [ONE, Entry("one", (4,), 0, 32)], bytes(64)),
        "'one' is there twice",
    ),
    "parts": (gguf_bytes({"split.count": 1 << 30}), "one of 1073741824 parts"),
    "no parts": (gguf_bytes({"split.count": -1}), "one of -1 parts"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str, tmp_path: Path) -> None:
    data, words = FAULTS[name]
    with pytest.raises(UnsupportedModel) as caught:
        read(tmp_path, data)
    assert str(caught.value).startswith(f"{tmp_path / 'm.gguf'}: ")
    assert words in str(caught.value)


def test_texts_that_are_no_texts_are_named_when_they_are_read(tmp_path: Path) -> None:
    """Readers that need no vocabulary read no texts."""
    file = read(tmp_path, gguf_bytes({"k": u32(9) + u32(8) + u64(2) + text(b"a") + text(b"\xff")}))
    for _ in range(2):
        with pytest.raises(
            UnsupportedModel, match=rf"{tmp_path / 'm.gguf'}: 'k'\[1\] is not UTF-8"
        ):
            file.metadata["k"].tolist()


def test_texts_are_there_when_the_file_is_gone(tmp_path: Path) -> None:
    file = read(tmp_path, gguf_bytes({"k": u32(9) + u32(8) + u64(2) + text(b"a") + text(b"bc")}))
    os.truncate(tmp_path / "m.gguf", 0)
    assert file.metadata["k"].tolist() == ["a", "bc"] and len(file.metadata["k"]) == 2


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(UnsupportedModel, match=str(path)):
            GgufFile.read(path)


SOUND = gguf_bytes(METADATA, ENTRIES, DATA)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A sound file of which bytes are changed, numbers made large, or parts cut out."""
    data = bytearray(SOUND)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        how = draw(st.integers(0, 3))
        if how == 0:
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif how == 1:
            large = draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))
            data[at : at + 8] = u64(large)
        elif how == 2:
            del data[at : at + draw(st.integers(1, 16))]
        else:
            data[at:at] = draw(st.binary(max_size=16))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@settings(max_examples=400)
@given(damaged())
def test_damaged_files_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        file = GgufFile.read(path)
        assert all(len(tensor.data) <= len(data) for tensor in file.tensors.values())
    except UnsupportedModel as error:
        assert str(error).startswith(f"{path}: ")
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 1 << 20


NAMES = [chr(0x3400 + index) for index in range(10_000)]
SMALLEST = {
    "texts": gguf_bytes({"k": u32(9) + u32(8) + u64(20_000) + text("\u0101") * 20_000}),
    "an odd text": gguf_bytes({"k": "\U0001f600" + "x" * 100_000}),
    "flags": gguf_bytes({"k": u32(9) + u32(7) + u64(100_000) + b"\1" * 100_000}),
    "numbers": gguf_bytes({"k": u32(9) + u32(0) + u64(100_000) + b"\1" * 100_000}),
    "keys": gguf_bytes({name: u32(3) + b"\0\x80" for name in NAMES}),
    "tensors": gguf_bytes(
        {"general.alignment": 1},
        [Entry(name, (1,), 24, index) for index, name in enumerate(NAMES)],
        bytes(len(NAMES)),
        alignment=1,
    ),
}
"""Files of what is smallest, of which Python's objects are the largest beside it."""


@pytest.mark.parametrize("name", SMALLEST)
def test_memory_grows_with_the_file(name: str, tmp_path: Path) -> None:
    data = SMALLEST[name]
    tracemalloc.start()
    try:
        file = read(tmp_path, data)
        assert file.metadata or file.tensors
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 30 * len(data)


def test_every_beginning_of_a_file_is_refused(tmp_path: Path) -> None:
    for length in range(len(SOUND)):
        with pytest.raises(UnsupportedModel):
            read(tmp_path, SOUND[:length])
