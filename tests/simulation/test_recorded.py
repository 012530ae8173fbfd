"""Recorded texts replayed through the drafter."""

import json
import random
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from rootlace.cli.app import app
from rootlace.runtime.simulation.trace import (
    DRAFT_PRICES,
    BadTrace,
    Texts,
    read_recorded,
    replay_texts,
)

DRAW = random.Random(3)
FRESH = [[DRAW.randrange(1 << 16) for _ in range(200)] for _ in range(4)]


def written(path: Path, texts: list[tuple[list[int], list[int]]]) -> Path:
    lines = [json.dumps({"input_ids": one, "output_ids": two}) for one, two in texts]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    """A text that quotes its prompt, one that repeats an earlier answer, an unpredictable one."""
    first, second, third, fourth = FRESH
    quoted = first[20:120]
    given = [(first, quoted), (second, quoted), (third, fourth), ([7], []), ([7], [8])]
    return read_recorded(written(tmp_path / "t.jsonl", given))


@pytest.mark.parametrize("price", DRAFT_PRICES)
def test_every_token_is_sampled_or_drafted(texts: Texts, price: float) -> None:
    found = replay_texts(texts, price)
    outputs = [len(text) - prompt for text, prompt in texts]
    right, drafted = sum(found.right.values()), sum((*found.right.values(), *found.wrong.values()))
    begun = sum(count > 0 for count in outputs)  # the first token comes from the prefill
    assert found.tokens == sum(outputs) == begun + found.steps + right
    plain = found.tokens - begun
    assert found.speedup == pytest.approx(plain / (found.steps + price * drafted))
    assert 1 < found.speedup < plain / 200  # 200 tokens are unpredictable
    assert found.right["output"] > 60 < found.right["tree"] and not found.right["prediction"]


def test_nothing_is_known_of_an_empty_index(texts: Texts) -> None:
    found = replay_texts(texts, 0.1, capacity=2)
    assert not any(found.right.values()) and found.speedup == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "t.jsonl:2: Input data was truncated"),
        ('{"x": ' + "[" * 100_000, "t.jsonl:2: maximum recursion depth"),
        ('{"input_ids": [1], "output_ids": [1.5]}', "got `float` - at `$.output_ids[0]`"),
        ('{"input_ids": [], "output_ids": [1]}', "length >= 1 - at `$.input_ids`"),
        ('[{"output_ids": [1]}]', "t.jsonl:2: Expected `object`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = written(tmp_path / "t.jsonl", [([1], [2])])
    path.write_text(path.read_text() + line)
    with pytest.raises(BadTrace, match=re.escape(says)):
        read_recorded(path)
    result = CliRunner().invoke(app, ["simulate", str(path)])
    assert result.exit_code == 1 and says in result.output.replace("\n", "")


def test_the_command(texts: Texts, tmp_path: Path) -> None:
    path, figures = tmp_path / "t.jsonl", tmp_path / "out.json"
    result = CliRunner().invoke(app, ["simulate", str(path), "--json", str(figures)])
    assert result.exit_code == 0 and "5 requests, 401 output tokens" in result.output
    assert [one["price"] for one in json.loads(figures.read_text())["prices"]] == list(DRAFT_PRICES)
    for option in (["--policy", "lpm"], ["--rate", "1"]):
        result = CliRunner().invoke(app, ["simulate", str(path), *option])
        assert result.exit_code == 1 and f"{option[0]}: recorded texts" in result.output
