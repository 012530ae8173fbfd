"""The benchmark of constraints: masks of one engine, and a load served in all modes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.constrained import masks
from benchmarks.constrained.__main__ import engine_tables, serving_table
from benchmarks.constrained.engines import ENGINES, load_tokenizer
from benchmarks.constrained.masks import measure, measure_apart, summarise
from benchmarks.constrained.serving import MODES, measure_serving, order_of, runs_of


@pytest.mark.parametrize("name", ["rootlace (automaton)", "rootlace (outlines-core)", "llguidance"])
def test_masks_of_an_engine(name: str, demo_model: Path) -> None:
    tokenizer = load_tokenizer(demo_model)
    engine = ENGINES[name](tokenizer)
    found = measure(engine, tokenizer, "regex", "(ab|cd){2}!", ["abcd!", "abab!", "nothing"])
    assert (found["texts"], found["texts_refused"]) == (3, 1)
    assert found["compile_first_ms"] >= found["compile_ms"] > 0
    assert 0 < found["forced"] < found["tokens"]
    assert len(found["first_us"]) == len(found["later_us"]) > 0
    row = summarise([found, {"name": "another", "error": "refused"}])
    assert (row["taken"], row["of"]) == (1, 2)
    assert 0 < row["mask_p50_us"] <= row["mask_p99_us"]


def test_an_engine_in_a_process_of_its_own(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no time for any constraint; there is no other."""
    name = "llguidance"
    found = {name: measure_apart(name, demo_model, 0.0)}
    monkeypatch.setattr(masks, "ProcessPoolExecutor", lambda n, mp_context: ThreadPoolExecutor(n))
    found["x"] = measure_apart("x", demo_model, 0.0)
    assert found[name]["setup_seconds"] > 0 and "error" in found["x"]
    assert {one["error"] for one in found[name]["constraints"]} == {"out of time"}
    assert [kind["taken"] for kind in found[name]["kinds"].values()] == [0, 0]
    assert [table.row_count for table in engine_tables(found)] == [2] * 4


def test_a_load_is_served_in_all_modes(demo_model: Path) -> None:
    calls: list[int] = []
    found = measure_serving(str(demo_model), 3, 1, 2, "closed", lambda: calls.append(1))
    assert len(calls) == runs_of(1)
    assert set(found["modes"]) == set(MODES)
    tokens = {mode: summary["tokens"] for mode, summary in found["modes"].items()}
    assert tokens["unconstrained"] == tokens["constrained"] > 0
    forced = {mode: summary["forced_share"] for mode, summary in found["modes"].items()}
    assert forced["jump"] > 0 == forced["unconstrained"] == forced["constrained"]
    assert serving_table(found).row_count == len(MODES)


def test_every_mode_takes_every_turn() -> None:
    orders = [tuple(order_of(repetition)) for repetition in range(2 * len(MODES))]
    assert len(set(orders)) == 6
