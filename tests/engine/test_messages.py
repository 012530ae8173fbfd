"""Requests and updates on the pipes: they arrive as they were sent, or not at all."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.contracts.messages import (
    EngineOutput,
    EngineRequest,
    TokenScore,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from rootlace.runtime.contracts.plan import TokenScores
from rootlace.wire.protocol import Constraint, SamplingParams

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
PARAMS = SamplingParams(max_tokens=4, seed=7)


def int32(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


@given(IDS, IDS, st.integers(1, 64), st.sampled_from([0.0, 0.02]))
@settings(max_examples=12)
def test_a_request_arrives_as_it_was_sent(prompt, output, every, seconds) -> None:
    constraint = Constraint("regex", "a+")
    sent = EngineRequest(
        3,
        int32(prompt),
        PARAMS,
        int32(output),
        constraint,
        namespace="tenant",
        program="program",
        adapter="adapter",
        emit_every=every,
        emit_seconds=seconds,
        report="own",
    )
    (got,) = decode_to_engine(encode([sent]))
    assert isinstance(got, EngineRequest)
    for name in EngineRequest.__struct_fields__:
        ours, theirs = getattr(sent, name), getattr(got, name)
        if isinstance(ours, np.ndarray):
            assert theirs.dtype == np.int32 and np.array_equal(ours, theirs)
        else:
            assert ours == theirs, name


@given(st.data(), st.integers(0, 5), st.integers(0, 3))
@settings(max_examples=12)
def test_scores_arrive_as_they_were_sent(data, count, top) -> None:
    floats = st.floats(-1e4, 0, width=32)

    def values(n: int) -> list[float]:
        return data.draw(st.lists(floats, min_size=n, max_size=n))

    scores = TokenScores(
        np.array(values(count), np.float32),
        np.arange(count * top, dtype=np.int32).reshape(count, top),
        np.array(values(count * top), np.float32).reshape(count, top),
    )
    sent = EngineOutput(
        1, tuple(range(count)), scores, scores, int32([9, *range(count)]), forced=(0,)
    )
    (got,) = decode_from_engine(encode([sent]))
    assert isinstance(got, EngineOutput)
    single = [
        TokenScore(
            at,
            float(scores.logprobs[at]),
            tuple(
                (int(scores.top_ids[at, k]), float(scores.top_logprobs[at, k])) for k in range(top)
            ),
        )
        for at in range(count)
    ]
    assert got.token_scores() == sent.token_scores() == single
    assert got.prompt_token_scores() == [TokenScore(9, None), *single]
    assert (got.token_ids, got.forced, got.finish) == (sent.token_ids, (0,), None)


def test_an_update_without_scores_has_none() -> None:
    (got,) = decode_from_engine(encode([EngineOutput(1, (2,))]))
    assert isinstance(got, EngineOutput)
    assert got.token_scores() == got.prompt_token_scores() == []


@pytest.mark.parametrize(
    "array",
    [
        7,
        [],
        ["<i4", [1]],
        ["<i4", [2], b"1234"],
        ["<i8", [1], b"12345678"],
        [["<i4"], [1], b"1234"],
    ],
)
def test_what_is_no_array_is_not_received(array) -> None:
    frame = msgspec.msgpack.encode(
        [{"type": "submit", "rid": 1, "token_ids": array, "params": PARAMS}]
    )
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(frame)


def test_only_arrays_of_ids_and_scores_travel() -> None:
    for token_ids in (np.zeros(2, np.int64), np.array(["a"]), object()):
        with pytest.raises(NotImplementedError):
            encode([EngineRequest(1, token_ids, PARAMS)])  # type: ignore[arg-type]
