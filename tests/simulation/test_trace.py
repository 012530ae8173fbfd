"""Reading traces."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from rootlace.runtime.simulation.trace import BadTrace, read_trace
from tests.simulation.traces import write_azure, write_mooncake

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"


def test_mooncake(tmp_path: Path) -> None:
    rows = [(0.5, 600, 7, [4, 9]), (1.25, 512, 0, [4]), (0.25, 1100, 3, [4, 9, 10])]
    trace = read_trace(write_mooncake(tmp_path / "t.jsonl", rows))
    assert trace.format == "mooncake" and trace.name == "t.jsonl" and len(trace) == 3
    assert trace.arrivals.tolist() == [0.0, 0.25, 1.0]  # sorted, relative to the first
    assert trace.prompt_tokens.tolist() == [1100, 600, 512]
    assert trace.output_tokens.tolist() == [3, 7, 0]
    assert trace.starts.tolist() == [0, 3, 5, 6]
    # Block 9 differs when it is the last block, of 88 tokens.
    assert trace.blocks.tolist() == [0, 1, 2, 0, 3, 0]
    assert trace.num_blocks == 4 and trace.block_tokens == 512


def test_equal_ids_behind_other_prefixes_are_other_blocks(tmp_path: Path) -> None:
    rows = [(0, 1024, 1, [1, 7]), (1, 1024, 1, [2, 7]), (2, 1024, 1, [1, 7])]
    trace = read_trace(write_mooncake(tmp_path / "t.jsonl", rows))
    assert trace.blocks.tolist() == [0, 1, 2, 3, 0, 1]


def test_azure(tmp_path: Path) -> None:
    path = write_azure(tmp_path / "t.csv", [(3.9799600, 480, 10), (64.25, 31, 0), (5, 7, 1)])
    trace = read_trace(path)
    assert trace.format == "azure"
    assert np.allclose(trace.arrivals, [0, 1.02004, 60.27004])
    assert trace.prompt_tokens.tolist() == [480, 7, 31]
    assert trace.output_tokens.tolist() == [10, 1, 0]
    assert sorted(trace.blocks.tolist()) == [0, 1, 2], "no prompt shares anything"


def test_azure_with_time_zones_and_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "\ufeffModel,TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "x,2024-05-10 00:00:00.009930+00:00,5,6\r\n"
        "\r\n"
        '"y, z",2024-05-10 00:00:01.009930+00:00,7,8\r\n'
    )
    trace = read_trace(path)
    assert trace.prompt_tokens.tolist() == [5, 7] and trace.arrivals.tolist() == [0, 1]


@pytest.mark.parametrize("form", ["mooncake", "azure"])
def test_gzip_is_seen_by_its_content(tmp_path: Path, form: str) -> None:
    if form == "mooncake":
        plain = write_mooncake(tmp_path / "t", [(0, 5, 1, [0])])
    else:
        plain = write_azure(tmp_path / "t", [(0, 5, 1)])
    packed = tmp_path / "no-suffix"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed).format == form
    cut = tmp_path / "cut"
    cut.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(BadTrace, match="not gzip from here on"):
        read_trace(cut)


GOOD = {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"timestamp": "now"}, "got `str` - at `$.timestamp`"),
        ({"timestamp": -1}, ">= 0.0 - at `$.timestamp`"),
        ({"timestamp": float("nan")}, "JSON is malformed"),
        ({"timestamp": True}, "got `bool` - at `$.timestamp`"),
        ({"input_length": 0}, ">= 1 - at `$.input_length`"),
        ({"input_length": 600.0}, "got `float` - at `$.input_length`"),
        ({"output_length": -1}, ">= 0 - at `$.output_length`"),
        ({"output_length": None}, "got `null` - at `$.output_length`"),
        ({"hash_ids": [0]}, "600 tokens are 2 blocks, hash_ids has 1"),
        ({"hash_ids": "01"}, "got `str` - at `$.hash_ids`"),
        ({"hash_ids": [0, 1.5]}, "got `float` - at `$.hash_ids[1]`"),
        ({"hash_ids": ...}, "missing required field `hash_ids`"),
    ],
)
def test_a_bad_line_of_mooncake_is_named(tmp_path: Path, change: dict, says: str) -> None:
    bad = {key: value for key, value in {**GOOD, **change}.items() if value is not ...}
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(bad)}\n")
    with pytest.raises(BadTrace) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ") and says in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [("{", "Input data was truncated"), ("[1]", "got `array`"), ("3", "got `int`")],
)
def test_a_line_that_is_no_object(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(BadTrace, match=f"t.jsonl:2: .*{says}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("2023-11-16 18:17:04", "1 fields, the header has 3"),
        ("yesterday,1,2", "TIMESTAMP must be a date and time, not 'yesterday'"),
        ("2023-11-16 18:17:04+00:00,1,2", "has a time zone, or has none"),
        ("2023-11-16 18:17:04,0,2", ">= 1 - at `$.ContextTokens`"),
        ("2023-11-16 18:17:04,x,2", "Expected `int`, got `str` - at `$.ContextTokens`"),
        ("2023-11-16 18:17:04,1,-2", ">= 0 - at `$.GeneratedTokens`"),
        ("2023-11-16 18:17:04,1,99999999999", "at `$.GeneratedTokens`"),
    ],
)
def test_a_bad_line_of_azure_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = write_azure(tmp_path / "t.csv", [(0, 1, 1)])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(BadTrace) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ") and says in str(caught.value)


def test_what_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for content, says in (
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"a,b\n1,2\n", "t:1: neither a JSON object nor a header with TIMESTAMP"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (b"\xff\xfe\n", "t:1: not UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(BadTrace, match=says):
            read_trace(path)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none")


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared traces here")
def test_public_traces() -> None:
    (mooncake,) = SHARED.glob("mooncake_conversation*")
    trace = read_trace(mooncake)
    assert (len(trace), len(trace.blocks), trace.num_blocks) == (12031, 288500, 182790)
    (azure,) = SHARED.glob("AzureLLM*code*")
    trace = read_trace(azure)
    assert len(trace) == trace.num_blocks == 8819
