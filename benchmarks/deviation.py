"""How far bfloat16 takes us from float32, beside how far it takes transformers.

    python -m benchmarks.deviation [--models DIR] [--json FILE]

The reference is transformers in float32 on the same (bfloat16) weights. Compared with it are
transformers itself in bfloat16, and ourselves in bfloat16 and float32, with the native kernels and
with the reference ones in torch. Every engine is told the same tokens: a prompt of a few hundred
(random tokens for the random models, conversations for the embedded one), computed in one step, and
then, one step each, the tokens that the reference chose. Logits are compared at each position, of
prompts and of decode steps, which read keys and values that were stored in bfloat16.

Printed: the mean and the largest absolute error of a logit, the mean Kullback-Leibler divergence of
the distributions (nats), how often the most likely token is the reference's, and the mean absolute
error of the last hidden states (after the final norm).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import ROOT, environment, write_json
from benchmarks.peers_parts.workloads import FIRST_PLAIN_TOKEN
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import PromptScoreRow, StepPlan
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.executor.cpu_setup import CpuModel, on_cpu
from rootlace.wire.errors import InvalidRequest

DEMO = ROOT / "runtime" / "assets" / "demo"
PEER = "transformers bf16"
OURS = ("native bf16", "reference bf16")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NOISE = 1.05
"""Two ways to round that are equally good differ by this factor, on a few thousand positions."""
PHASES = ("prefill", "decode")
BLOCK_SIZE = 16

Found = tuple[torch.Tensor, torch.Tensor]
"""Hidden states [T, H] and logits [T, V], float32."""


@dataclass
class Deviation:
    """Sums over positions, of one engine in one phase."""

    positions: int = 0
    logits: int = 0
    hidden: int = 0
    absolute: float = 0.0
    largest: float = 0.0
    hidden_absolute: float = 0.0
    divergence: float = 0.0
    agreed: int = 0

    def add(self, reference: Found, found: Found) -> None:
        error = (found[1] - reference[1]).abs()
        hidden_error = (found[0] - reference[0]).abs()
        expected = torch.log_softmax(reference[1].double(), -1)
        actual = torch.log_softmax(found[1].double(), -1)
        self.positions += len(error)
        self.logits += error.numel()
        self.hidden += hidden_error.numel()
        self.absolute += error.double().sum().item()
        self.largest = max(self.largest, error.max().item())
        self.hidden_absolute += hidden_error.double().sum().item()
        self.divergence += (expected.exp() * (expected - actual)).sum().item()
        self.agreed += int((found[1].argmax(-1) == reference[1].argmax(-1)).sum())

    def as_json(self) -> dict[str, float]:
        return {
            "positions": self.positions,
            "logit_mean_abs": self.absolute / self.logits,
            "logit_max_abs": self.largest,
            "hidden_mean_abs": self.hidden_absolute / self.hidden,
            "kl_mean": self.divergence / self.positions,
            "same_top_token": self.agreed / self.positions,
        }


# ---------------------------------------------------------------- engines

Engine = Callable[[list[int], int], Found]
"""(tokens, how many of them are the prompt): the first in one step, the others one by one."""


def transformers_engine(model: Any) -> Engine:
    def run(tokens: list[int], prompt: int) -> Found:
        cache = None
        hidden, logits = [], []
        for start, stop in _steps(len(tokens), prompt):
            out = model(
                torch.tensor([tokens[start:stop]]),
                past_key_values=cache,
                use_cache=True,
                output_hidden_states=True,
            )
            cache = out.past_key_values
            hidden.append(out.hidden_states[-1][0].float())
            logits.append(out.logits[0].float())
        return torch.cat(hidden), torch.cat(logits)

    return run


def our_engine(model: CpuModel) -> Engine:
    blocks = model.pool.shape[2]

    def run(tokens: list[int], prompt: int) -> Found:
        # Anywhere but in order: where keys lie must not matter.
        table = np.random.default_rng(0).permutation(blocks).astype(np.int32)
        hidden, logits = [], []
        for start, stop in _steps(len(tokens), prompt):
            found = model.forward.run(_plan(tokens, start, stop, table))
            hidden.append(found.float())
            logits.append(model.forward.logits(found).float().clone())
        return torch.cat(hidden), torch.cat(logits)

    return run


def _steps(count: int, prompt: int) -> Iterator[tuple[int, int]]:
    yield 0, prompt
    for start in range(prompt, count):
        yield start, start + 1


def _plan(tokens: Sequence[int], start: int, stop: int, table: np.ndarray) -> StepPlan:
    """One row's tokens `start` to `stop`, the logits of all of them wanted."""
    positions = np.arange(start, stop, dtype=np.int32)
    count = stop - start
    return StepPlan(
        step=start,
        token_ids=np.asarray(tokens[start:stop], np.int32),
        positions=positions,
        slots=table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        row_start=np.array([0, count], np.int32),
        context_len=np.array([stop], np.int32),
        block_tables=table[None, : -(-stop // BLOCK_SIZE)],
        copies=np.empty((0, 3), np.int32),
        duplicate_tokens=np.empty(0, np.int32),
        duplicate_slots=np.empty(0, np.int64),
        prompt_scores=[PromptScoreRow(0, 0, np.zeros(count, np.int32), 0)],
    )


def load_ours(folder: Path, kernels: str, dtype: torch.dtype, tokens: int) -> Engine:
    """Raises InvalidRequest where the kernels cannot be had."""
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=-(-tokens // BLOCK_SIZE) + 3)
    executor = ExecutorConfig(model=str(folder), kernels=kernels)  # type: ignore[arg-type]
    config = ModelConfig.read(folder)
    rotary = RotaryEmbedding(config, None, torch.device("cpu"), dtype)
    return our_engine(on_cpu(config, dtype, rotary, cache, executor, load_weights, None))


def load_transformers(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    ).eval()


# ---------------------------------------------------------------- prompts


def prompts_of(folder: Path, count: int, length: int, seed: int) -> list[list[int]]:
    """Conversations one after the other for the embedded model, random tokens for others."""
    rng = np.random.default_rng(seed)
    if folder != DEMO:
        vocab = ModelConfig.read(folder).vocab_size
        first = min(FIRST_PLAIN_TOKEN, vocab // 2)
        return [rng.integers(first, vocab, length).tolist() for _ in range(count)]
    from examples.demo_model.evaluate import SKILLS, make_cases

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts: list[list[int]] = []
    for number in range(count):
        ids: list[int] = []
        kind = tuple(SKILLS)[number % len(SKILLS)]
        for case in make_cases(kind, 64, seed + number, True):
            if len(ids) >= length:
                break
            text = case.prompt
            ids += (
                tokenizer.encode(text, add_special_tokens=False)
                if isinstance(text, str)
                else tokenizer.apply_chat_template(
                    text, add_generation_prompt=True, return_dict=False
                )
            )
        prompts.append(ids[:length])
    return prompts


def continued(model: Any, prompt: list[int], steps: int) -> list[int]:
    """The prompt and what the reference says after it, greedily."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    found: list[int] = out[0].tolist()
    return found


# ---------------------------------------------------------------- one model


@dataclass
class Compared:
    """engine -> phase -> deviation; `missing`: engine -> why it is not there."""

    engines: dict[str, dict[str, Deviation]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def compare(
    folder: Path, count: int, length: int, steps: int, seed: int, progress: Callable[[str], None]
) -> Compared:
    """All engines on one model, one after the other."""
    compared = Compared()
    threads = torch.get_num_threads()
    with torch.inference_mode():
        progress("transformers, float32")
        model = load_transformers(folder, torch.float32)
        sequences = [
            continued(model, prompt, steps) for prompt in prompts_of(folder, count, length, seed)
        ]
        reference = transformers_engine(model)
        expected = [reference(tokens, length) for tokens in sequences]
        del model, reference
        loaders: dict[str, Callable[[], Engine]] = {
            PEER: lambda: transformers_engine(load_transformers(folder, torch.bfloat16))
        }
        for kernels in ("native", "reference"):
            for label, dtype in DTYPES.items():
                loaders[f"{kernels} {label}"] = lambda kernels=kernels, dtype=dtype: load_ours(  # type: ignore[misc]
                    folder, kernels, dtype, length + steps
                )
        for name, load in loaders.items():
            progress(name)
            try:
                engine = load()
            except InvalidRequest as error:  # no compiler, say
                compared.missing[name] = str(error)
                continue
            torch.set_num_threads(threads)  # native kernels leave torch one
            phases = {phase: Deviation() for phase in PHASES}
            for tokens, right in zip(sequences, expected, strict=True):
                found = engine(tokens, length)
                for phase, part in zip(PHASES, (slice(length), slice(length, None)), strict=True):
                    phases[phase].add(
                        (right[0][part], right[1][part]), (found[0][part], found[1][part])
                    )
            compared.engines[name] = phases
    return compared


def no_larger(compared: Compared) -> dict[str, dict[str, bool]]:
    """engine -> phase -> whether its mean errors and divergence are at most transformers' own."""
    peer = {phase: found.as_json() for phase, found in compared.engines[PEER].items()}
    verdict: dict[str, dict[str, bool]] = {}
    for name in OURS:
        if name in compared.engines:
            verdict[name] = {}
            for phase, found in compared.engines[name].items():
                own = found.as_json()
                keys = ("logit_mean_abs", "kl_mean", "hidden_mean_abs")
                verdict[name][phase] = all(own[key] <= NOISE * peer[phase][key] for key in keys)
    return verdict


def table_of(name: str, compared: Compared) -> Table:
    table = Table(
        title=f"Model {name}: against transformers in float32",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
    )
    columns = ("", "phase", "logits", "largest", "KL", "top token", "hidden")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place > 1 else "left", no_wrap=True)
    for engine, phases in compared.engines.items():
        for phase, deviation in phases.items():
            found = deviation.as_json()
            table.add_row(
                engine if phase == PHASES[0] else "",
                phase,
                f"{found['logit_mean_abs']:.2e}",
                f"{found['logit_max_abs']:.2e}",
                f"{found['kl_mean']:.2e}",
                f"{found['same_top_token']:.2%}",
                f"{found['hidden_mean_abs']:.2e}",
                end_section=phase == PHASES[-1],
            )
    return table


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deviation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    parser.add_argument(
        "--models", type=Path, metavar="DIR", help="holds a, b or a-bf16, b-bf16; made if not there"
    )
    parser.add_argument(
        "--sizes", nargs="*", choices=["a", "b", "demo"], default=["a", "b", "demo"]
    )
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--length", type=int, default=320, help="of a prompt, in tokens")
    parser.add_argument("--steps", type=int, default=32, help="decode steps after each")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """1 if ours deviates more than transformers' bfloat16."""
    from benchmarks.peers_parts.options import checkpoint

    arguments = parse_arguments(argv)
    transformers.utils.logging.disable_progress_bar()
    console = Console()
    results: dict[str, Any] = {}
    larger = []
    for size in arguments.sizes:
        folder = DEMO if size == "demo" else checkpoint(size, arguments.models, "bfloat16")
        with console.status("") as status:
            compared = compare(
                folder,
                arguments.prompts,
                arguments.length,
                arguments.steps,
                arguments.seed,
                lambda what, status=status, size=size: status.update(f"{size}: {what}"),  # type: ignore[misc]
            )
        console.print(table_of(size, compared))
        verdict = no_larger(compared)
        results[size] = {
            "engines": {
                engine: {phase: deviation.as_json() for phase, deviation in phases.items()}
                for engine, phases in compared.engines.items()
            },
            "missing": compared.missing,
            "no_larger_than_transformers": verdict,
        }
        larger += [
            f"{size}: {engine}, {phase}"
            for engine, phases in verdict.items()
            for phase, fine in phases.items()
            if not fine
        ]
        for engine, why in compared.missing.items():
            console.print(f"{engine}: {why}", style="yellow", markup=False)
    console.print("larger than transformers' own: " + ("; ".join(larger) or "none"), markup=False)
    if arguments.json:
        options = {
            name: value for name, value in vars(arguments).items() if name not in ("json", "models")
        }
        write_json(
            arguments.json,
            {"benchmark": "deviation", **environment(), "options": options, "results": results},
        )
        console.print(f"written to {arguments.json}")
    return 1 if larger else 0


if __name__ == "__main__":
    sys.exit(main())
