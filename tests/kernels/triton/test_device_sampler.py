"""The sampler finds the same tokens with the Triton kernels as with the reference."""

import importlib

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.triton import TRITON
from rootlace.runtime.contracts.plan import AutomatonState, SampleRow
from rootlace.wire.protocol import SamplingParams
from tests.model.test_device_sampler import VOCAB, WORDS, device_sampler, on_cpu, random_automaton
from tests.model.test_sampler import EDITS, make_logits, make_row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
module = importlib.import_module("rootlace.kernels.triton.pick_tokens")


def sampled(logits: torch.Tensor, rows: list[SampleRow], before: list[int]) -> list[int]:
    device = device_sampler(TRITON, device=DEVICE)
    plan = device.plan(rows, len(rows) + 1)
    arrays = {n: torch.from_numpy(array.copy()).to(DEVICE) for n, array in plan.arrays.items()}
    tokens = torch.full((len(rows) + 9,), 7, dtype=torch.int32, device=DEVICE)
    tokens[: len(before)] = torch.tensor(before, dtype=torch.int32, device=DEVICE)
    logprobs = torch.zeros(len(tokens), device=DEVICE)
    padded = torch.cat([logits, logits[:1]]).to(DEVICE)
    device.run(plan, padded, arrays, tokens, logprobs)
    expected = REFERENCE.token_logprobs(padded.cpu(), tokens[: len(padded)].cpu())
    if plan.logprobs:
        torch.testing.assert_close(logprobs[: len(padded)].cpu(), expected, equal_nan=True)
    return tokens[: len(rows)].tolist()


def test_lists_masks_and_cuts_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sizes", lambda arch: module.Sizes(256, 512, 4))
    rows = list(EDITS.values())
    rows.append(make_row(SamplingParams(temperature=1.0, seed=2, top_p=0.7, logprobs=True)))
    rows.append(make_row(SamplingParams(temperature=0.0)))
    logits = make_logits(len(rows), seed=5).bfloat16()
    assert sampled(logits, rows, []) == on_cpu(logits, rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_automata_go_on_from_tokens_not_known_yet(temperature: float) -> None:
    random = np.random.default_rng(1)
    automata = [random_automaton(key, 3 + 5 * key, 2 + key % 3) for key in range(4)]
    before = [*random.integers(0, VOCAB, 5).tolist(), -1]
    rows, expected = [], []
    for index in range(12):
        automaton = automata[index % 4]
        state = int(random.integers(-1, len(automaton.next_state)))
        source = index % 7 - 1
        row = make_row(SamplingParams(temperature=temperature, seed=index, logprobs=index == 1))
        rows.append(replace(row, automaton=AutomatonState(automaton, state), source=source))
        if source >= 0 and state >= 0:
            token = before[source]
            state = -1 if token < 0 else automaton.next_state[state, automaton.token_class[token]]
        mask = np.zeros(WORDS, np.int32)
        if state >= 0:
            mask = automaton.masks[automaton.mask_of[state]]
        ids = row.token_ids if source < 0 else np.append(row.token_ids, 1)
        expected.append(replace(row, mask=mask, token_ids=ids))
    logits = make_logits(len(rows), seed=1).bfloat16()
    assert sampled(logits, rows, before) == on_cpu(logits, expected)
