"""Measure a model on a labelled set: the examples are computed once, whatever the set's size.

    python examples/few_shot_eval.py [--model NAME | --url URL]

`reviews.yaml` is the task; `rootlace eval examples/reviews.yaml` does the same and keeps each row.
The model scores the labels instead of writing freely, so every answer is a label.

SmolLM2-135M sorts plain sentences like these. The model does not recognise irony. It fails on
reviews that praise one thing and blame another.
"""

from __future__ import annotations

from pathlib import Path

from backend import arguments, backend
from rootlace.evaluation.questions import chosen
from rootlace.evaluation.run import evaluate
from rootlace.evaluation.task import read_task


def main() -> None:
    given = arguments(__doc__).parse_args()
    task = read_task(Path(__file__).with_name("reviews.yaml"))
    with backend(given):
        run = evaluate(task)
    for record in run.records:
        label = record.choices[chosen("acc", record.scored())]
        right = "ok   " if record.scores["acc"] else "WRONG"
        print(f"{right} {record.prompt.splitlines()[0]} {label}")
    found = run.estimates()["acc"]
    print(f"{found.mean:.0%} of {len(run.records)} right", end=", ")
    print(f"{run.hit_rate:.0%} of the prompt tokens cached")


if __name__ == "__main__":
    main()
