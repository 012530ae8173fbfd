"""Measure a model on a labelled set: the examples are computed once, whatever the set's size.

    python examples/few_shot_eval.py [--model PATH | --url URL]

`reviews.yaml` says what is asked; `rootlace eval examples/reviews.yaml` does the same and keeps
each row. The labels are scored instead of letting the model write freely, so every answer is one of
them.
"""

from __future__ import annotations

from pathlib import Path

from backend import arguments, backend
from rootlace.evaluation.run import evaluate
from rootlace.evaluation.scoring import chosen
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
    print(f"between {found.low:.0%} and {found.high:.0%} for reviews like these")
    print(f"accuracy {found.mean:.0%}, {run.hit_rate:.0%} of the prompt tokens cached")


if __name__ == "__main__":
    main()
