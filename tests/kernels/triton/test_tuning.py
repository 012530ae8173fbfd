"""The tables of launches: how they are read, and that the committed ones are whole."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rootlace.kernels.triton import launching
from rootlace.kernels.triton.launching import Launch, settings

TABLES = sorted(launching.TABLES.glob("*.json"))


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of the committed tables; nothing remembered of either."""
    monkeypatch.setattr(launching, "TABLES", tmp_path)
    launching.forget()
    yield tmp_path
    launching.forget()


def entry(when: dict[str, object], size: int) -> dict[str, object]:
    return {"when": when, "blocks": {"BLOCK": size}, "num_warps": 4, "num_stages": 2}


def write(path: Path, **kernels: list[dict[str, object]]) -> None:
    path.write_text(json.dumps({"measured": None, "kernels": kernels}))


def test_the_first_entry_that_holds_is_taken(tables: Path) -> None:
    write(
        tables / "default.json",
        norm=[
            entry({"width": {"most": 64}, "fp8": True}, 1),
            entry({"width": {"most": 64}}, 2),
            entry({"dtype": "bf16"}, 3),
            entry({}, 4),
        ],
    )

    def size(width: int, fp8: bool, dtype: str) -> int:
        return settings("norm", 90, width=width, fp8=fp8, dtype=dtype).blocks["BLOCK"]

    assert size(64, True, "bf16") == 1
    assert size(64, False, "bf16") == 2
    assert size(65, True, "bf16") == 3
    assert size(65, True, "fp32") == 4


def test_an_architecture_with_a_table_and_one_without(tables: Path) -> None:
    write(tables / "default.json", norm=[entry({}, 1)], other=[entry({}, 5)])
    write(tables / "sm_90.json", norm=[entry({}, 2)])
    assert settings("norm", 90) == Launch({"BLOCK": 2}, 4, 2)
    assert settings("norm", 80).blocks["BLOCK"] == 1
    assert settings("norm", 0).blocks["BLOCK"] == 1
    assert settings("other", 90).blocks["BLOCK"] == 5
    with pytest.raises(KeyError, match="another"):
        settings("another", 90)


def test_a_launch_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        settings("gated", 90).blocks["BLOCK"] = 1  # type: ignore[index]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_committed_tables_are_whole(path: Path) -> None:
    table = json.loads(path.read_text())
    default = json.loads((launching.TABLES / "default.json").read_text())["kernels"]
    assert table.keys() == {"measured", "kernels"}
    assert table["kernels"].keys() == default.keys()
    for kernel, entries in table["kernels"].items():
        names = default[kernel][0]["blocks"].keys()
        assert entries[-1]["when"] == {}
        for found in entries:
            assert found.keys() == {"when", "blocks", "num_warps", "num_stages"}
            assert found["blocks"].keys() == names
            assert found["num_warps"] in (1, 2, 4, 8, 16, 32)
            assert 1 <= found["num_stages"] <= 8
            for size in found["blocks"].values():
                assert size > 0


def test_the_architectures_of_the_aot_check_have_tables() -> None:
    assert {"default", "sm_80", "sm_90"} <= {path.stem for path in TABLES}
