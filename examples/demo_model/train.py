"""Train the embedded demo model: tokenizer, model and loop, on one CPU core.

The corpus is generated while training (``corpus.py``); nothing is downloaded.  See README.md for
the recipe.  Examples, from nothing and further from a trained model::

    python -m examples.demo_model.train --out OUT --minutes 94 --threads 1
    python -m examples.demo_model.train --out OUT --start-from runtime/assets/demo --course further
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

if not __package__:  # run as a script: make the repository root importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.demo_model import corpus
from examples.demo_model.evaluate import Generator, make_cases
from examples.demo_model.pools import Source

SPECIAL_TOKENS = [corpus.END_OF_TEXT, corpus.IM_START, corpus.IM_END]
TOOL_TOKENS = ["<tool_call>", "</tool_call>"]
CONTEXT = 2048

# Like GPT-2's pattern, with two differences that make copying easy for a small model: digits
# stand alone, and a capitalised word never swallows the space before it, so that a name is the
# same tokens inside a sentence and inside a JSON string.
SPLIT_PATTERN = (
    r"'(?:s|t|re|ve|m|ll|d)| ?\p{Ll}+|\p{Lu}+\p{Ll}*|\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+|\n+| +|\s"
)

CHAT_TEMPLATE = """\
{%- if tools %}
{%- if messages[0].role == 'system' %}
{%- set ns = namespace(intro=messages[0].content, rest=messages[1:]) %}
{%- else %}
{%- set ns = namespace(intro='You are a helpful assistant.', rest=messages) %}
{%- endif %}
{{- '<|im_start|>system\\n' + ns.intro + '\\n\\nTools:' }}
{%- for tool in tools %}
{%- set function = tool.function if tool.function is defined else tool %}
{{- '\\n- ' + function.name + '(' }}
{{- (function.parameters.properties | default({})) | join(', ') }}
{{- '): ' + (function.description | default('')) }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{%- set ns = namespace(rest=messages) %}
{%- endif %}
{%- for message in ns.rest %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{%- set function = call.function if call.function is defined else call %}
{{- '<tool_call>{"name":"' + function.name + '","arguments":' }}
{%- if function.arguments is string %}
{{- function.arguments }}
{%- else %}
{{- function.arguments | tojson(separators=(',', ':')) }}
{%- endif %}
{{- '}</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer(seed: int, vocabulary: int, documents: int = 12000) -> Tokenizer:
    """Byte-level BPE learnt from a sample of the corpus."""
    source = Source(seed)
    texts = (
        "".join(text for text, _weight in corpus.document(source, corpus.MIXED))
        .replace(corpus.IM_START, "\n")
        .replace(corpus.IM_END, "\n")
        .replace(corpus.END_OF_TEXT, "\n")
        .replace("<tool_call>", "\n")
        .replace("</tool_call>", "\n")
        for _ in range(documents)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TOOL_TOKENS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS]
    )
    return tokenizer


def build_model(args: argparse.Namespace, vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        intermediate_size=args.hidden,
        num_attention_heads=args.width // 32,
        num_key_value_heads=args.kv_heads,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(corpus.IM_END),
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = LlamaForCausalLM(config)
    # On a CPU the plain attention trains 1.4 times as fast as torch's fused one.
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.div_(math.sqrt(2 * args.layers))
    return model


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model in the Hugging Face layout, in bf16."""
    scratch = folder.with_name(folder.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    exported = LlamaForCausalLM(model.config)
    exported.load_state_dict(model.state_dict())
    exported.to(torch.bfloat16)
    end = [SPECIAL_TOKENS.index(corpus.IM_END), SPECIAL_TOKENS.index(corpus.END_OF_TEXT)]
    exported.generation_config.eos_token_id = end
    exported.generation_config.pad_token_id = 0
    exported.generation_config.bos_token_id = None
    exported.save_pretrained(scratch)
    tokenizer.save(str(scratch / "tokenizer.json"))
    (scratch / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": CONTEXT,
                "eos_token": corpus.IM_END,
                "pad_token": corpus.END_OF_TEXT,
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=2,
        )
        + "\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    for path in scratch.iterdir():
        path.chmod(0o644)
        path.replace(folder / path.name)
    scratch.rmdir()


@dataclass
class Batch:
    """Rows of one length: input tokens, and the positions whose next token is learnt."""

    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    count: int


def encode(tokenizer: Tokenizer, document: corpus.Document) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    weights: list[float] = []
    for encoding, (_text, weight) in zip(
        tokenizer.encode_batch([text for text, _weight in document]), document, strict=True
    ):
        ids += encoding.ids
        weights += [weight] * len(encoding.ids)
    return ids, weights


def make_batch(rows: list[tuple[list[int], list[float]]]) -> Batch:
    """Right padding needs no mask: attention is causal and padding is never a target."""
    length = max(len(ids) for ids, _weights in rows) - 1
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    positions, targets, weights = [], [], []
    for index, (ids, row_weights) in enumerate(rows):
        tokens[index, : len(ids) - 1] = torch.tensor(ids[:-1])
        for place in range(1, len(ids)):
            if row_weights[place]:
                positions.append(index * length + place - 1)
                targets.append(ids[place])
                weights.append(row_weights[place])
    return Batch(
        tokens,
        torch.tensor(positions),
        torch.tensor(targets),
        torch.tensor(weights),
        sum(len(ids) for ids, _weights in rows),
    )


def pool_batches(
    tokenizer: Tokenizer, source: Source, stage: corpus.Stage, batch_tokens: int, pool_tokens: int
) -> list[Batch]:
    """Generate a pool of documents and group those of like length, which spares padding."""
    rows = []
    total = 0
    while total < pool_tokens:
        ids, weights = encode(tokenizer, corpus.document(source, stage))
        if any(weights) and len(ids) <= 1200:
            rows.append((ids, weights))
            total += len(ids)
    rows.sort(key=lambda row: len(row[0]))
    batches: list[Batch] = []
    group: list[tuple[list[int], list[float]]] = []
    for row in rows:
        if group and (len(group) + 1) * len(row[0]) > batch_tokens:
            batches.append(make_batch(group))
            group = []
        group.append(row)
    batches.append(make_batch(group))
    source.rng.shuffle(batches)
    return batches


COURSES: dict[str, tuple[tuple[float, corpus.Stage], ...]] = {
    "whole": (
        (0.12, corpus.EARLY),
        (0.34, corpus.MIDDLE),
        (0.51, corpus.LATE),
        (0.68, corpus.WIDE),
        (0.85, corpus.DEEP),
        (1.0, corpus.LAST),
    ),
    "further": ((0.25, corpus.JUDGING), (1.0, corpus.FURTHER)),
    "dense": ((0.7, corpus.DENSE), (1.0, corpus.FURTHER)),
}
"""Stages, each until a share of the run: from nothing short and simple passages come first; the
others train further."""


def stage_at(progress: float, course: str) -> corpus.Stage:
    return next(stage for end, stage in COURSES[course] if progress < end or end == 1)


def learning_rate_factor(progress: float, step: int, hold: float = 0.35) -> float:
    """Warm up, hold for a share of the run, and go down linearly."""
    if step < 100:
        return (step + 1) / 100
    return min(1.0, max(0.01, (1.0 - progress) / (1.0 - hold)))


def build_optimizers(
    model: LlamaForCausalLM, args: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "layers." in name else rest).append(parameter)
    return [
        torch.optim.Muon(
            matrices,
            lr=args.muon_lr,
            weight_decay=0.02,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.97), weight_decay=0.0),
    ]


def train_step(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Return the weighted loss of a batch; logits are computed only where a target is."""
    with torch.autocast("cpu", torch.bfloat16):
        states = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        states = states.flatten(0, 1).index_select(0, batch.positions)
        logits = model.lm_head(states)
    losses = functional.cross_entropy(logits.float(), batch.targets, reduction="none")
    return (losses * batch.weights).sum() / batch.weights.sum()


class Progress:
    """How far the run is, by tokens or by time, whichever is further."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tokens_wanted, self.seconds_wanted = args.tokens, args.minutes * 60
        self.tokens, self.seconds_before, self.started = 0, 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    @property
    def fraction(self) -> float:
        return max(self.tokens / self.tokens_wanted, self.seconds / self.seconds_wanted)


def batches_of_run(
    tokenizer: Tokenizer, args: argparse.Namespace, progress: Progress, state: dict[str, int]
) -> Iterator[Batch]:
    """Batches until the run is over; every pool has its own seed, so a run can resume."""
    while True:
        source = Source(args.seed * 1_000_003 + state["pool"] + 1)
        for batch in pool_batches(
            tokenizer,
            source,
            stage_at(progress.fraction, args.course),
            args.batch_tokens,
            args.pool_tokens,
        ):
            if progress.fraction >= 1:
                return
            yield batch
        state["pool"] += 1


def print_accuracy(folder: Path, progress: Progress, n: int = 60) -> None:
    """Accuracy of the checkpoint on a few held-out cases, to see whether the run goes well."""
    generator = Generator(folder, batch_size=30)
    figures = []
    for skill in ("extraction", "passage question", "judge", "few-shot chat"):
        cases = make_cases(skill, n, seed=4242, known_phrasings=False)
        answers = generator.answers(cases)
        right = sum(answer == case.answer for answer, case in zip(answers, cases, strict=True))
        figures.append(f"{skill} {right / n:.0%}")
    print(f"\n{progress.fraction:.0%} of the run: {', '.join(figures)} (n={n})", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--tokens", type=float, default=40e6, help="training tokens at most")
    parser.add_argument("--minutes", type=float, default=94, help="training time at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--pool-tokens", type=int, default=150_000)
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--checkpoint-minutes", type=float, default=10)
    parser.add_argument("--hold", type=float, default=0.35, help="share of the run at full rate")
    parser.add_argument(
        "--start-from", type=Path, help="train this model further, with its tokenizer"
    )
    parser.add_argument("--course", choices=list(COURSES), default="whole", help="what is trained")
    parser.add_argument(
        "--evaluate-minutes", type=float, default=0, help="0: no evaluation while training"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from OUT.state.pt, other options as before"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    state_path = args.out.with_name(args.out.name + ".state.pt")
    if args.resume:
        tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    elif args.start_from:
        tokenizer = Tokenizer.from_file(str(args.start_from / "tokenizer.json"))
    else:
        tokenizer = build_tokenizer(args.seed, args.vocabulary)
    model = build_model(args, args.vocabulary)
    if args.start_from and not args.resume:
        start = LlamaForCausalLM.from_pretrained(args.start_from, dtype=torch.float32)
        model.load_state_dict(start.state_dict())
    optimizers = build_optimizers(model, args)
    progress = Progress(args)
    state = {"pool": 0, "step": 0}
    if args.resume:
        saved = torch.load(state_path, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        state, progress.tokens = saved["state"], saved["tokens"]
        progress.seconds_before = saved["seconds"]

    def checkpoint() -> None:
        export(model, tokenizer, args.out)
        torch.save(
            {
                "model": model.state_dict(),
                "state": state,
                "tokens": progress.tokens,
                "seconds": progress.seconds,
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            },
            state_path,
        )

    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters} parameters, vocabulary {tokenizer.get_vocab_size()}", flush=True)
    base_rates = [args.muon_lr, args.lr]
    saved_at = evaluated_at = progress.seconds
    smooth = math.nan
    bar = tqdm(
        total=int(args.tokens), initial=progress.tokens, unit="tok", unit_scale=True, mininterval=10
    )
    for batch in batches_of_run(tokenizer, args, progress, state):
        factor = learning_rate_factor(progress.fraction, state["step"], args.hold)
        for optimizer, rate in zip(optimizers, base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        state["step"] += 1
        progress.tokens += batch.count
        smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
        bar.update(batch.count)
        bar.set_postfix(loss=f"{smooth:.4f}", step=state["step"], refresh=False)
        if progress.seconds - saved_at > args.checkpoint_minutes * 60:
            checkpoint()
            saved_at = progress.seconds
        if args.evaluate_minutes and progress.seconds - evaluated_at > args.evaluate_minutes * 60:
            checkpoint()
            evaluated_at = saved_at = progress.seconds
            print_accuracy(args.out, progress)
    bar.close()
    checkpoint()
    print(
        f"done: {progress.tokens} tokens, {state['step']} steps, {progress.seconds:.0f} s, "
        f"loss {smooth:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
