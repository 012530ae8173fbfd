"""What few bits cost a real model: `python -m benchmarks.perplexity --gguf FILE [--text FILE ...]`.

Perplexity of a text, in windows whose first token is given, for each `--quantize`, each
`--kv-dtype`, and with `--both` for all pairs of them. Weights that the file has quantised are made
numbers before they are rounded. Each row is compared with the file as it is, in the same type and
on the same tokens: what counts is the difference. `BOUNDS` says what may be recommended.

A file of few bits has its weights on a grid, which a search may find: they are met exactly, so that
its rows say little of models that were not rounded before. So further rows, *off the grid*, round
the same model with its channels scaled (`off_grid`): it computes what the file does, and its
weights lie on no grid.

Without `--text` it is Python's own reference, as `help()` shows it. With `--keep FOLDER` a run that
was stopped goes on: with the same file, text and sizes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal, get_args

import numpy as np
import torch
from msgspec.structs import replace

from benchmarks.common import Report, console_of, new_parser, new_table
from rootlace.kernels.reference.layers import dense
from rootlace.kernels.weights import Dense, Weight
from rootlace.runtime.config import CacheConfig, ExecutorConfig, KVDtype
from rootlace.runtime.contracts.plan import PromptScoreRow, SampleRow
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights, rounded
from rootlace.runtime.model.checkpoint.weights import LayerWeights, ModelWeights
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.families.spec import ModelSpec
from rootlace.runtime.model.kv_pool import plan_of_rows
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
class Case:
    quantize: Quantize = "none"
    kv_dtype: KVDtype = "auto"
    off_grid: bool = False


@dataclass(frozen=True)
class Result:
    case: Case
    perplexity: float
    growth: float
    """Over that of the file as it is."""
    uncertainty: float
    """The standard error of the growth: tokens are a sample."""
    deviation: float
    """The mean |difference| of a token's log-probability."""
    bound: float | None


def as_numbers(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Any = None
) -> ModelWeights:
    """Return a file's weights as numbers, none of them quantised."""
    weights = load_weights(config, dtype, device, progress)

    def numbers(weight: Weight) -> Weight:
        return weight if isinstance(weight, Dense) else dense(weight, dtype)

    layers = tuple(layer.with_products(numbers) for layer in weights.layers)
    head = None if weights.head is None else numbers(weights.head)
    return replace(weights, layers=layers, head=head)


def may_be_off_grid(spec: ModelSpec) -> bool:
    """Return whether the layers have the parts that `off_grid` scales."""
    norm = spec.norm.kind, spec.norm.placement, spec.norm.offset
    return norm == ("rms", "before", 0.0) and spec.mlp.gated


def off_grid(weights: ModelWeights, spec: ModelSpec) -> ModelWeights:
    """Scale the model's channels by factors of e^-0.3 ... e^0.3, which the next product takes back:
    of norms before attention and MLP, of values, of the gate's factor."""
    random = torch.Generator().manual_seed(0)
    attention = spec.attention
    groups = attention.num_heads // attention.num_kv_heads

    def factors(count: int) -> torch.Tensor:
        return (torch.rand(count, generator=random).sub_(0.5) * 0.6).exp()

    def scaled(layer: LayerWeights) -> LayerWeights:
        qkv, output, gate_up, down = layer.qkv, layer.output, layer.gate_up, layer.down
        assert isinstance(qkv, Dense) and isinstance(output, Dense)
        if not isinstance(gate_up, Dense) or not isinstance(down, Dense):
            raise ValueError("only layers with one MLP are scaled")
        before, behind = factors(spec.hidden_size), factors(spec.hidden_size)
        values = factors(attention.num_kv_heads * attention.head_dim)
        inner = factors(down.shape[1])
        qkv_rows = torch.cat((torch.ones(qkv.shape[0] - len(values)), values))
        gate_up_rows = torch.cat((torch.ones(gate_up.shape[0] - len(inner)), inner))
        used = values.view(-1, 1, attention.head_dim).expand(-1, groups, -1).reshape(-1)

        def rows(weight: Dense, columns: torch.Tensor, rows: torch.Tensor) -> Dense:
            bias = None if weight.bias is None else weight.bias * rows
            return Dense(weight.matrix * columns * rows[:, None], bias)

        def norm(weight: torch.Tensor | None, factor: torch.Tensor) -> torch.Tensor:
            assert weight is not None
            return weight / factor

        return replace(
            layer,
            input_norm=norm(layer.input_norm, before),
            post_norm=norm(layer.post_norm, behind),
            qkv=rows(qkv, before, qkv_rows),
            output=Dense(output.matrix / used, output.bias),
            gate_up=rows(gate_up, behind, gate_up_rows),
            down=Dense(down.matrix / inner, down.bias),
        )

    return replace(weights, layers=tuple(map(scaled, weights.layers)))


def log_likelihoods(
    model: str, dtype: str, windows: Sequence[np.ndarray], case: Case, keep: Path | None = None
) -> np.ndarray:
    """Return natural logarithms for each token of each window but the first. `keep`: a folder with
    results of earlier windows."""
    name = f"{case.quantize}-{case.kv_dtype}{'-off-grid' if case.off_grid else ''}.npy"
    kept = None if keep is None else keep / name
    found = list(np.load(kept)[: len(windows)]) if kept is not None and kept.exists() else []
    if len(found) == len(windows):
        return np.concatenate(found).astype(np.float64)

    def weights_of(config: ModelConfig, *given: Any) -> ModelWeights:
        if case.quantize == "none":
            return load_weights(config, *given)

        def numbers(_: ModelConfig, *rest: Any) -> ModelWeights:
            weights = as_numbers(config, *rest)
            return off_grid(weights, config.spec) if case.off_grid else weights

        plain = replace(config, quantisation=None)
        return rounded(numbers, case.quantize)(plain, *given)

    longest = max(map(len, windows))
    blocks = -(-longest // BLOCK)
    executor = ExecutorConfig(model=model, dtype=dtype, kv_dtype=case.kv_dtype, device="cpu")  # type: ignore[arg-type]
    cache = CacheConfig(BLOCK, blocks)
    runner = ModelRunner.load(executor, cache, longest, 1, weights_of=weights_of)
    for ids in windows[len(found) :]:
        samples = [SampleRow(0, SCORED, ids, len(ids))]
        scores = [PromptScoreRow(0, 0, ids[1:], 0)]
        plan = plan_of_rows([ids], BLOCK, samples=samples, prompt_scores=scores)
        found.append(runner.run(plan).prompt_scores[0].logprobs)
        if kept is not None:
            np.save(kept, np.stack(found))
    return np.concatenate(found).astype(np.float64)


def measure(
    model: str,
    dtype: str,
    windows: Sequence[np.ndarray],
    cases: Sequence[Case],
    keep: Path | None = None,
) -> Iterator[Result]:
    """Return a result for each case; the first is the file as it is."""
    exact: np.ndarray | None = None
    for case in [Case(), *cases]:
        found = log_likelihoods(model, dtype, windows, case, keep)
        exact = found if exact is None else exact
        lost = exact - found
        growth = float(np.exp(lost.mean()) - 1)
        yield Result(
            case,
            float(np.exp(-found.mean())),
            growth,
            (1 + growth) * float(lost.std()) / math.sqrt(len(lost)),
            float(np.abs(lost).mean()),
            BOUNDS.get((case.quantize, case.kv_dtype)),
        )


def windows_of(model: str, text: str, tokens: int, window: int) -> list[np.ndarray]:
    """Return whole windows of a text's tokens; each begins with the model's first token, if it has
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
    parser.add_argument("--gguf", required=True, type=Path, metavar="FILE", help="or a folder")
    parser.add_argument("--text", type=Path, nargs="+", help="files in UTF-8")
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--both", action="store_true", help="few bits for weights and cache, too")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="go on with what it has")
    arguments = parser.parse_args()
    console = console_of(100)
    model = str(arguments.gguf)
    texts = [path.read_text("utf-8") for path in arguments.text or []] or topics.values()
    windows = windows_of(model, "\n".join(texts), arguments.tokens, arguments.window)
    rounding: list[Quantize] = ["int8", "int4"]
    caches = [kind for kind in get_args(KVDtype) if kind != "auto"]
    cases = [Case(quantize) for quantize in rounding]
    cases += [Case(kv_dtype=kind) for kind in caches]
    if may_be_off_grid(ModelConfig.read(model).spec):
        cases += [Case(quantize, off_grid=True) for quantize in rounding]
    if arguments.both:
        cases += [Case(quantize, kind) for quantize in rounding for kind in caches]
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    report = Report("perplexity", arguments)
    columns = ("--quantize", "--kv-dtype", "perplexity", "growth", "deviation", "bound")
    table = new_table("", *columns)
    results = []
    for one in measure(model, arguments.dtype, windows, cases, arguments.keep):
        results.append(one)
        print(one, file=sys.stderr, flush=True)
        table.add_row(
            one.case.quantize + (", off the grid" if one.case.off_grid else ""),
            *(one.case.kv_dtype, f"{one.perplexity:.3f}"),
            f"{one.growth:+.2%} ± {one.uncertainty:.2%}",
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
