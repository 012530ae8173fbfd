"""Does a model run on this GPU at all? In less than a minute, with tokens at the end of it.

    python -m tests.gpu.smoke --json FILE [--seconds 45] [--rehearse]

    way 0  as a server runs                   every check
    way 1  no CUDA graphs                     the checks that failed
    way 2  sampling by plain torch            those that failed still
    way 3  attention by plain torch
    way 4  everything by plain torch

Each way is a process: a fault of a kernel ends the GPU's context for the whole process. Checks
compare tokens with the CPU's in float32. `--rehearse` runs the same on a CPU, kernels interpreted.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as a server runs", {}),
    ("--no-cuda-graphs", {"cuda_graphs": False}),
    ("--reference-for sampling", {"reference_for": ("sampling", "logits", "constraints")}),
    ("--reference-for attention", {"reference_for": ("attention", "rope")}),
    ("--kernels reference", {"kernels": "reference"}),
)
LAST_WAY_SECONDS = 25.0
"""What the last way may take even where all time is spent: a smoke test ends with tokens."""
TIE = 1e-3
"""Log-probabilities that are this close may change places between two devices."""
BLOCK_SIZE = 16
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "job": {"enum": ["baker", "teacher", "driver"]},
    },
    "required": ["name", "age", "job"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Bench:
    """What the checks of one way have in common. `changed`: options of `ExecutorConfig`."""

    changed: dict[str, Any]
    rehearse: bool

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @contextmanager
    def embedded(self) -> Iterator[Path]:
        """The embedded model's folder; rehearsed, of its first layer alone."""
        from safetensors.torch import load_file, save_file

        from rootlace.runtime.assets import demo_model

        whole = demo_model()
        if not self.rehearse:
            yield whole
            return
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": 1}
            (folder / "config.json").write_text(json.dumps(config))
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(whole / file, folder / file)
            weights = load_file(whole / "model.safetensors")
            kept = {n: w for n, w in weights.items() if ".layers." not in n or ".layers.0." in n}
            save_file(kept, folder / "model.safetensors")
            yield folder

    @property
    def tokens(self) -> int:
        """Tokens that each request of a check generates."""
        return 3 if self.rehearse else 24

    @property
    def attends(self) -> bool:
        """Whether attention is our kernels', which graphs and shared nodes need."""
        plain = "kernels" in self.changed
        return not plain and "attention" not in self.changed.get("reference_for", ())

    def runner(self, folder: Path, *, graphs: bool = True, **options: Any) -> Any:
        """A runner in float32 on the GPU (rehearsed: the GPU's steps on a CPU, unless `options`
        bring weights)."""
        from rootlace.runtime.config import CacheConfig, ExecutorConfig
        from rootlace.runtime.model.executor.runner import ModelRunner

        if self.rehearse and not options:
            return self._rehearsed(folder, graphs)
        given = {"dtype": "float32", "cuda_graphs": graphs} | self.changed
        return ModelRunner.load(
            ExecutorConfig(model=str(folder), device=self.device, **given),
            CacheConfig(block_size=BLOCK_SIZE, num_blocks=512),
            max_step_tokens=256,
            max_running=16,
            **options,
        )

    def _rehearsed(self, folder: Path, graphs: bool) -> Any:
        from rootlace.kernels.dispatch import with_reference
        from rootlace.kernels.reference import REFERENCE
        from rootlace.kernels.triton import TRITON
        from tests.interpreter import replace_once_a_kernel
        from tests.model.device_runner import device_runner
        from tests.model.fake_device import FakeDevice
        from tests.model.fixed_kernels import fixed_kernels

        replace_once_a_kernel()
        # Attention of the reference takes no part in graphs; a stand-in with a fixed form does.
        plain = self.changed.get("kernels") == "reference"
        groups = () if plain else self.changed.get("reference_for", ())
        kernels = REFERENCE if plain else with_reference(TRITON, groups)
        if kernels.plan_attention is REFERENCE.plan_attention:
            fixed, _ = fixed_kernels(128)
            kernels = msgspec.structs.replace(
                kernels,
                plan_attention=fixed.plan_attention,
                paged_attention=fixed.paged_attention,
            )
        graphs = graphs and self.changed.get("cuda_graphs", True)
        options = {"blocks": 64, "block_size": BLOCK_SIZE, "max_rows": 8, "graphs": graphs}
        return device_runner(folder, FakeDevice(), kernels, **options)  # type: ignore[arg-type]

    def on_cpu(self, folder: Path, **options: Any) -> Any:
        """The same model by the reference on the CPU, in float32."""
        from rootlace.runtime.config import CacheConfig, ExecutorConfig
        from rootlace.runtime.model.executor.runner import ModelRunner

        return ModelRunner.load(
            ExecutorConfig(model=str(folder), device="cpu", dtype="float32", kernels="reference"),
            CacheConfig(block_size=BLOCK_SIZE, num_blocks=512),
            max_step_tokens=256,
            max_running=16,
            **options,
        )

    def generate(
        self, runner: Any, prompts: Sequence[Sequence[int]], tokens: int | None = None
    ) -> list[Any]:
        """What becomes of greedy requests that run side by side, with the two best of each place.

        A first round warms caches and graphs up; the second one is what counts.
        """
        from tests.engine.harness import Harness, greedy

        harness = Harness(
            runner,
            block_size=BLOCK_SIZE,
            max_step_tokens=256,
            max_running=8,
            overlap=runner.overlaps,
        )
        params = greedy(tokens or self.tokens, ignore_eos=True, logprobs=True, top_logprobs=2)
        for number in range(2):
            ids = [harness.add(list(one), params, program=str(number)) for one in prompts]
            harness.finish()
            while number == 0 and runner.prepare():
                pass
        return [harness.outcomes[rid] for rid in ids]


def same_tokens(found: Sequence[Any], wanted: Sequence[Any]) -> int:
    """The tokens compared: each request's, up to where two are all but equally likely.

    Raises AssertionError where others come, or where ties leave less than half to compare.
    """
    compared = total = 0
    for one, other in zip(found, wanted, strict=True):
        assert one.finish == other.finish == "length", (one.finish, one.error, other.error)
        sure = next((at for at, (_, (a, b)) in enumerate(other.top) if a - b < TIE), len(other.top))
        assert one.token_ids[:sure] == other.token_ids[:sure], (one.token_ids, other.token_ids)
        compared, total = compared + sure, total + len(other.top)
    assert compared * 2 >= total, f"ties leave {compared} of {total} tokens to compare"
    return compared


# ---------------------------------------------------------------- checks


def machine(bench: Bench) -> dict[str, Any]:
    """Versions, and the card's ceilings: bytes copied and bfloat16 products per second."""
    import torch
    import transformers
    import triton

    from benchmarks.gpu import ceilings
    from benchmarks.gpu.setting import Findings, Setting

    findings = Findings()
    setting = Setting(torch.device(bench.device), smoke=bench.rehearse, quick=True)
    ceilings.measure(setting, findings)
    name = "cpu" if bench.rehearse else torch.cuda.get_device_name(0)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    versions |= {"transformers": transformers.__version__, "python": sys.version.split()[0]}
    rates = {key: findings.result[key] for key in ("copy_bandwidth", "matmul_rate")}
    return {"gpu": name, **versions, **rates}


def _embedded(bench: Bench, graphs: bool) -> dict[str, Any]:
    from transformers import AutoTokenizer

    texts = ("Mara is a baker. She", "The weather in Turin is")
    with bench.embedded() as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = [tokenizer(text)["input_ids"] for text in texts[: 1 if bench.rehearse else 2]]
        runner = bench.runner(folder, graphs=graphs)
        found = bench.generate(runner, prompts)
        compared = same_tokens(found, bench.generate(bench.on_cpu(folder), prompts))
    stats = runner.stats()
    if graphs and bench.changed.get("cuda_graphs", True):
        assert not bench.attends or stats["graph_replays"] > 0, stats
        assert stats["graphs_failed"] == 0, stats
    text = tokenizer.decode(found[0].token_ids)
    return {"compared": compared, "text": text, "graph_replays": stats["graph_replays"]}


def eager(bench: Bench) -> dict[str, Any]:
    """The embedded model, launched kernel by kernel."""
    return _embedded(bench, graphs=False)


def graphs(bench: Bench) -> dict[str, Any]:
    """The embedded model, decode steps by graphs."""
    return _embedded(bench, graphs=True)


def schema(bench: Bench) -> dict[str, Any]:
    """The embedded model under a JSON schema, read by another parser."""
    import jsonschema
    from transformers import AutoTokenizer

    from rootlace.runtime.structured import GrammarCompiler
    from rootlace.wire.protocol import SamplingParams
    from tests.engine.harness import Harness

    with bench.embedded() as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        runner = bench.runner(folder)
    compiler = GrammarCompiler(tokenizer, vocab_size=runner.vocab_size)
    grammar = compiler.compile(json_schema=SCHEMA)
    harness = Harness(
        runner, block_size=BLOCK_SIZE, max_step_tokens=256, overlap=True, automata=True
    )
    stops = runner.eos_token_ids
    for seed in range(1 if bench.rehearse else 8):
        params = SamplingParams(max_tokens=60, temperature=1.0, seed=seed, stop_token_ids=stops)
        prompt = tokenizer(f"Mara {seed} is a teacher.")["input_ids"]
        harness.add(prompt, params, matcher=grammar.matcher(), jump=bench.rehearse)
    harness.finish()
    texts = []
    for outcome in harness.outcomes.values():
        assert outcome.finish in ("stop", "length"), (outcome.finish, outcome.error)
        if outcome.finish == "stop":
            texts.append(tokenizer.decode(outcome.token_ids, skip_special_tokens=True))
            jsonschema.validate(json.loads(texts[-1]), SCHEMA)
    assert texts, "no text came to its end within 60 tokens"
    return {"held": len(texts), "text": texts[0], "by_device": runner.stats()["automaton_rows"]}


def fork(bench: Bench) -> dict[str, Any]:
    """Eight branches on one prefix, whose nodes attention reads once for all of them."""
    from unittest.mock import patch

    from transformers import LlamaConfig

    from rootlace.kernels.triton import attention_plan
    from tests.gpu.test_model import WIDE
    from tests.model.checkpoints import SHAPE, save

    count, shared = (3, 48) if bench.rehearse else (8, 2048)
    shape = {**SHAPE, "num_hidden_layers": 1} if bench.rehearse else WIDE
    shared_ranges, counts = attention_plan.shared_ranges, [0]

    def counted(*given: Any) -> Any:
        found = shared_ranges(*given)
        counts.append(len(found))
        return found

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(LlamaConfig(**shape), folder)
        vocab = int(shape["vocab_size"])
        prefix = [3 + (7 * i + i // 11) % (vocab - 3) for i in range(shared)]
        prompts = [[*prefix, 3 + branch, 5 + 2 * branch] for branch in range(count)]
        with patch.object(attention_plan, "shared_ranges", counted):
            found = bench.generate(bench.runner(folder), prompts)
        wanted = bench.generate(bench.on_cpu(folder), prompts)
    assert all(one.cached_tokens >= shared // BLOCK_SIZE * BLOCK_SIZE for one in found)
    # Rehearsed, nothing is long enough to be worth it.
    assert not bench.attends or bench.rehearse or max(counts) > 0, "no node was read once for all"
    return {"branches": count, "prefix": shared, "compared": same_tokens(found, wanted)}


def llama_1b(bench: Bench) -> dict[str, Any]:
    """Llama 3.2 1B's shape with random weights, in float32, beside the CPU."""
    import torch

    from benchmarks.gpu.models import random_model

    name = "smoke" if bench.rehearse else "1B"
    with random_model(name, torch.device(bench.device), torch.float32) as model:
        there = _moved(model.weights, torch.device("cpu"))
        prompts, tokens = [[5 + (11 * i) % 250 for i in range(40)]], min(bench.tokens, 8)
        runner = bench.runner(model.config.path, weights_of=lambda *_: model.weights)
        found = bench.generate(runner, prompts, tokens)
        del runner
        cpu = bench.on_cpu(model.config.path, weights_of=lambda *_: there)
        compared = same_tokens(found, bench.generate(cpu, prompts, tokens))
    return {"shape": name, "compared": compared}


def _moved(value: Any, device: Any) -> Any:
    """`value` with all tensors in its structs and containers on `device`."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, msgspec.Struct):
        parts = {n: _moved(one, device) for n, one in msgspec.structs.asdict(value).items()}
        return msgspec.structs.replace(value, **parts)
    if isinstance(value, dict):
        return {key: _moved(one, device) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(one, device) for one in value)
    return value


CHECKS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    check.__name__: check for check in (machine, eager, graphs, schema, fork, llama_1b)
}


# ---------------------------------------------------------------- processes


def run_way(number: int, names: Sequence[str], into: Path, rehearse: bool) -> None:
    """Run checks in this process; each result is a line of `into` as soon as it is known."""
    import torch

    bench = Bench(WAYS[number][1], rehearse)
    for name in names:
        start = time.monotonic()
        line: dict[str, Any] = {"check": name, "way": WAYS[number][0], "passed": True}
        try:
            line |= CHECKS[name](bench)
        except Exception:
            line |= {"passed": False, "error": traceback.format_exc()}
        line["seconds"] = round(time.monotonic() - start, 2)
        with into.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if not rehearse:
            torch.cuda.empty_cache()


def smoke(
    seconds: float, into: Path, rehearse: bool, checks: Sequence[str]
) -> list[dict[str, Any]]:
    """Every check by the first way it passes in. Lines of all tries, in their order."""
    deadline = time.monotonic() + seconds
    into.unlink(missing_ok=True)
    left = list(checks)
    for number in range(len(WAYS)):
        limit = deadline - time.monotonic()
        if number == len(WAYS) - 1:
            limit = max(limit, LAST_WAY_SECONDS)
        elif limit < 5:
            continue
        command = _command(number, left, into, rehearse)
        ended = ""
        with _compiling(left[2:], rehearse) if number == 0 else nullcontext():
            try:
                done = subprocess.run(command, timeout=limit, env=_environment(rehearse))
                if done.returncode:
                    ended = f"its process ended with status {done.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"stopped after {limit:.0f} s"
        tried = [line for line in read(into) if line["way"] == WAYS[number][0]]
        passed = {line["check"] for line in tried if line["passed"]}
        if ended and len(tried) < len(left):
            lost = {"check": left[len(tried)], "way": WAYS[number][0], "passed": False}
            with into.open("a") as file:
                file.write(json.dumps(lost | {"error": ended}) + "\n")
        left = [name for name in left if name not in passed]
        if not left:
            break
    return read(into)


def _command(way: int, checks: Sequence[str], into: Path, rehearse: bool) -> list[str]:
    command = [sys.executable, "-m", __spec__.name, "--json", str(into)]
    return [*command, "--way", str(way), "--checks", *checks, *["--rehearse"] * rehearse]


@contextmanager
def _compiling(checks: Sequence[str], rehearse: bool) -> Iterator[None]:
    """Run checks beside those before them, each in a process of its own, for what they leave in
    Triton's cache: one process alone would spend most of its seconds compiling for them all."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for name in checks[-1:] if rehearse else checks:
            command = _command(0, [name], Path(folder) / f"{name}.jsonl", rehearse)
            process = subprocess.Popen(
                command,
                env=_environment(rehearse),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def _environment(rehearse: bool) -> dict[str, str]:
    interpreted = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Threads that wait for others would spin on the cores that compile.
    return {"OMP_WAIT_POLICY": "passive", **os.environ, **(interpreted if rehearse else {})}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines written so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(lines: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each try; at the end the first failure's traceback."""
    told = []
    for line in lines:
        verdict = "passed" if line["passed"] else "FAILED"
        rest = {k: v for k, v in line.items() if k not in ("check", "way", "passed", "error")}
        told.append(f"{line['check']:10} {verdict}  {line['way']:26} {rest}")
    first = next((line for line in lines if not line["passed"]), None)
    if first is not None:
        told += ["", f"first failure ({first['check']}, {first['way']}):", first["error"]]
    return told


def main(argv: list[str] | None = None) -> int:
    """0: every check passed as a server runs; 1: by a reserve; 2: some did not pass at all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="a line of JSON for each try")
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--checks", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    parser.add_argument("--way", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.way is not None:
        run_way(options.way, options.checks, options.json, options.rehearse)
        return 0
    lines = smoke(options.seconds, options.json, options.rehearse, options.checks)
    print("\n".join(summary(lines)), flush=True)
    passed = {line["check"] for line in lines if line["passed"]}
    if passed < set(options.checks):
        return 2
    return int(any(not line["passed"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
