"""What lm-eval's own tasks give on rows of ours: asked of lm-eval, and kept in lm_eval.json.

    python -m tests.evaluation.lm_eval_cases MODEL_FOLDER SHARED_DATA

writes that file, with an environment as `make clients` makes it, and the `hf` back end of lm-eval
(which needs accelerate). Rows are ours (rows/) or the shared data's.
"""

import json
import platform
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEPT = HERE / "lm_eval.json"


@dataclass(frozen=True)
class Case:
    """`task` is lm-eval's, with what `over` changes; `format` and `ours` say the same to ours.
    Paths of rows are relative to this folder, or, with `shared`, to the shared data."""

    name: str
    task: str
    format: str
    rows: str
    examples: str = ""
    shots: int = 0
    limit: int | None = None
    shared: bool = False
    over: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)

    def files(self, shared: Path) -> tuple[str, str]:
        """Those of the rows and of the examples."""
        folder = shared / "eval" if self.shared else HERE / "rows"
        return str(folder / self.rows), str(folder / (self.examples or self.rows))


_PREPARED = {
    "doc_to_text": "{{query}}",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "process_docs": None,
    "metric_list": [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")
    ],
}
_ALL = ["acc", "acc_norm", "acc_bytes", "acc_mutual_info"]
_ANATOMY = {"rows": "mmlu/anatomy_test.jsonl", "examples": "mmlu/anatomy_dev.jsonl", "shared": True}

CASES = [
    Case(
        *("hellaswag_rows", "hellaswag", "prepared", "hellaswag/rc_5shot.jsonl"),
        limit=24, shared=True, over=_PREPARED, ours={"metrics": _ALL},
    ),
    Case("mmlu", "mmlu_anatomy", "mmlu", shots=1, limit=16, **_ANATOMY),
    Case(
        *("gsm8k", "gsm8k", "gsm8k", "gsm8k/test.jsonl", "gsm8k/train_first300.jsonl"),
        shots=1, limit=3, shared=True, over={"generation_kwargs": {
            "until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False, "max_gen_toks": 24,
        }}, ours={"generate.max_tokens": 24},
    ),
    Case("hellaswag", "hellaswag", "hellaswag", "hellaswag.jsonl", shots=1),
    Case("arc", "arc_easy", "arc", "arc.jsonl", shots=1),
    Case("boolq", "boolq", "boolq", "boolq.jsonl", shots=1),
    Case("piqa", "piqa", "piqa", "piqa.jsonl", shots=1),
    Case("winogrande", "winogrande", "winogrande", "winogrande.jsonl", shots=1),
]  # fmt: skip
"""With examples from the rows themselves, the first row is the example and is not asked."""


def ask_lm_eval(model: str, shared: Path) -> dict[str, Any]:
    """By case, the log-likelihoods (or responses) of each row, and the metrics, as lm-eval's `hf`
    back end gives them in float32."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    manager = TaskManager()
    asked = HFLM(pretrained=model, dtype="float32", device="cpu", batch_size=1)
    found = {}
    for case in CASES:
        rows, examples = case.files(shared)
        config = {
            **load_yaml(manager.task_index[case.task].yaml_path),
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"asked": rows, "examples": examples}},
            "training_split": None,
            "validation_split": None,
            "test_split": "asked",
            "fewshot_split": "examples",
            "fewshot_config": {"sampler": "first_n"},
            **case.over,
        }
        first = 0 if case.examples or not case.shots else case.shots
        count = (case.limit or 1 << 30) + first
        done = simple_evaluate(
            asked,
            tasks=[config],
            num_fewshot=case.shots,
            limit=count,
            bootstrap_iters=0,
            task_manager=manager,
        )
        samples = sorted(done["samples"][case.task], key=lambda sample: sample["doc_id"])[first:]
        found[case.name] = {
            "rows": [_said(one) for one in samples if one["filter"] == samples[0]["filter"]],
            "metrics": _metrics(samples),
        }
    return found


def _said(sample: dict[str, Any]) -> Any:
    """Log-likelihoods, the unconditional ones at the end; or what was written."""
    replies = [reply[0] for reply in sample["resps"]]
    if isinstance(replies[0], str):
        return replies[0]
    return [round(float(reply[0]), 5) for reply in replies]


def _metrics(samples: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By metric (and filter, where there are several), the score of each row."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            name = metric if sample["filter"] == "none" else sample["filter"]
            found.setdefault(name, []).append(float(sample[metric]))
    return found


def main(model: str, shared: str) -> None:
    """Write `KEPT`."""
    found = ask_lm_eval(model, Path(shared).resolve())
    packages = {name: version(name) for name in ("lm_eval", "transformers", "torch")}
    about = {"model": Path(model).name, "python": platform.python_version(), **packages}
    cases = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in found.items())
    KEPT.write_text(f'{{"about": {json.dumps(about)},\n"cases": {{\n{cases}\n}}}}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
