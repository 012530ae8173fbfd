"""Sampler on a device (plans, arrays, resident masks): the same results as on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rootlace.kernels.interface import KernelSet
from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.reference.sampling import score_tokens
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow, SampleRow, SteppedAutomaton
from rootlace.runtime.model.automaton_table import HostMasks, arena_for
from rootlace.runtime.model.executor.torch_setup import host_sampling
from rootlace.runtime.model.sampler import Sampler
from rootlace.wire.protocol import SamplingParams
from tests.model.test_sampler import EDITS, GRID, Table, make_logits, make_row

VOCAB = 403
WORDS = 13
CPU = torch.device("cpu")


def device_sampler(
    kernels: KernelSet = REFERENCE, max_rows: int = 64, device: torch.device = CPU
) -> Sampler:
    return Sampler(VOCAB, kernels, arena_for(VOCAB, max_rows, device, 1 << 20))


def sampled(
    device: Sampler,
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    before: Sequence[int] = (),
    empty: int = 0,
) -> tuple[list[int], np.ndarray]:
    """Return (tokens, logprobs), with `empty` rows behind the others."""
    count = len(rows) + empty
    plan = device.plan(rows, count)
    arrays = {name: torch.from_numpy(array.copy()) for name, array in plan.arrays.items()}
    assert all(array.shape[0] == count for array in arrays.values()) or plan.kind is None
    tokens = torch.full((count + len(before) + 3,), 77, dtype=torch.int32)
    tokens[: len(before)] = torch.tensor(before, dtype=torch.int32)
    logprobs = torch.full((count + 3,), 77.0)
    padded = torch.cat([logits, torch.randn(empty, logits.shape[1]).to(logits.dtype)])
    kept = padded.clone()
    device.run(plan, padded, arrays, tokens, logprobs)
    assert torch.equal(padded.nan_to_num(), kept.nan_to_num())
    assert (logprobs[count:] == 77).all() and (tokens[count + len(before) :] == 77).all()
    return tokens[: len(rows)].tolist(), logprobs[: len(rows)].numpy()


def on_cpu(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    sampler = Sampler(VOCAB, host_sampling(), HostMasks(VOCAB))
    return sampler.sample(logits.float().numpy(), rows).tolist()


@pytest.mark.parametrize("ties", [False, True])
def test_every_cut_and_every_edit_in_one_batch(ties: bool) -> None:
    rows = [make_row(params, list(range(1, 4 + i % 5))) for i, params in enumerate(GRID)]
    rows += EDITS.values()
    logits = make_logits(len(rows), seed=3, ties=ties)
    found, _ = sampled(device_sampler(max_rows=400), logits, rows, empty=5)
    assert found == on_cpu(logits, rows)


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([-1, -1, 1, 7, VOCAB, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.2]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    seed=st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 5), st.floats(-9, 9), max_size=3),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, -0.7]),
    logprobs=st.booleans(),
)
masks = st.none() | st.integers(0, 99).map(
    lambda seed: np.random.default_rng(seed).integers(-(2**31), 2**31, WORDS - seed % 3, np.int32)
)
rows_of = st.builds(
    lambda params, ids, prompt, mask, table, banned: SampleRow(
        0,
        params,
        np.array(ids, np.int32),
        min(prompt, len(ids)),
        MaskRow(Table(mask, 10**6 + int(mask.sum())), 0) if mask is not None and table else mask,
        tuple(banned),
    ),
    params,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    st.integers(1, 5),
    masks,
    st.booleans(),
    st.lists(st.integers(0, VOCAB + 3), max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(rows_of, min_size=1, max_size=6), st.integers(0, 99), st.integers(0, 3))
def test_any_rows(rows: list[SampleRow], seed: int, empty: int) -> None:
    logits = make_logits(len(rows), seed=seed, ties=seed % 2 == 0).bfloat16()
    found, logprobs = sampled(device_sampler(), logits, rows, empty=empty)
    expected = on_cpu(logits, rows)
    assert found == expected
    asked = [i for i, row in enumerate(rows) if row.params.logprobs]
    if asked:
        exact, _, _ = score_tokens(logits.float()[asked], torch.tensor(found)[asked], 0)
        np.testing.assert_allclose(logprobs[asked], exact, atol=1e-6)


def test_rows_alike_are_one_kind() -> None:
    device = device_sampler()
    greedy, hot, cut, scored, biased = (
        make_row(SamplingParams(seed=1, **kind))
        for kind in (
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 1.0, "top_p": 0.5},
            {"temperature": 0.0, "logprobs": True},
            {"temperature": 0.0, "logit_bias": {3: 1.0}},
        )
    )
    masked = make_row(SamplingParams(temperature=0.0), mask=np.full(WORDS, -1, np.int32))
    kinds = [device.plan([row], 4).kind for row in (greedy, hot, cut, scored, biased, masked)]
    assert kinds[4] is None and len(set(kinds)) == len(kinds)
    assert device.plan([], 4).kind == device.plan([greedy, greedy], 9).kind == kinds[0]
    assert device.plan([hot, greedy], 2).kind == kinds[1]
    assert device.plan([cut, hot], 2).kind == kinds[2]
    assert device.plan([replace(greedy, banned=(5,))], 2).kind is None


def test_a_row_whose_mask_is_not_filled_is_refused() -> None:
    row = make_row(SamplingParams(temperature=0.0))
    device = device_sampler()
    unfilled = replace(row, mask=MaskRow(Table(np.full(WORDS, -1, np.int32), 2**43), 1))
    with pytest.raises(RuntimeError, match="not filled"):
        device.plan([unfilled], 1)
    sampled(device, make_logits(1), [row])


def random_automaton(key: int, states: int, classes: int) -> SteppedAutomaton:
    random = np.random.default_rng(key)
    next_state = random.integers(-1, states, (states, classes)).astype(np.int32)
    next_state[:, 0] = -1
    token_class = random.integers(0, classes, VOCAB).astype(np.int32)
    allowed = next_state[:, token_class] >= 0
    packed = np.packbits(np.pad(allowed, ((0, 0), (0, 13))), axis=1, bitorder="little")
    words = np.ascontiguousarray(packed).view(np.int32)
    masks, mask_of = np.unique(words, axis=0, return_inverse=True)
    return SteppedAutomaton(
        key, token_class, next_state, mask_of.reshape(-1).astype(np.int32), masks
    )


def test_rows_go_on_from_tokens_not_known_yet() -> None:
    """Automata take the token of the step before; it may be forbidden, or not found."""
    device = device_sampler()
    random = np.random.default_rng(0)
    automata = [random_automaton(key, 3 + 5 * key, 2 + key % 3) for key in range(6)]
    states = [[(a, s) for s in range(-1, len(a.next_state))] for a in automata]
    places = [place for each in states for place in each]
    before = [*random.integers(0, VOCAB, 30).tolist(), -1]
    rows, expected = [], []
    logits = make_logits(40, seed=1)
    for index in range(len(logits)):
        automaton, state = places[random.integers(len(places))]
        source = int(random.integers(-1, len(before)))
        row = make_row(SamplingParams(temperature=float(index % 2), seed=index))
        rows.append(replace(row, automaton=AutomatonState(automaton, state), source=source))
        if source >= 0 and state >= 0:
            token = before[source]
            state = -1 if token < 0 else automaton.next_state[state, automaton.token_class[token]]
        mask = np.zeros(WORDS, np.int32)
        if state >= 0:
            mask = automaton.masks[automaton.mask_of[state]]
        ids = row.token_ids if source < 0 else np.append(row.token_ids, 1)
        expected.append(replace(row, mask=mask, token_ids=ids))
    plain = make_row(SamplingParams(temperature=0.0))
    rows.append(plain)
    expected.append(plain)
    logits = torch.cat([logits, make_logits(1)])
    found, _ = sampled(device, logits, rows, before, empty=2)
    assert found == on_cpu(logits, expected)
    assert -1 in found


def test_penalties_follow_a_sequence() -> None:
    """Counts are kept while a sequence grows, and made again for another or a shortened one."""
    device = device_sampler()
    params = SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.8)
    random = np.random.default_rng(0)
    ids = random.integers(0, 40, 30).tolist()
    for length in (9, 10, 11, 14, 12, 13, 30, 30):
        row = make_row(params, ids[:length], prompt_len=10)
        logits = torch.rand(1, VOCAB)
        logits[:, :40] += 1.0
        assert sampled(device, logits, [row])[0] == on_cpu(logits, [row])
        ids[length - 1] = 3
