"""The whole runtime on random weights: a client's measurements, beside transformers.

One engine serves all cases, as a start takes as long as most of them:

    idle          steps of the engine beside the same steps launched back to back
    constrained   masks from the device and from the host, beside free decoding, in turns
    workload      W1 to W5 of `benchmarks.peers`, as programs
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import rootlace as rl
from benchmarks.gpu.decode_step import PAUSE, WARM_UP, TimedSteps, fill
from benchmarks.gpu.models import random_model
from benchmarks.gpu.setting import Findings, Setting
from benchmarks.peers.programs import drive_programs
from benchmarks.peers.workloads import WORKLOADS, Workload
from benchmarks.random_models import CONFIGS, make_model
from benchmarks.step_plans import decode_plans

WARM_UPS = 2
"""In the first rounds graphs are captured and the automaton is walked until it is known whole."""
PAIRS = r'\{("[a-z ]{3,30}": [0-9]{2,6}, )*"#": true\}'
"""A JSON object of any length: states that allow most words, a digit or two, a quote. Only one word
in a hundred thousand leads to its end, so that no row ends early."""
PAIRS_GRAMMAR = r"""
start: "{" pair* "\"#\": true}"
pair: "\"" /[a-z ]{3,30}/ "\": " /[0-9]{2,6}/ ", "
"""
"""The same language as a grammar, which no automaton steps: the host fills its masks."""
LEAST_SHARE = 0.95
"""Of the tokens constrained by the regex, so many the device must have masked by itself."""
PEER_WORKLOADS = ("W1", "W4")
"""What transformers is asked for: flat batches, one with a common prefix and one without."""


@contextmanager
def started(name: str, device: torch.device, rows: int, **options: Any) -> Iterator[rl.Engine]:
    """Start an engine for the model `name` with `rows` requests at a time. Its checkpoint is
    deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="rootlace-model-") as folder:
        model = make_model(name, Path(folder) / name, str(device))
        torch.cuda.empty_cache()  # the next part runs in another process
        with rl.Engine(
            model_path=str(model),
            device=str(device),
            max_running=rows,
            max_step_tokens=8192,
            kv_memory_bytes=8 << 30 if device.type == "cuda" else 64 << 20,
            **options,
        ) as engine:
            yield engine


def decode_rate(
    engine: rl.Engine, prompts: Sequence[Sequence[int]], new: int, params: Mapping[str, Any]
) -> float:
    """Return tokens per second, of `new` per prompt, from all first tokens until all ends, on the
    gateway's clock, so that the client's work does not count."""
    given = [
        {**params, "max_new_tokens": new, "ignore_eos": True, "seed": seed}
        for seed in range(len(prompts))
    ]
    replies = engine.generate(input_ids=[list(prompt) for prompt in prompts], sampling_params=given)
    told = [reply["meta_info"] for reply in replies]
    first = max(one["time_to_first_token"] for one in told)
    tokens = sum(one["completion_tokens"] - 1 for one in told)
    return tokens / (max(one["e2e_latency"] for one in told) - first)


def measure(setting: Setting, findings: Findings) -> None:
    """Measure every case on one engine, then `idle` on one without overlap, if time is left."""
    name, rows, prompt, new = ("smoke", 3, 16, 10) if setting.smoke else ("1B", 64, 128, 256)
    bare = _bare_step(setting, name, rows, prompt, new)
    with started(name, setting.device, rows) as engine:
        _idle(findings, engine, name, bare, rows, prompt, new, overlap=True)
        _constrained(setting, findings, engine, name, rows, new)
        scale = setting.choose(1.0, 0.25, 0.02)
        for workload in WORKLOADS:
            with findings.attempt(what="workload", workload=workload, scale=scale) as case:
                work = Workload(workload, 0, scale, int(CONFIGS[name]["vocab_size"]))
                driven = drive_programs(engine.endpoint, work)
                tokens = sum(len(output) for output in driven.outputs.values())
                case |= {"seconds": driven.wall, "output_tokens": tokens}
                case |= {"tokens_per_second": tokens / driven.wall}
                case |= {"prompt_tokens": driven.prompt_tokens, "cached_tokens": driven.cached}
    if not (setting.quick or setting.smoke):
        with started(name, setting.device, rows, overlap=False) as engine:
            _idle(findings, engine, name, bare, rows, prompt, new, overlap=False)


def _bare_step(setting: Setting, name: str, rows: int, prompt: int, new: int) -> float:
    """Return the seconds of a decode step planned before, launched so that the device always has
    one waiting. The engine's excess over this is idle time of the device."""
    warm_up = setting.choose(WARM_UP, WARM_UP, 2)
    with random_model(name, setting.device) as model:
        runner = model.runner(rows, prompt + new)
        fill(runner)
        before = prompt - warm_up
        plans = decode_plans(rows, before, warm_up + new, runner.block_size, runner.vocab_size)
        steps = TimedSteps(setting, runner, plans)
        steps.warm_up(warm_up, PAUSE if setting.on_gpu else 0.0)
        found = steps.seconds_each(new - 1)
        steps.end()
    del runner, steps, model
    setting.release()
    return found


def _idle(
    findings: Findings,
    engine: rl.Engine,
    name: str,
    bare: float,
    rows: int,
    prompt: int,
    new: int,
    *,
    overlap: bool,
) -> None:
    with findings.attempt(what="idle", shape=name, overlap=overlap, rows=rows) as case:
        prompts = [[5 + (row + i) % 250 for i in range(prompt)] for row in range(rows)]
        params = {"temperature": 0.0}
        decode_rate(engine, prompts, new, params)  # captures the graphs
        rate = decode_rate(engine, prompts, new, params)
        case |= {"decode_tokens_per_second": rate, "step_us": rows / rate * 1e6}
        case |= {"bare_step_us": bare * 1e6, "idle_share": max(0.0, 1 - bare * rate / rows)}


def _constrained(
    setting: Setting, findings: Findings, engine: rl.Engine, name: str, rows: int, new: int
) -> None:
    """Return decode tokens per second at a full batch, at temperature 1. No tokens are forced
    without sampling, so all runs take equally many steps. `automaton_share`: tokens under the regex
    that the device masked by itself, by its counter; None if there is no counter."""
    kinds: dict[str, dict[str, Any]] = {
        "free": {},
        "device": {"regex": PAIRS, "jump_forward": "off"},
        "host": {"ebnf": PAIRS_GRAMMAR, "jump_forward": "off"},
    }
    prompts = [[5 + (7 * row + i) % 250 for i in range(16)] for row in range(rows)]
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    rounds = setting.choose(3, 2, 1)
    masked = 0
    for number in range(WARM_UPS + rounds):
        for kind, params in kinds.items():
            before = _automaton_rows(engine)
            rate = decode_rate(engine, prompts, new, {"temperature": 1.0, **params})
            if number >= WARM_UPS:
                rates[kind].append(rate)
                if kind == "device":
                    masked += (_automaton_rows(engine) or 0) - (before or 0)
    share = None if _automaton_rows(engine) is None else masked / (rounds * rows * new)
    free = statistics.median(rates["free"])
    for kind in ("device", "host"):
        case = {"what": "constrained", "masks": kind, "shape": name, "rows": rows, "new": new}
        case |= {"decode_tokens_per_second": rates[kind], "free": rates["free"]}
        case["over_unconstrained"] = statistics.median(rates[kind]) / free
        if kind == "device":
            case["automaton_share"] = share
            if setting.on_gpu and (share or 0.0) < LEAST_SHARE:
                case["error"] = f"the device masked {share} of the tokens, not {LEAST_SHARE}"
        findings.add(case)


def _automaton_rows(engine: rl.Engine) -> int | None:
    """Return the counter `automaton_rows`; None if the engine has none."""
    found: int | None = engine.get_server_info().get("automaton_rows")
    return found


def measure_transformers(setting: Setting, findings: Findings) -> None:
    """Measure the same model and requests with transformers' continuous batching."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    name = "smoke" if setting.smoke else "1B"
    scale = setting.choose(1.0, 0.25, 0.02)
    # On a CPU its default cache would take most of the machine's memory.
    small = {} if setting.on_gpu else {"num_blocks": 64, "max_batch_tokens": 256}
    with tempfile.TemporaryDirectory(prefix="rootlace-model-") as folder:
        path = make_model(name, Path(folder) / name, str(setting.device))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        model = model.to(setting.device).eval()
        for workload in PEER_WORKLOADS:
            work = Workload(workload, 0, scale, int(CONFIGS[name]["vocab_size"]))
            prompts = [request.prompt for request in work.start()]
            options = GenerationConfig(
                max_new_tokens=work.wanted, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
            with findings.attempt(workload=workload, scale=scale, requests=len(prompts)) as case:
                for _ in range(1 if setting.smoke else 2):  # the first run is set-up
                    start = time.perf_counter()
                    replies = model.generate_batch(
                        prompts,
                        generation_config=options,
                        continuous_batching_config=ContinuousBatchingConfig(**small),
                        warmup=setting.on_gpu,
                    )
                    seconds = time.perf_counter() - start
                tokens = sum(len(reply.generated_tokens) for reply in replies.values())
                case |= {"seconds": seconds, "output_tokens": tokens}
                case["tokens_per_second"] = tokens / seconds
