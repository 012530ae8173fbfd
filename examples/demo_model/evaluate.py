"""Accuracy of the demo model per skill, on names, numbers and phrasings it was not trained on.

Greedy decoding in batches with plain transformers, so the figures do not depend on Rootlace.  Each
figure comes with its 95 % confidence interval::

    python -m examples.demo_model.evaluate --model runtime/assets/demo --n 400
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

if not __package__:  # run as a script: make the repository root importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.demo_model import corpus
from examples.demo_model.pools import Source

DEFAULT_MODEL = Path(__file__).resolve().parents[2] / "runtime" / "assets" / "demo"


@dataclass(frozen=True)
class Case:
    """A prompt (messages, or plain text) and the only right answer."""

    prompt: list[corpus.Message] | str
    answer: str


def _last_answer(messages: list[corpus.Message]) -> Case:
    return Case(messages[:-1], messages[-1]["content"])


def _text_case(document: corpus.Document, end: int) -> Case:
    """Cut a plain-text document so that the segment ``end`` is the answer."""
    return Case("".join(text for text, _weight in document[:end]), document[end][0].strip())


def extraction(source: Source) -> Case:
    return _last_answer(corpus.extraction(source, source.pick((2, 3, 4, 5))))


def passage_question(source: Source) -> Case:
    return _last_answer(corpus.question(source, source.pick((2, 3, 4, 5))))


def follow_up(source: Source) -> Case:
    """The last request of several about one passage."""
    return _last_answer(corpus.passage_session(source, source.pick((2, 3, 4, 5))))


def few_shot(source: Source) -> Case:
    return _text_case(corpus.few_shot_text(source, source.pick((6, 8, 10))), -2)


def few_shot_long(source: Source) -> Case:
    """Forty examples: prompts of about 500 to 900 tokens."""
    return _text_case(corpus.few_shot_text(source, 40), -2)


def few_shot_chat(source: Source) -> Case:
    return _last_answer(corpus.few_shot_chat(source, source.pick((6, 8, 10))))


def zero_shot(source: Source) -> Case:
    return _last_answer(corpus.zero_shot(source, 0))


def tool_call(source: Source) -> Case:
    messages = corpus.tools(source, 0)
    return Case(messages[:-3], messages[-3]["content"])


def tool_result(source: Source) -> Case:
    return _last_answer(corpus.tools(source, 0))


def greetings(source: Source) -> Case:
    return _last_answer(corpus.greetings(source, 0))


def name_recall(source: Source) -> Case:
    return _last_answer(corpus.name_recall(source))


def judge(source: Source) -> Case:
    return _last_answer(corpus.judge(source, source.pick((2, 3, 4, 5))))


def choice(source: Source) -> Case:
    return _last_answer(corpus.choice(source, source.pick((2, 3, 4, 5))))


def tips(source: Source) -> Case:
    return _last_answer(corpus.tips_chat(source, 0))


def tips_text(source: Source) -> Case:
    return _text_case(corpus.tips_text(source, 0), -2)


SKILLS: dict[str, Callable[[Source], Case]] = {
    "extraction": extraction,
    "passage question": passage_question,
    "follow-up": follow_up,
    "few-shot text": few_shot,
    "few-shot text, long": few_shot_long,
    "few-shot chat": few_shot_chat,
    "zero-shot label": zero_shot,
    "tool call": tool_call,
    "tool result": tool_result,
    "greetings": greetings,
    "name recall": name_recall,
    "judge": judge,
    "choice": choice,
    "tips chat": tips,
    "tips text": tips_text,
}


class Generator:
    """Greedy answers to batches of prompts."""

    def __init__(self, folder: Path, batch_size: int) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.padding_side = "left"
        # Float32 arithmetic on the bf16 weights: no rounding noise from the batch's layout.
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.batch_size = batch_size

    def render(self, prompt: list[corpus.Message] | str) -> str:
        if isinstance(prompt, str):
            return prompt
        return self.tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True
        )

    @torch.inference_mode()
    def answers(self, cases: Sequence[Case], progress: tqdm | None = None) -> list[str]:
        """One answer per case; a plain-text prompt is answered by one line."""
        texts = [self.render(case.prompt) for case in cases]
        order = sorted(range(len(cases)), key=lambda index: len(texts[index]))
        found = [""] * len(cases)
        for start in range(0, len(order), self.batch_size):
            group = order[start : start + self.batch_size]
            inputs = self.tokenizer(
                [texts[index] for index in group],
                return_tensors="pt",
                padding=True,
                add_special_tokens=False,
            )
            longest = max(len(self.tokenizer.encode(cases[index].answer)) for index in group)
            output = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=False,
                max_new_tokens=longest + 4,
            )
            width = inputs["input_ids"].shape[1]
            for index, row in zip(group, output[:, width:], strict=True):
                text = self.tokenizer.decode(row, skip_special_tokens=True)
                if isinstance(cases[index].prompt, str):
                    text = text.strip().split("\n")[0]
                found[index] = text.strip()
            if progress is not None:
                progress.update(len(group))
        return found


def interval(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's confidence interval of a share, 95 % by default."""
    share = right / n
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return center - half, center + half


def make_cases(skill: str, n: int, seed: int, known_phrasings: bool) -> list[Case]:
    source = Source(seed, held_out=True, known_phrasings=known_phrasings)
    return [SKILLS[skill](source) for _ in range(n)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--n", type=int, default=400, help="cases per skill and column")
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--skills", nargs="*", choices=list(SKILLS), default=list(SKILLS))
    parser.add_argument("--show-errors", type=int, default=0, help="errors to print per skill")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    started = time.monotonic()
    generator = Generator(args.model, args.batch_size)
    figures: dict[str, dict[str, list[float]]] = {}
    errors: list[str] = []
    with tqdm(total=2 * args.n * len(args.skills), unit="case", disable=None) as progress:
        for skill in args.skills:
            figures[skill] = {}
            for column, known in (("new values and phrasings", False), ("new values", True)):
                cases = make_cases(skill, args.n, args.seed, known)
                answers = generator.answers(cases, progress)
                wrong = [
                    (case, answer)
                    for case, answer in zip(cases, answers, strict=True)
                    if answer != case.answer
                ]
                right = args.n - len(wrong)
                figures[skill][column] = [right / args.n, *interval(right, args.n)]
                errors += [
                    f"--- {skill}: wanted {case.answer!r}, got {answer!r}\n"
                    f"{generator.render(case.prompt)[-900:]}"
                    for case, answer in wrong[: args.show_errors]
                ]
    print("\n".join(errors))
    print(f"{'skill':22}{'new values and phrasings':>26}{'new values only':>24}   (n={args.n})")
    for skill, row in figures.items():
        shown = [f"{share:.1%} ({low:.1%}-{high:.1%})" for share, low, high in row.values()]
        print(f"{skill:22}{shown[0]:>26}{shown[1]:>24}")
    print(f"{time.monotonic() - started:.0f} s")
    if args.json:
        args.json.write_text(
            json.dumps({"n": args.n, "seed": args.seed, "accuracy": figures}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
