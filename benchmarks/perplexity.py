"""What few bits cost a real model: `python -m benchmarks.perplexity --gguf FILE --text FILE`.

Perplexity of a text, in windows whose first token is given, for each `--quantize`, each
`--kv-dtype`, and then both together. Weights that the file has quantised are made numbers before
they are rounded. Each row is compared with the file as it is, in the same type and on the same
tokens: what counts is the difference. `BOUNDS` says what may be recommended.

A file of Q4_1 has its weights on the grid that int4 finds: they are met exactly, so that its row of
int4 says little of models that were not rounded before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from benchmarks.common import Report, console_of, new_parser, new_table
from rootlace.kernels import Dense, Weight
from rootlace.kernels.reference.layers import dense
from rootlace.runtime.config import CacheConfig, ExecutorConfig, KVDtype
from rootlace.runtime.contracts.plan import PromptScoreRow, SampleRow
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights, rounded
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv.pool import plan_of_rows
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.protocol import SamplingParams

Quantize = Literal["none", "int8", "int4"]
BLOCK = 16
SCORED = SamplingParams(temperature=0.0, max_tokens=1, logprobs=True, seed=0)
BOUNDS: dict[tuple[str, str], float] = {
    ("int8", "auto"): 0.001,
    ("int4", "auto"): 0.12,
    ("none", "int8"): 0.003,
    ("none", "int4"): 0.08,
}
"""Shares by which perplexity may grow."""


@dataclass(frozen=True)
class Result:
    quantize: str
    kv_dtype: str
    perplexity: float
    growth: float
    """Over that of the file as it is."""
    deviation: float
    """The mean |difference| of a token's log-probability."""
    bound: float | None
    seconds: float


def as_numbers(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Any = None
) -> ModelWeights:
    """A file's weights, none of them quantised."""
    weights = load_weights(config, dtype, device, progress)

    def numbers(weight: Weight) -> Weight:
        return weight if isinstance(weight, Dense) else dense(weight, dtype)

    layers = tuple(layer.with_products(numbers) for layer in weights.layers)
    head = None if weights.head is None else numbers(weights.head)
    return replace(weights, layers=layers, head=head)


def log_likelihoods(
    model: str, dtype: str, windows: Sequence[np.ndarray], quantize: Quantize, kv_dtype: KVDtype
) -> np.ndarray:
    """Natural logarithms, of each token of each window but the first."""

    def weights_of(config: ModelConfig, *given: Any) -> ModelWeights:
        if quantize == "none":
            return load_weights(config, *given)
        plain = replace(config, quantisation=None)
        return rounded(lambda _, *rest: as_numbers(config, *rest), quantize)(plain, *given)

    longest = max(map(len, windows))
    blocks = -(-longest // BLOCK)
    executor = ExecutorConfig(model=model, dtype=dtype, kv_dtype=kv_dtype, device="cpu")  # type: ignore[arg-type]
    cache = CacheConfig(BLOCK, blocks)
    runner = ModelRunner.load(executor, cache, longest, 1, weights_of=weights_of)
    found = []
    for ids in windows:
        samples = [SampleRow(0, SCORED, ids, len(ids))]
        scores = [PromptScoreRow(0, 0, ids[1:], 0)]
        plan = plan_of_rows([ids], BLOCK, samples=samples, prompt_scores=scores)
        found.append(runner.run(plan).prompt_scores[0].logprobs)
    return np.concatenate(found).astype(np.float64)


def measure(
    model: str, dtype: str, windows: Sequence[np.ndarray], pairs: Sequence[tuple[Quantize, KVDtype]]
) -> Iterator[Result]:
    """A result for each pair; the first one is of the file as it is."""
    exact: np.ndarray | None = None
    for quantize, kv_dtype in [("none", "auto"), *pairs]:
        begin = time.perf_counter()
        found = log_likelihoods(model, dtype, windows, quantize, kv_dtype)
        exact = found if exact is None else exact
        yield Result(
            quantize,
            kv_dtype,
            float(np.exp(-found.mean())),
            float(np.exp(exact.mean() - found.mean()) - 1),
            float(np.abs(found - exact).mean()),
            BOUNDS.get((quantize, kv_dtype)),
            time.perf_counter() - begin,
        )


def windows_of(model: str, text: str, tokens: int, window: int) -> list[np.ndarray]:
    """As many whole windows of a text's tokens; each begins with the model's first token, if it has
    one. Raises ValueError for a text that is too short for one."""
    config = ModelConfig.read(model)
    ids = Tokenizer.read(config.source).encode(text)
    first = [] if config.bos_token_id is None else [config.bos_token_id]
    each = window - len(first)
    count = min(len(ids), tokens) // each
    if not count:
        raise ValueError(f"the text has {len(ids)} tokens, a window {window}")
    return [np.array(first + ids[i * each : (i + 1) * each], np.int32) for i in range(count)]


def main() -> int:
    parser = new_parser("perplexity", __doc__)
    parser.add_argument("--gguf", required=True, metavar="FILE", help="a model: a file or a folder")
    parser.add_argument("--text", required=True, type=Path, nargs="+", help="files in UTF-8")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--quantize", nargs="+", choices=get_args(Quantize))
    parser.add_argument("--kv-dtype", nargs="+", choices=get_args(KVDtype))
    arguments = parser.parse_args()
    console = console_of(100)
    text = "\n".join(path.read_text("utf-8") for path in arguments.text)
    windows = windows_of(arguments.gguf, text, arguments.tokens, arguments.window)
    pairs = [
        (quantize, kv_dtype)
        for quantize in arguments.quantize or get_args(Quantize)
        for kv_dtype in arguments.kv_dtype or get_args(KVDtype)
        if (quantize, kv_dtype) != ("none", "auto")
    ]
    pairs.sort(key=lambda pair: "none" not in pair and "auto" not in pair)
    report = Report("perplexity", arguments)
    table = new_table("--quantize", "--kv-dtype", "perplexity", "growth", "deviation", "bound")
    results = []
    for one in measure(arguments.gguf, arguments.dtype, windows, pairs):
        results.append(one)
        print(one, file=sys.stderr, flush=True)
        table.add_row(
            *(one.quantize, one.kv_dtype, f"{one.perplexity:.3f}", f"{one.growth:+.2%}"),
            *(f"{one.deviation:.4f}", "" if one.bound is None else f"{one.bound:+.1%}"),
        )
    console.print(table)
    console.print(f"{sum(map(len, windows)):,} tokens in windows of {arguments.window}")
    report.add("results", results)
    console.print(report.foreign_line())
    report.write()
    return int(any(one.bound is not None and one.growth > one.bound for one in results))


if __name__ == "__main__":
    sys.exit(main())
