"""The GPU benchmark: what it computes from what it measures, and what becomes of parts that fail.

That every line runs, the rehearsal says (tests/scripts/test_gpu_check.py).
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import attention, decode_step, parts, serving, targets, tune
from benchmarks.gpu.models import RandomModel, random_model
from benchmarks.gpu.serving import decode_rate, started
from benchmarks.gpu.setting import Findings, Setting
from benchmarks.random_models import CONFIGS
from benchmarks.random_weights import named_weights
from benchmarks.step_plans import decode_plans
from rootlace.kernels.interface import KernelSet, slot_bytes
from rootlace.kernels.reference.layers import ROWS
from rootlace.kernels.triton import TRITON, launching
from rootlace.kernels.weights import Quantised
from rootlace.runtime.model.checkpoint.loader import rounded as load_rounded
from tests.interpreter import replace_once_a_kernel
from tests.model.weight_sizes import num_bytes

CPU = torch.device("cpu")


def errors(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["error"]] if "error" in value else []
        return own + [e for inner in value.values() for e in errors(inner)]
    return [e for inner in value for e in errors(inner)] if isinstance(value, list) else []


# ---------------------------------------------------------------- targets


def measured() -> dict[str, Any]:
    """What a GPU might find."""

    def ours(share: float | None) -> dict[str, Any]:
        kernels = {"rootlace": {"us": 1.0, "share": share}, "sdpa": {"us": 1.0, "share": 0.99}}
        return {"kernels": kernels, "share": share}

    decode, step = {"shape": "8B", "cache": "bfloat16"}, {"shape": "8B"}
    masks = {"what": "constrained", "shape": "1B"}
    return {
        "decode_attention": {
            "cases": [
                {**decode, "rows": 64, "context": 8192, **ours(0.9)},
                {**decode, "rows": 64, "context": 4096, **ours(0.86)},
                {**decode, "rows": 1, "context": 8192, **ours(0.2)},
                {**decode, "rows": 256, "context": 1024, **ours(0.3)},
                {**decode, "rows": 64, "context": 8192, "cache": "float8_e4m3fn"} | {**ours(0.4)},
                {"rows": 16, "context": 32768, "error": "out of memory"},
            ]
        },
        "extend_attention": {
            "cases": [
                {"shape": "8B", "new": 4096, "context": 4096, **ours(0.5)},
                {"shape": "8B", "new": 512, "context": 512, **ours(0.1)},
            ]
        },
        "tree_attention": {
            "cases": [
                {"prefix": 4096, "rows": 64, "speed_up": 12.0},
                {"prefix": 1024, "rows": 8, "speed_up": 1.0},
            ]
        },
        "decode_step": {
            "cases": [
                {**step, "rows": 1, "graphs": False, "bits": "none", "floor_share": 0.3},
                {**step, "rows": 1, "graphs": True, "bits": "none", "floor_share": 0.9},
                {**step, "rows": 64, "graphs": True, "bits": "none", "floor_share": 0.7},
                {**step, "rows": 1, "graphs": True, "bits": "int4", "floor_share": 0.4},
            ]
        },
        "prefill": {"cases": [{"shape": "8B", "share": 0.6}, {"shape": "1B", "share": 0.2}]},
        "serving": {
            "cases": [
                {"what": "idle", "shape": "1B", "overlap": True, "rows": 64, "idle_share": 0.01},
                {"what": "idle", "shape": "1B", "overlap": False, "rows": 64, "idle_share": 0.2},
                {**masks, "masks": "device", "over_unconstrained": 0.96},
                {**masks, "masks": "host", "over_unconstrained": 0.5},
                {"what": "workload", "workload": "W1", "tokens_per_second": 1.0},
            ]
        },
    }


def test_targets_are_judged() -> None:
    found = targets.judge(measured())
    values = {name: (target["value"], target["met"]) for name, target in found.items()}
    assert values == {
        "decode_step_8b_1_row_share": (0.9, True),
        "decode_step_8b_64_rows_share": (0.7, False),
        "prefill_8b_share": (0.6, True),
        "tree_attention_speed_up": (12.0, True),
        "constrained_over_unconstrained": (0.96, False),
        "gpu_idle_share": (0.01, True),
        "decode_attention_share": (0.86, True),
        "extend_attention_share": (0.5, False),
    }
    assert json.loads(json.dumps(found)) == found


def test_what_was_not_measured_is_not_judged() -> None:
    for found in ({}, {"decode_attention": {"cases": [], "error": "stopped after 150 s"}}):
        assert all(t["met"] is None for t in targets.judge(found).values())


@pytest.mark.parametrize("on_device", [True, False])
def test_a_constraint_that_the_device_did_not_apply_is_told(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """An engine that only counts: tokens of constrained rows, if it says so."""
    counted = 0

    class Engine:
        def get_server_info(self) -> dict[str, int]:
            return {"automaton_rows": counted}

    def rate(engine: Engine, prompts: list[Any], new: int, params: dict[str, Any]) -> float:
        nonlocal counted
        counted += len(prompts) * new if on_device and "regex" in params else 0
        return {"regex": 95.0, "ebnf": 50.0}.get(
            min(params.keys() & {"regex", "ebnf"}, default=""), 100.0
        )

    monkeypatch.setattr(serving, "decode_rate", rate)
    findings = Findings()
    serving._constrained(Setting(torch.device("cuda")), findings, Engine(), "1B", 64, 256)  # type: ignore[arg-type]
    device, host = findings.result["cases"]
    assert device["automaton_share"] == (1.0 if on_device else 0.0)
    assert device["over_unconstrained"] == 0.95 and host["over_unconstrained"] == 0.5
    assert ("error" in device) is not on_device and "error" not in host


# ---------------------------------------------------------------- isolation


def test_a_part_that_fails_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"prefix": 1, "rows": 1, "speed_up": 1.0}

    def broken(setting: Setting, findings: Findings) -> None:
        findings.add(first)
        with findings.attempt(case=2):
            raise ValueError("this case only")
        raise RuntimeError("the whole part")

    monkeypatch.setattr("benchmarks.gpu.attention.measure_tree", broken)
    arguments = ["--smoke", "--device", "cpu", "--only", "tree_attention"]
    result = gpu.measure_all(gpu.parse_arguments(arguments))
    assert list(result["parts"]) == ["ceilings", "tree_attention"]
    part = result["parts"]["tree_attention"]
    assert part["cases"][0] == first
    assert part["cases"][1]["case"] == 2 and "this case only" in part["cases"][1]["error"]
    assert "the whole part" in part["error"]
    assert sum("this case only" in line for line in gpu.summary(result)) == 1


def apart(names: list[str], budget: float) -> dict[str, dict[str, Any]]:
    arguments = gpu.parse_arguments(["--smoke", "--device", "cpu"])
    found: dict[str, dict[str, Any]] = {}
    parts.run_parts_apart(names, arguments, budget, found.__setitem__)
    return found


def test_parts_run_in_a_process_beside_the_command() -> None:
    # A spawned process cannot import what stands in the command's own module.
    assert not parts.run_parts.__module__.endswith("__main__")
    found = apart(["ceilings", "products"], 600)
    assert found["ceilings"]["copy_bandwidth"] > 0 and found["ceilings"]["matmul_rate"] > 0
    assert found["products"]["cases"] and not errors(found)


def test_a_part_that_hangs_or_dies_is_recorded_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes that are threads' stand-ins: what they write and how they end is made up."""
    started: list[list[str]] = []

    class Process:
        exitcode = 1

        def __init__(self, target: Any, args: Any) -> None:
            self.names, _, _, self.folder = args

        def start(self) -> None:
            started.append(list(self.names))
            self.alive = True
            first = self.names[0]
            if first == "ceilings":  # ends well, the next one faults, then the process ends
                self.write("ceilings", {"copy_bandwidth": 1.0, "seconds": 1.0})
                self.write("decode_step", {"cases": [{"rows": 1}], "seconds": 1.0, "error": "no"})
                self.alive = False
            elif first == "prefill":  # begins, and hangs
                self.write("prefill", {"cases": [{"tokens": 1}]})
            else:  # dies before anything is written
                self.alive = False

        def write(self, name: str, found: dict[str, Any]) -> None:
            (self.folder / f"{name}.json").write_text(json.dumps(found))

        def is_alive(self) -> bool:
            return self.alive

        def kill(self) -> None:
            self.alive = False

        def join(self, timeout: float | None = None) -> None:
            pass

    context = type("Context", (), {"Process": Process})
    monkeypatch.setattr(parts.multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setattr(parts, "limit_of", lambda names, left: 0.3)
    found = apart(["ceilings", "decode_step", "prefill", "products"], 600)
    assert [names[0] for names in started] == ["ceilings", "prefill", "products"]
    assert "error" not in found["ceilings"] and found["decode_step"]["error"] == "no"
    assert "stopped after" in found["prefill"]["error"]
    assert found["prefill"]["cases"] == [{"tokens": 1}]
    assert "status 1" in found["products"]["error"]


def test_every_part_has_its_share_of_the_time() -> None:
    names, left = list(gpu.PARTS), 540.0
    for place in range(len(names)):
        left -= parts.limit_of(names[place:], left)
    assert left == pytest.approx(0)
    # What a part leaves, the others share.
    assert parts.limit_of(names[1:], 540.0) > parts.limit_of(names[1:], 540.0 - 30)
    assert parts.limit_of(["serving"], 99.0) == 99.0
    assert {one["error"] for one in apart(names[:3], 0.0).values()} == {parts.NO_TIME}


def test_time_that_is_spent_is_said() -> None:
    arguments = ["--smoke", "--device", "cpu", "--only", "pointwise", "--budget", "0"]
    result = gpu.measure_all(gpu.parse_arguments(arguments))
    assert "no time" in result["parts"]["pointwise"]["error"]


def test_without_a_gpu_there_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert gpu.main([]) == 2
        assert "no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.parse_arguments(["--device", "cpu"])


# ---------------------------------------------------------------- what is compared is the same


@pytest.fixture(scope="module")
def model() -> Any:
    with random_model("smoke", CPU, torch.float32) as made:
        yield made


def prompts(model: RandomModel, rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(2, model.config.spec.vocab_size, (rows, length), generator=generator)


def twin_tokens(model: RandomModel, ids: torch.Tensor, new: int) -> list[list[int]]:
    """transformers' own greedy tokens on the same weights, no token ending a text."""
    raw = {k: v for k, v in CONFIGS[model.name].items() if k not in ("architectures", "model_type")}
    config = LlamaConfig(**raw)
    with torch.device("meta"):
        twin = LlamaForCausalLM(config)
    weights = named_weights(model.config.spec, model.weights)
    weights |= {"lm_head.weight": model.weights.embedding}  # tied
    twin.load_state_dict(weights, strict=True, assign=True)
    twin.model.rotary_emb = LlamaRotaryEmbedding(config)
    with torch.inference_mode():
        for _ in range(new):
            following = twin.eval()(ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, following), 1)
    return ids[:, -new:].tolist()


def test_hand_made_plans_continue_a_sequence(model: RandomModel) -> None:
    """Their rows, fed from step to step, say what transformers says."""
    runner = model.runner(1, 24)
    plans = decode_plans(1, 0, 24, runner.block_size, runner.vocab_size)
    results = []
    plan = next(plans)
    first = torch.from_numpy(plan.token_ids).view(1, 1).long()
    launched = runner.launch(plan)
    for plan in plans:
        following = runner.launch(plan)
        results.append(int(runner.collect(launched).token_ids[0]))
        launched = following
    results.append(int(runner.collect(launched).token_ids[0]))
    assert results == twin_tokens(model, first, 24)[0]


def test_step_bytes_count_every_weight_once(model: RandomModel) -> None:
    spec, weights = model.config.spec, model.weights
    distinct = {t.data_ptr(): t.nbytes for t in named_weights(spec, weights).values()}
    token_heads = (spec.attention.num_kv_heads, spec.attention.head_dim)
    token = 2 * spec.num_layers * math.prod(token_heads) * 4
    assert sum(distinct.values()) == num_bytes(weights)
    assert model.step_bytes(2, 10) == sum(distinct.values()) + 22 * token
    rounded = load_rounded(lambda *_: weights, "int8")(model.config, torch.float32, CPU)
    of_rows = [w for w in rounded.products() if isinstance(w, Quantised) and w.scheme == ROWS]
    scales = sum(w.scales.nbytes for w in of_rows)
    slots = 2 * spec.num_layers * slot_bytes(8, *token_heads) * 22
    read = num_bytes(rounded) - weights.embedding.nbytes - scales
    assert model.step_bytes(2, 10, "int8") == read + slots


def test_step_flops_are_those_of_products_and_visible_pairs(model: RandomModel) -> None:
    spec, new, context = model.config.spec, 3, 10
    matrices = [w for n, w in named_weights(spec, model.weights).items() if "proj" in n]
    products = 2 * new * sum(w.numel() for w in matrices) + 2 * model.weights.embedding.numel()
    heads = spec.attention.num_heads * spec.attention.head_dim
    pairs = attention.visible_pairs(new, context)
    assert model.step_flops(new, context) == products + 4 * heads * pairs * spec.num_layers


def test_shapes_are_those_of_the_models_they_are_named_after() -> None:
    """Parameters of Llama 3.2 1B and Llama 3.1 8B, as their cards say."""
    counts = {}
    for name in ("1B", "8B"):
        s = CONFIGS[name]
        hidden, inner, vocab = s["hidden_size"], s["intermediate_size"], s["vocab_size"]
        q, kv = (s[f"num_{kind}_heads"] * s["head_dim"] for kind in ("attention", "key_value"))
        layer = 2 * hidden * q + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
        heads = 1 if s["tie_word_embeddings"] else 2
        counts[name] = s["num_hidden_layers"] * layer + heads * vocab * hidden + hidden
    assert counts == {"1B": 1_235_814_400, "8B": 8_030_261_248}


def test_visible_pairs() -> None:
    for new, context in ((1, 1), (4, 4), (3, 10)):
        brute = sum(context - new + i + 1 for i in range(new))
        assert attention.visible_pairs(new, context) == brute


def test_the_floor_is_bytes_at_copy_speed() -> None:
    setting = Setting(CPU, ceilings={"copy_bandwidth": 1e9})
    found = decode_step.against_floor(setting, 3e-3, 2_000_000)
    assert found["floor_us"] == pytest.approx(2000) and found["floor_share"] == pytest.approx(2 / 3)
    assert decode_step.against_floor(Setting(CPU), 1.0, 1)["floor_share"] is None


def test_the_engine_on_random_weights() -> None:
    params = {"regex": "([a-z]{2,9} )*", "max_new_tokens": 20, "min_new_tokens": 20}
    with started("smoke", CPU, 4) as engine:
        reply = engine.generate(input_ids=[5, 6], sampling_params=params)
        assert decode_rate(engine, [[5, 6], [7]], 12, {}) > 0
    assert len(reply["output_ids"]) == 20
    assert re.fullmatch("([a-z]{2,9} )*[a-z]{0,9}", reply["text"])


# ---------------------------------------------------------------- tuning


def test_tuning_finds_what_is_fast_and_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel whose time and result are made up from its settings."""
    folder = tmp_path / "tables"
    folder.mkdir()
    first = {"when": {"width": {"most": 9}}, "blocks": {"B": 16}, "num_warps": 4, "num_stages": 3}
    other = {"when": {}, "blocks": {"B": 99}, "num_warps": 8, "num_stages": 1}
    committed = {"measured": None, "kernels": {"made_up": [first, other], "rest": [other]}}
    (folder / "default.json").write_text(json.dumps(committed))
    monkeypatch.setattr(launching, "TABLES", folder)
    launching.forget()

    def make(kernels: KernelSet) -> Any:
        launch = launching.settings("made_up", 90, width=8)
        size, warps = launch.blocks["B"], launch.num_warps
        if size == 128:
            raise RuntimeError("out of resources")
        value = float("nan") if size == 64 and warps == 8 else 1.0

        def call() -> torch.Tensor:
            return torch.full((3,), value)

        call.seconds = abs(size - 64) + abs(warps - 8) + 10  # type: ignore[attr-defined]
        return call

    case = tune.TuneCase("made_up", {"width": 8}, "a load", make)
    path = folder / "sm_90.json"
    measured = {"gpu": "none", "triton": "0", "date": "today"}
    (tuned,) = tune.tune(TRITON, 90, [case], lambda call: call.seconds, path, measured)
    written = json.loads(path.read_text())
    # 64 with 8 warps would be the fastest, but is wrong; so is 64 with 4 warps the best.
    best = {**first, "blocks": {"B": 64}, "num_warps": 4}
    assert written == {"measured": measured, "kernels": {"made_up": [best, other], "rest": [other]}}
    assert (tuned.before, tuned.after) == (62e6, 14e6)
    assert any("out of resources" in text for text in tuned.refused)
    assert any("another result" in text for text in tuned.refused)
    launching.forget()
    assert launching.settings("made_up", 90, width=8).blocks["B"] == 64
    assert launching.settings("made_up", 80, width=8).blocks["B"] == 16
    launching.forget()


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels")
def test_every_kernel_with_settings_can_be_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    """Interpreted, with one other entry each; the committed tables stay."""
    replace_once_a_kernel()
    before = {path: path.read_bytes() for path in launching.TABLES.glob("*.json")}
    assert gpu.main(["--tune", "--smoke", "--device", "cpu"]) == 0
    done = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    table = json.loads((launching.TABLES / "default.json").read_text())["kernels"]
    assert done == set(table)
    assert before == {path: path.read_bytes() for path in launching.TABLES.glob("*.json")}
    assert gpu.main(["--tune", "no_such_kernel", "--smoke", "--device", "cpu"]) == 2
