"""Choices scored against brute force on the fake engine's log-probabilities."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from rootlace.runtime.server.score import choose, draw
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.protocol import (
    Append,
    ChoicesMethod,
    Generate,
    Open,
    Select,
    Selected,
    Text,
    Usage,
)
from tests.server.conftest import Client
from tests.server.fake_engine import score

METHODS: tuple[ChoicesMethod, ...] = (
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
)


def brute_scores(
    tokenizer: Tokenizer, text: str, choices: tuple[str, ...], method: str
) -> tuple[int, list[float]]:
    """Compute all scores from whole strings."""
    base = tokenizer.encode(text)
    joint = [tokenizer.encode(text + choice) for choice in choices]
    start = 0
    while all(start < len(x) and x[start] == y for x in joint for y in base[start : start + 1]):
        if start == len(base):
            break
        start += 1
    rows, alone = [], []
    for ids in joint:
        rows.append([score(tuple(ids[: i + 1])) if i else 0.0 for i in range(start, len(ids))])
        own = tuple(ids[start:])
        alone.append([score(own[: i + 1]) if i else 0.0 for i in range(len(own))])
    if method == "unconditional_likelihood_normalized":
        means = [float(np.mean(np.subtract(r, u))) for r, u in zip(rows, alone, strict=True)]
        return int(np.argmax(means)), means
    means = [float(np.mean(row)) for row in rows]
    if method == "token_length_normalized":
        return int(np.argmax(means)), means
    width = max(map(len, rows))
    table = [r + [m] * (width - len(r)) for r, m in zip(rows, means, strict=True)]
    return max(range(len(table)), key=lambda c: table[c]), means


@pytest.mark.parametrize("method", METHODS)
async def test_against_brute_force(
    client: Callable[..., Client], tokenizer: Tokenizer, method: ChoicesMethod
) -> None:
    rng = random.Random(4)
    words = [" yes", " no", "may", "be", " not at all", "s", " 你好", "'s", " Yes, sir!", "123"]
    c = client(tokenizer=tokenizer)
    op = 0
    for branch in range(15):
        text = "".join(rng.choice(words) for _ in range(rng.randrange(1, 6)))
        choices = tuple("".join(rng.sample(words, rng.randrange(1, 4))) for _ in range(4))
        c.send(
            Open(op + 1, branch),
            Append(op + 2, branch, (Text(text),)),
            Select(op + 3, branch, choices, method=method),
            Generate(op + 4, branch),
        )
        selected = await c.result(op + 3)
        assert isinstance(selected, Selected), selected
        best, scores = brute_scores(tokenizer, text, choices, method)
        assert selected.scores == pytest.approx(scores)
        assert selected.index == best and selected.choice == choices[best]
        await c.result(op + 4)
        prompt = c.engine.submitted[-1].token_ids.tolist()
        assert prompt == tokenizer.encode(text + choices[best])
        op += 4


async def test_all_choices_are_submitted_together(client: Callable[..., Client]) -> None:
    c = client()
    c.engine.paused = True
    c.send(Open(1, 1), Append(2, 1, (Text("Is it?"),)), Select(3, 1, (" yes", " no", " maybe")))
    await c.settle()
    assert len(c.engine.running) == 3
    assert all(m.params.max_tokens == 0 for m in c.engine.submitted)
    c.engine.paused = False
    c.engine._schedule()
    selected = await c.result(3)
    assert isinstance(selected, Selected)
    lengths = [len(m.token_ids) for m in c.engine.submitted]
    start = {m.params.prompt_logprobs_from for m in c.engine.submitted}
    assert selected.usage == Usage(start.pop(), min(lengths) // 2) and not start
    for choice, tokens in zip((" yes", " no", " maybe"), selected.token_logprobs, strict=True):
        assert "".join(t.text for t in tokens) == choice


@pytest.mark.parametrize("method", METHODS)
async def test_what_choices_begin_with_is_scored_once(
    client: Callable[..., Client], tokenizer: Tokenizer, method: ChoicesMethod
) -> None:
    c = client(tokenizer=tokenizer)
    choices = (" shoes > men", " hats", " shoes > women", " shoes", " hats", " shoes > men > old")
    c.send(Open(1, 1), Append(2, 1, (Text("Kind:"),)), Select(3, 1, choices, method=method))
    selected = await c.result(3)
    assert isinstance(selected, Selected)
    best, scores = brute_scores(tokenizer, "Kind:", choices, method)
    assert selected.index == best and selected.scores == pytest.approx(scores)
    told = [(m.token_ids.tolist(), m.params.prompt_logprobs_from or 0) for m in c.engine.submitted]
    scored = [tuple(ids[: at + 1]) for ids, start in told for at in range(start, len(ids))]
    assert len(scored) == len(set(scored))


async def test_too_long_and_without_room(client: Callable[..., Client]) -> None:
    c = client()
    c.send(Open(1, 1), Append(2, 1, (Text("a"),)), Select(3, 1, ("b", "c " * 5000)))
    failed = await c.result(3)
    assert getattr(failed, "code", "") == "context_length_exceeded"


def test_methods_differ() -> None:
    # The first choice begins best, the second is best on average, the third surprises most.
    conditional = [[-0.1, -9.0], [-0.5, -0.5], [-3.0, -3.0]]
    alone = [[None, -9.0], [None, -0.1], [None, -20.0]]
    assert choose("token_length_normalized", conditional)[0] == 1
    assert choose("greedy_token_selection", conditional)[0] == 0
    best, scores = choose("unconditional_likelihood_normalized", conditional, alone)
    assert best == 2 and scores == pytest.approx([-0.05, -0.45, 7.0])


def test_greedy_extends_a_shorter_choice_by_its_mean() -> None:
    rows = [[-1.0, -1.0], [-1.0, -1.0, -2.0], [-1.0, -1.0, -0.5]]
    assert choose("greedy_token_selection", rows)[0] == 2
    assert choose("greedy_token_selection", rows[:2])[0] == 0
    assert choose("greedy_token_selection", [[-1.0], [-1.0]])[0] == 0


def test_drawing() -> None:
    scores, steps = [-1.0, -2.0, -0.5], 10_000
    for temperature in (0.3, 1.0, 5.0):
        counts = np.bincount([draw(scores, temperature, i / steps) for i in range(steps)])
        weights = np.exp(np.array(scores) / temperature)
        assert counts / steps == pytest.approx(weights / weights.sum(), abs=2 / steps)
    assert {draw([-1e6, -2e6], 1e-9, i / 10) for i in range(10)} == {0}


async def test_a_seed_draws_the_same_at_the_same_place(client: Callable[..., Client]) -> None:
    c, picked = client(), []
    for branch in (1, 2):
        ops = [
            Select(100 * branch + n, branch, (" a", " b"), temperature=1e6, seed=7)
            for n in range(30)
        ]
        c.send(Open(branch, branch), *ops)
        events = [await c.result(op.op) for op in ops]
        picked.append([event.index for event in events if isinstance(event, Selected)])
    assert picked[0] == picked[1] and len(picked[0]) == 30 and set(picked[0]) == {0, 1}


async def test_a_drawn_choice_joins_the_branch(client: Callable[..., Client]) -> None:
    c = client()
    c.send(Open(1, 1), *(Select(n, 1, (" a", " b", " c"), temperature=1e6) for n in range(2, 42)))
    picked = [await c.result(n) for n in range(2, 42)]
    assert {s.index for s in picked if isinstance(s, Selected)} == {0, 1, 2}
    c.send(Generate(50, 1))
    await c.result(50)
    text = "".join(s.choice for s in picked if isinstance(s, Selected))
    prompt = c.engine.submitted[-1].token_ids.tolist()
    assert prompt == c.model.tokenizer.encode(text)
