"""The well-known data sets: how their rows read, and how they are asked.

Prompts and metrics are those of lm-evaluation-harness's tasks of these names, so that numbers can
be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rootlace.evaluation.template import look_up
from rootlace.wire.errors import InvalidRequest

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """`read` makes the fields that templates know of a row; `task` is what a task of this format
    says unless its file says otherwise."""

    read: Callable[[Row], dict[str, Any]] = dict
    task: Mapping[str, Any] = field(default_factory=dict)


def _text(row: Row, key: str) -> str:
    value = look_up(row, key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{key}: not a text, but {value!r:.60}")
    return value


def _texts(row: Row, key: str) -> list[str]:
    value = look_up(row, key)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidRequest(f"{key}: not a list of texts, but {value!r:.60}")
    return value


def _mmlu(row: Row) -> dict[str, Any]:
    subject = row.get("subject") or ""
    return {
        **row,
        "question": _text(row, "question").strip(),
        "choices": _texts(row, "choices"),
        "subject": subject,
        "about": f" about {subject.replace('_', ' ')}" if subject else "",
    }


def _hellaswag(row: Row) -> dict[str, Any]:
    if "ctx_a" in row:
        context = f"{_text(row, 'ctx_a')} {_text(row, 'ctx_b').capitalize()}"
    else:
        context = _text(row, "ctx")
    query = f"{_text(row, 'activity_label')}: {context}"
    endings = [_without_marks(text) for text in _texts(row, "endings")]
    return {**row, "query": _without_marks(query), "choices": endings}


def _without_marks(text: str) -> str:
    """The half of HellaSwag that comes from WikiHow has marks in brackets."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _arc(row: Row) -> dict[str, Any]:
    """As the hub has it, or as the authors' files do."""
    question, choices = look_up(row, "question"), row.get("choices")
    if isinstance(question, Mapping):
        listed = question.get("choices") or []
        choices = {name: [choice.get(name) for choice in listed] for name in ("text", "label")}
        question = _text(question, "stem")
    if not isinstance(choices, Mapping):
        raise InvalidRequest("choices: not an object with the lists 'text' and 'label'")
    labels, key = _texts(choices, "label"), _text(row, "answerKey")
    if key not in labels:
        raise InvalidRequest(f"answerKey: {key!r} is none of {labels}")
    texts = _texts(choices, "text")
    return {**row, "question": question, "choices": texts, "answer": labels.index(key)}


def _boolq(row: Row) -> dict[str, Any]:
    key = "label" if "label" in row else "answer"
    answer = look_up(row, key)
    if answer not in (0, 1):
        raise InvalidRequest(f"{key}: true or false, 1 or 0, not {answer!r:.60}")
    return {**row, "answer": int(answer)}


def _piqa(row: Row) -> dict[str, Any]:
    return {**row, "choices": [_text(row, "sol1"), _text(row, "sol2")]}


def _winogrande(row: Row) -> dict[str, Any]:
    before, blank, after = _text(row, "sentence").partition("_")
    if not blank:
        raise InvalidRequest("sentence: there is no _ in it")
    if row.get("answer") not in ("1", "2"):
        raise InvalidRequest(f"answer: '1' or '2', not {row.get('answer')!r}")
    return {
        **row,
        "contexts": [before + _text(row, name) for name in ("option1", "option2")],
        "ending": after.strip(),
        "answer": int(row["answer"]) - 1,
    }


_ARC = {"prompt": "Question: {question}\nAnswer:", "metrics": ["acc", "acc_norm"]}
_NUMBER = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"

FORMATS: dict[str, Format] = {
    "questions": Format(),
    "mmlu": Format(
        _mmlu,
        {
            "description": "The following are multiple choice questions (with answers){about}.\n\n",
            "prompt": "{question}\nA. {choices[0]}\nB. {choices[1]}\nC. {choices[2]}\n"
            "D. {choices[3]}\nAnswer:",
            "choices": ["A", "B", "C", "D"],
            "group": "subject",
            "shots": {"same": "subject"},
        },
    ),
    "hellaswag": Format(
        _hellaswag,
        {"prompt": "{query}", "answer": "label", "id": "ind", "metrics": ["acc", "acc_norm"]},
    ),
    "arc": Format(_arc, _ARC),
    "boolq": Format(
        _boolq,
        {"prompt": "{passage}\nQuestion: {question}?\nAnswer:", "choices": ["no", "yes"]},
    ),
    "piqa": Format(_piqa, {**_ARC, "prompt": "Question: {goal}\nAnswer:", "answer": "label"}),
    "winogrande": Format(_winogrande, {"contexts": "contexts", "prompt": "{ending}"}),
    "gsm8k": Format(
        task={
            "score": "generate",
            "prompt": "Question: {question}\nAnswer:",
            "answer": "{answer}",
            "generate": {"max_tokens": 256, "stop": ["Question:", "</s>", "<|im_end|>"]},
            "extract": {
                "strict": {"pattern": r"#### (\-?[0-9\.\,]+)"},
                "flexible": {"pattern": _NUMBER, "take": "last"},
            },
            "match": {"ignore": [",", r"\$", r"(?s).*#### ", r"\.$"], "ignore_case": True},
        },
    ),
    # Prompts that are ready: OLMES's files, beside which the examples lie as text (`shots.text`).
    "prepared": Format(
        task={"prompt": "{query}", "answer": "gold", "metrics": ["acc", "acc_norm", "acc_bytes"]}
    ),
}
