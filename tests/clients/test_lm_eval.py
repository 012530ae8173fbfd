"""lm-eval's `local-completions`: the numbers are those of transformers on the same model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rootlace as rl
from tests.evaluation.lm_eval_cases import KEPT, ask_lm_eval

pytest.importorskip("lm_eval", reason="needs the extra `clients-all`")
torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

PAIRS = [
    ("Once upon a time", " there was a little girl"),
    ("Once upon a time", " banana engine"),
    ("The dog", " ran to the park."),
]


@pytest.fixture(scope="module")
def folder(shared_dir: Path) -> Path:
    return shared_dir / "data" / "models" / "stories3M"


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[str]:
    with rl.Runtime(folder, dtype="float32", device="cpu", threads=1, http_port=0) as runtime:
        assert runtime.url is not None
        yield runtime.url


def request(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_numbers_are_those_of_transformers(served: str, folder: Path) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    asked = LocalCompletionsAPI(
        model="stories3M",
        base_url=f"{served}/v1/completions",
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        max_retries=1,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def expected(prompt: list[int], rest: list[int]) -> tuple[float, bool]:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + rest])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1)[range(len(rest)), rest]
        return float(chosen.sum()), logits.argmax(-1).tolist() == rest

    scored = asked.loglikelihood([request("loglikelihood", *pair) for pair in PAIRS])
    for (prompt, rest), (score, greedy) in zip(PAIRS, scored, strict=True):
        whole, before = ids(prompt + rest), ids(prompt)
        assert whole[: len(before)] == before
        wanted, likeliest = expected(before, whole[len(before) :])
        assert score == pytest.approx(wanted, abs=1e-3) and greedy == likeliest
    (rolled,) = asked.loglikelihood_rolling([request("loglikelihood_rolling", "A cat sat.")])
    begin = [tokenizer.bos_token_id]
    assert rolled == pytest.approx(expected(begin, ids("A cat sat."))[0], abs=1e-3)

    limits = {"until": ["."], "max_gen_toks": 24, "temperature": 0}
    (text,) = asked.generate_until([request("generate_until", PAIRS[0][0], limits)])
    prompt = torch.tensor([ids(PAIRS[0][0])])
    with torch.inference_mode():
        whole = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]
    assert text == tokenizer.decode(whole, skip_special_tokens=True).partition(".")[0]


def test_the_numbers_that_are_kept_are_those_of_lm_eval(folder: Path, shared_dir: Path) -> None:
    pytest.importorskip("accelerate", reason="needs the extra `clients-all`")
    kept = json.loads(KEPT.read_text())["cases"]
    found = ask_lm_eval(str(folder), shared_dir / "data")
    assert found.keys() == kept.keys()
    for name, case in found.items():
        assert case["metrics"] == kept[name]["metrics"]
        for row, expected in zip(case["rows"], kept[name]["rows"], strict=True):
            assert row == (expected if isinstance(row, str) else pytest.approx(expected, abs=1e-3))
