"""Log-probabilities equal transformers' own, however the work is cut into steps.

Every slot that is not part of a sequence is NaN before a test begins: reading one would show.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import Gemma2Config, PreTrainedModel

from rootlace.kernels.native.packed import BFLOAT16, FLOAT32
from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import TokenScores
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.decoder.torch_decoder import Decoder
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.protocol import SamplingParams
from tests.model.checkpoints import SHAPE, configs, reference, reference_logprobs, save
from tests.model.parallel.local_ranks import divided_logprobs
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.native import skip_without

VOCAB = SHAPE["vocab_size"]
TOLERANCE = 1e-4
ALL = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=VOCAB % 128, seed=0)


Kernels = Literal["native", "reference"]
KERNELS: tuple[Kernels, ...] = ("native", "reference")


class Model(msgspec.Struct, frozen=True):
    folder: Path
    reference: PreTrainedModel
    kernels: Kernels = "reference"
    known: dict[tuple[int, ...], np.ndarray] = msgspec.field(default_factory=dict)
    """Results of transformers, by input, for both kinds of kernels."""

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        """Transformers', after each token."""
        key = tuple(token_ids)
        if key not in self.known:
            self.known[key] = reference_logprobs(self.reference, token_ids).numpy()
        return self.known[key]

    def runner(self, block_size: int = 4, tokens: int = 2048) -> ModelRunner:
        runner = ModelRunner.load(
            ExecutorConfig(model=str(self.folder), kernels=self.kernels),
            CacheConfig(block_size, tokens // block_size),
            max_step_tokens=512,
            max_running=16,
        )
        with torch.inference_mode():
            runner.kv_cache.fill_(float("nan"))
        return runner

    def check(self, token_ids: list[int], scores: TokenScores | None) -> None:
        """`scores` is of the token sampled after `token_ids`."""
        assert scores is not None
        expected = self.logprobs(token_ids)[-1]
        found = scores.top_logprobs[0]
        assert np.abs(found - expected[scores.top_ids[0]]).max() < TOLERANCE
        assert abs(scores.logprobs[0] - expected.max()) < TOLERANCE
        # The best k are the best k.
        assert np.abs(found - np.sort(expected)[::-1][: len(found)]).max() < TOLERANCE

    def check_prompt(self, token_ids: list[int], first: int, scores: list[TokenScores]) -> None:
        """`scores` are of the tokens from index `first` on."""
        expected = self.logprobs(token_ids)
        found = np.concatenate([score.logprobs for score in scores])
        wanted = [expected[i - 1, token_ids[i]] for i in range(first, len(token_ids))]
        assert len(found) == len(wanted)
        assert np.abs(found - wanted).max() < TOLERANCE


@pytest.fixture(scope="module", params=sorted(configs()))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    return Model(folder, save(configs()[request.param], folder))


@pytest.fixture(scope="module", params=KERNELS)
def model(saved: Model, request: pytest.FixtureRequest) -> Model:
    skip_without(request.param)
    return replace(saved, kernels=request.param)


@pytest.fixture(scope="module", params=KERNELS)
def sliding(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    skip_without(request.param)
    folder = tmp_path_factory.mktemp("sliding")
    return Model(folder, save(configs()["qwen2-sliding"], folder), request.param)


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, count)]


def test_prefill_then_decode(model: Model) -> None:
    runner = model.runner()
    row = Row(Blocks(runner.num_blocks, 4), tokens(23))
    scored = runner.run(make_plan([Work(row, params=ALL, score_from=1)]))
    model.check_prompt(row.token_ids, 1, scored.prompt_scores)
    model.check(row.token_ids, scored.scores[0])
    for _ in range(4):
        row.token_ids.append(int(scored.token_ids[0]))
        scored = runner.run(make_plan([Work(row, params=ALL)]))
        model.check(row.token_ids, scored.scores[0])


def test_divided_among_two_ranks(saved: Model) -> None:
    """Sums are taken of the shards that the spec names. The reference divides norms of all heads
    together; tests of GGUF files divide other models."""
    token_ids, config = tokens(23), ModelConfig.read(saved.folder)
    kernels: Kernels = "reference" if config.spec.attention.joint_norm else "native"
    skip_without(kernels)
    found = divided_logprobs(config, 2, token_ids, 9, kernels)
    assert np.abs(found.numpy() - saved.logprobs(token_ids)).max() < TOLERANCE


def test_ragged_batch_of_prefill_chunks_and_decode_rows(model: Model) -> None:
    runner = model.runner()
    blocks = Blocks(runner.num_blocks, 4)
    rows = [Row(blocks, tokens(count, seed=count)) for count in (1, 2, 9, 17, 30, 45)]
    # Cut every prompt differently: row i does i + 1 tokens in the first step, the rest of some in
    # the second, the others' in the third while the first ones decode.
    runner.run(make_plan([Work(row, min(i + 1, len(row.token_ids))) for i, row in enumerate(rows)]))
    rows = [row for row in rows if row.computed < len(row.token_ids)]
    for step in range(6):
        work = []
        for index, row in enumerate(rows):
            left = len(row.token_ids) - row.computed
            work.append(Work(row, min(left, 3 + 4 * ((index + step) % 3)), params=ALL))
        result = runner.run(plan := make_plan(work))
        for sample, scores, token in zip(
            plan.samples, result.scores, result.token_ids, strict=True
        ):
            row = rows[sample.row]
            model.check(row.token_ids, scores)
            row.token_ids.append(int(token))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_shared_prefix_blocks_copies_and_duplicates(sliding: Model, block_size: int) -> None:
    """Rows that share full blocks, continue a copied partial one, or one written in this step."""
    runner = sliding.runner(block_size)
    blocks = Blocks(runner.num_blocks, block_size, seed=3)
    prefix = tokens(block_size + 3 if block_size > 1 else 9)
    first = Row(blocks, prefix)
    runner.run(make_plan([Work(first)]))

    # One branch shares the full blocks and gets a copy of the partial one's rows, and in the same
    # step another continues that branch's chunk while it is being computed.
    full, partial = divmod(len(prefix), block_size)
    branch = Row(blocks, prefix + tokens(4, seed=1), computed=len(prefix), table=first.table[:full])
    copies = []
    if partial:
        branch.reserve(len(prefix))
        copies = [(first.table[full], branch.table[full], partial)]
    branch.reserve(len(branch.token_ids))

    shared = len(branch.token_ids)
    later = Row(blocks, branch.token_ids + tokens(6, seed=2), computed=shared)
    whole, rest = divmod(shared, block_size)
    later.table = branch.table[:whole]
    later.reserve(len(later.token_ids))
    duplicates = []
    if rest:
        # Rows of branch's last block: those of earlier steps are copied, this step's are written
        # twice.
        begin = whole * block_size
        old = max(len(prefix) - begin, 0)
        if old:
            copies.append((first.table[full], later.table[whole], old))
        for position in range(begin + old, shared):
            duplicates.append((position - len(prefix), later.slot(position)))
    plan = make_plan([Work(branch, params=ALL), Work(later, params=ALL)], copies, duplicates)
    result = runner.run(plan)
    sliding.check(branch.token_ids, result.scores[0])
    sliding.check(later.token_ids, result.scores[1])

    # Both go on by themselves, and the first one is untouched.
    rows = [first, branch, later]
    for row, token in zip(rows, (5, *result.token_ids), strict=True):
        row.token_ids.append(int(token))
    result = runner.run(make_plan([Work(row, params=ALL) for row in rows]))
    for row, scores in zip(rows, result.scores, strict=True):
        sliding.check(row.token_ids, scores)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
def test_queries_beyond_one_chunk(
    name: str, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts are attended in chunks of queries, and scored in parts."""
    monkeypatch.setattr("rootlace.kernels.reference.attention.QUERY_CHUNK", 16)
    monkeypatch.setattr("rootlace.runtime.model.sampler.LOGITS_BYTES", VOCAB * 10)
    skip_without(kernels)
    model = Model(tmp_path, save(configs()[name], tmp_path), kernels)
    runner = model.runner()
    row = Row(Blocks(runner.num_blocks, 4), tokens(101))
    scores = []
    for count in (33, 1, 50, 17):
        result = runner.run(make_plan([Work(row, count, params=ALL, score_from=20)]))
        scores += result.prompt_scores
    model.check_prompt(row.token_ids, 20, scores)
    model.check(row.token_ids, result.scores[0])


def test_many_decode_rows_are_grouped_by_length(
    sliding: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of any size give the same answers, in the plan's order of rows."""
    runner = sliding.runner()
    blocks = Blocks(runner.num_blocks, 4)
    lengths = np.random.default_rng(5).permutation(np.arange(3, 43, 2))
    rows = [Row(blocks, tokens(int(count), seed=int(count))) for count in lengths]
    result = runner.run(make_plan([Work(row, params=ALL) for row in rows]))
    for row, token in zip(rows, result.token_ids, strict=True):
        row.token_ids.append(int(token))
    plan = make_plan([Work(row, params=ALL) for row in rows])
    for gather_bytes, small in ((1 << 20, 1024), (1 << 14, 0), (1, 0)):
        prefix = "rootlace.kernels.reference.attention"
        monkeypatch.setattr(f"{prefix}.GATHER_BYTES", gather_bytes)
        monkeypatch.setattr(f"{prefix}.SMALL_GROUP", small)
        result = runner.run(plan)
        for row, scores in zip(rows, result.scores, strict=True):
            sliding.check(row.token_ids, scores)


def test_a_plan_without_samples_only_writes(sliding: Model) -> None:
    runner = sliding.runner()
    row = Row(Blocks(runner.num_blocks, 4), tokens(12))
    result = runner.run(make_plan([Work(row, 7)]))
    assert (len(result.token_ids), result.scores, result.prompt_scores) == (0, [], [])
    result = runner.run(make_plan([Work(row, params=ALL)]))
    sliding.check(row.token_ids, result.scores[0])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3",
        "mistral-sliding",
        "gemma2",
        "gemma3",
        "olmo2",
        "glm",
        "cohere2",
        "gpt2",
        "falcon",
    ],
)
def test_bfloat16_is_as_close_to_float32_as_transformers(
    name: str, kernels: Kernels, tmp_path: Path
) -> None:
    skip_without(kernels)
    bfloat16 = save(configs()[name], tmp_path, dtype=torch.bfloat16)
    runner = Model(tmp_path, bfloat16, kernels).runner(16)
    assert runner.dtype == BFLOAT16
    row = Row(Blocks(runner.num_blocks, 16), tokens(60))
    result = runner.run(make_plan([Work(row, score_from=1)]))
    theirs = reference_logprobs(bfloat16, row.token_ids)
    exact = reference_logprobs(reference(tmp_path, torch.float32), row.token_ids)
    index = torch.tensor(row.token_ids[1:]).unsqueeze(1)
    exact = exact[:-1].gather(1, index).squeeze(1)
    theirs_error = (theirs[:-1].gather(1, index).squeeze(1) - exact).abs()
    ours_error = (torch.from_numpy(result.prompt_scores[0].logprobs).double() - exact).abs()
    # The native kernels round less often.
    mean, most = (1.0, 1.5) if kernels == "native" else (1.5, 3.0)
    assert ours_error.mean() < mean * theirs_error.mean()
    assert ours_error.max() < most * theirs_error.max()


class Enough(Exception):
    """Exception that ends a run after the observed call."""


def test_gemma_rounds_what_embeddings_are_multiplied_by_and_not_norms(tmp_path: Path) -> None:
    """The root of 96, where that of 64 would be the same in every type."""
    theirs = save(
        Gemma2Config(**{**SHAPE, "hidden_size": 96}, head_dim=16), tmp_path, dtype=torch.bfloat16
    )
    seen: list[torch.Tensor] = []

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        seen.append(x)
        raise Enough

    config = ModelConfig.read(tmp_path)
    weights = load_weights(config, torch.bfloat16, torch.device("cpu"))
    decoder = Decoder(config.spec, weights, replace(REFERENCE, rms_norm=rms_norm))
    ids = torch.arange(VOCAB)
    step: Any = SimpleNamespace(token_ids=ids)
    with torch.inference_mode():
        with pytest.raises(Enough):
            decoder.forward(step, torch.empty(0))
        assert torch.equal(seen[0], theirs.get_input_embeddings()(ids))
    assert torch.equal(weights.final_norm, 1.0 + theirs.model.norm.weight.float())


def test_float32_of_a_bfloat16_checkpoint(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path, dtype=torch.bfloat16)
    runner = ModelRunner.load(
        ExecutorConfig(model=str(tmp_path), dtype="float32"), CacheConfig(16, 8), 64, 4
    )
    assert runner.dtype == FLOAT32
    row = Row(Blocks(8, 16), tokens(20))
    result = runner.run(make_plan([Work(row, params=ALL)]))
    Model(tmp_path, reference(tmp_path, torch.float32)).check(row.token_ids, result.scores[0])
