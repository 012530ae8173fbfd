"""Fast paths, each compared with the plain path beside it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.contracts.matcher import Place
from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.contracts.plan import MaskRow, SampleRow, TokenScores
from rootlace.runtime.scheduler.batch import DecodeRows, plain_samples
from rootlace.runtime.scheduler.masks import SampleRows, StepMasks
from rootlace.runtime.scheduler.output import TokenIntake
from rootlace.runtime.scheduler.request import RequestState
from rootlace.wire.protocol import SamplingParams
from tests.scheduler.matchers import Asked, Digits, Script

VOCAB = 16


class Table:
    key = 1
    rows = np.zeros((8, 1), np.int32)

    def filled(self, row: int) -> bool:
        return True


class Ready(Digits):
    """Matcher whose mask is known to be filled, or is found on request."""

    def __init__(self, row: int, known: bool) -> None:
        super().__init__(100)
        self.row = MaskRow(Table(), row)
        self.place = Place()
        self.place.mask = self.row if known else None

    def mask_row(self) -> MaskRow | None:
        return self.row


def sequence(rid: int, params: SamplingParams, matcher: object = None) -> RequestState:
    request = EngineRequest(rid, np.arange(3 + rid, dtype=np.int32), params)
    return RequestState(request, matcher, rid, jumps=True, arrived=0.0, max_length=200)  # type: ignore[arg-type]


def expect_equal(ours: SampleRow, theirs: SampleRow) -> None:
    for name in SampleRow.__struct_fields__:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, name


ROWS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.7]),
        st.sampled_from([0, 0, 0, 2]),  # min_tokens: bans stops
        st.sampled_from([0.0, 0.5]),  # a penalty
        st.sampled_from(["free", "ready", "asked"]),
        st.sampled_from([0, 0, 0, 1]),  # pending
    ),
    min_size=1,
    max_size=6,
)


@given(ROWS, st.booleans())
@settings(max_examples=60)
def test_sample_rows(rows, automata) -> None:
    """Plain rows made by the batch equal those of `SampleRows.start`."""
    made = []
    for rid, (temperature, min_tokens, penalty, kind, pending) in enumerate(rows):
        params = SamplingParams(
            temperature=temperature,
            max_tokens=9,
            min_tokens=min_tokens,
            frequency_penalty=penalty,
            stop_token_ids=(3,),
            seed=rid,
        )
        matcher = None if kind == "free" else Ready(rid, kind == "ready")
        one = sequence(rid, params, matcher)
        one.pending, one.sampled_at = pending, rid
        made.append((rid, one))
    ours, wait = plain_samples(made, SampleRows(StepMasks(VOCAB), automata))
    theirs, other_wait = SampleRows(StepMasks(VOCAB), automata).start(made)
    assert (wait is None) == (other_wait is None)
    assert len(ours) == len(theirs) == len(made)
    for mine, other in zip(ours, theirs, strict=True):
        expect_equal(mine, other)


@pytest.mark.parametrize("seed", range(6))
def test_intake(seed: int) -> None:
    """Facts known in advance change nothing, up to the sequence's end."""
    dice = random.Random(seed)
    params = SamplingParams(max_tokens=40, seed=0, stop_token_ids=(15,), logprobs=True)
    quick = sequence(0, params, Script(seed, 30, VOCAB, forcing=3))
    asked = sequence(0, params, Asked(seed, 30, VOCAB, forcing=3))
    fast, slow = TokenIntake(), TokenIntake()
    for intake, one in ((fast, quick), (slow, asked)):
        intake.begin(one)
    while True:
        assert isinstance(asked.matcher, Script)
        token = dice.choice(asked.matcher.options(asked.matcher.seen) or [-1])
        one_score = np.full(1, -float(len(asked.forced)), np.float32)
        scores = TokenScores(one_score, np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32))
        theirs = slow.take(asked, token, scores)
        assert fast.take(quick, token, scores) == theirs
        for name in ("length", "outputs", "last", "forced", "score_next", "score_stop"):
            assert getattr(quick, name) == getattr(asked, name), name
        assert np.array_equal(quick.tokens[: quick.length], asked.tokens[: asked.length])
        assert len(quick.output_scores) == len(asked.output_scores)
        assert quick.matcher.seen == asked.matcher.seen  # type: ignore[union-attr]
        if theirs is not None:
            break
    assert (fast.forced_tokens, fast.jumps) == (slow.forced_tokens, slow.jumps)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_decode_rows(block_size: int) -> None:
    """Rows that follow from the last step equal rows laid out from the sequences."""
    dice = random.Random(block_size)
    params = SamplingParams(max_tokens=190, seed=0)
    rows = [sequence(rid, params) for rid in range(5)]
    for one in rows:
        one.computed = one.length - 1
    kept = DecodeRows(block_size)
    blocks = iter(range(10_000))
    for _ in range(100):
        for one in rows:
            one.reserve_tokens(1)
            one.last = one.tokens[one.length] = dice.randrange(VOCAB)
            one.length += 1
            one.computed += 1
            while one.table_len * block_size < one.computed:
                one.add_block(next(blocks))
        ours = kept.lay_out(rows, rows, 0)
        theirs = DecodeRows(block_size).lay_out(rows, rows, 0)
        for name in ("token_ids", "positions", "slots", "row_start"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
        for row, one in enumerate(rows):
            assert np.array_equal(
                ours.block_tables[row, : one.table_len], one.table[: one.table_len]
            )
        assert ours.sequences == rows
