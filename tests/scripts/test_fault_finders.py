"""Each planted fault has its place, and what the fuzzers make of JSON is JSON."""

import sys
from typing import Any

import msgspec
import pytest

from tests.conftest import ROOT
from tests.corpora.readers import inputs


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])


def test_each_planted_fault_has_its_one_place(scripts: None) -> None:
    import planted_faults  # type: ignore[import-not-found]

    for fault in planted_faults.FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, fault.name
        assert fault.old != fault.new


@pytest.mark.parametrize("reader", ["http", "schema", "tag", "safetensors", "wire"])
def test_what_the_mutator_makes_can_be_read(scripts: None, reader: str) -> None:
    import fuzz_mutator  # type: ignore[import-not-found]

    def by_bytes(data: bytes, _: int) -> bytes:
        return b"by bytes"

    corpus = [path.read_bytes() for path in inputs(reader)]
    mutate = fuzz_mutator.Mutator(reader, corpus, by_bytes)
    decode, _ = fuzz_mutator.CODECS[reader]
    made: set[bytes] = set()
    for data in corpus:
        try:
            decode(data)
        except (ValueError, msgspec.MsgspecError):
            assert mutate(data, 2048, 0) == b"by bytes"
            continue
        found: list[Any] = [mutate(data, 2048, seed) for seed in range(20)]
        assert found == [mutate(data, 2048, seed) for seed in range(20)]
        made.update(found)
    made -= {*corpus, b"by bytes"}
    assert len(made) > 40
    for one in made:
        decode(one)
        assert len(one) <= 2048
