"""What predicted outputs save: `python -m benchmarks.prediction [--model FOLDER] [--json FILE]`.

Each row generates a text; then the same again, and what came out is predicted: as it is ("right"),
as somebody would have it who asks for edits ("edited": one in 25 tokens is another one, is left out
or is put in), or another row's ("wrong"). Sampled with a seed, since models with random weights
repeat themselves otherwise. All ways in each round, in random order. Printed are medians of all
rounds, of the speedup that over "nothing" in the same round. Engine and scheduler alone, in one
process. That tokens are the same is checked.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import Report, console_of, new_parser, progress_bar, table_of
from rootlace.runtime.assets import demo_model
from rootlace.runtime.config import CacheConfig, ExecutorConfig, SchedulerConfig
from rootlace.runtime.contracts.messages import EngineRequest
from rootlace.runtime.engine.core import Steps
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.protocol import SamplingParams

PROMPT = 32
BLOCK_SIZE = 16
BETWEEN_EDITS = 25

Outputs = list[list[int]]


@dataclass(frozen=True)
class Finding:
    """Results of so many rows at a time: milliseconds per token of each row, and drafted and
    accepted tokens per output token. `speedup`: over no prediction."""

    rows: int
    predicted: str
    milliseconds: float
    speedup: float
    steps: int
    drafted: float
    accepted: float


class Server:
    """A scheduler and an executor, kept between rounds, so that their step cost is known."""

    def __init__(self, model: Path, tokens: int, most_rows: int, dtype: str) -> None:
        blocks = 2 * most_rows * (-(-(PROMPT + tokens) // BLOCK_SIZE) + 10)
        cache = CacheConfig(BLOCK_SIZE, blocks)
        given = ExecutorConfig(model=str(model), device="cpu", dtype=dtype)  # type: ignore[arg-type]
        runner = ModelRunner.load(given, cache, 2048, 256)
        self._scheduler = Scheduler(
            SchedulerConfig(), cache, runner.context_length, vocab_size=runner.vocab_size
        )
        self._steps = Steps(self._scheduler, runner, False, lambda updates: None)
        self._vocabulary, self._tokens = runner.vocab_size, tokens

    def run(self, rows: int, predictions: Outputs) -> tuple[Outputs, float, dict[str, float]]:
        """Return each row's output, the seconds from the first token on, and the counters."""
        dice = np.random.default_rng(rows)
        self._scheduler.cache.flush()
        for row in range(rows):
            prompt = dice.integers(10, self._vocabulary - 10, PROMPT).astype(np.int32)
            params = SamplingParams(max_tokens=self._tokens, temperature=1.0, seed=row)
            predicted = np.array(predictions[row] if predictions else [], np.int32)
            self._scheduler.add(EngineRequest(row, prompt, params, prediction=predicted))
        outputs: Outputs = [[] for _ in range(rows)]
        before, begun = self._scheduler.stats(), 0.0
        while self._scheduler.has_work:
            for update in self._steps.step():
                outputs[update.rid] += update.token_ids
            begun = begun or time.perf_counter()
        seconds, after = time.perf_counter() - begun, self._scheduler.stats()
        names = ("steps", "drafted_tokens", "accepted_tokens")
        return outputs, seconds, {name: after[name] - before[name] for name in names}


def edited(output: list[int], dice: random.Random) -> list[int]:
    """Return the text before its edits to `output`."""
    found = list(output)
    for at in range(len(found) - BETWEEN_EDITS // 2, 0, -BETWEEN_EDITS):
        tokens = [dice.choice(output) for _ in range(dice.randint(0, 3))]
        found[at : at + dice.randint(0, 3)] = tokens
    return found


WAYS: dict[str, Callable[[Outputs, random.Random], Outputs]] = {
    "nothing": lambda outputs, dice: [],
    "right": lambda outputs, dice: outputs,
    "edited": lambda outputs, dice: [edited(output, dice) for output in outputs],
    "wrong": lambda outputs, dice: [output[::-1] for output in outputs],
}


def measure(server: Server, rows: int, tokens: int, rounds: int) -> list[Finding]:
    outputs, _, _ = server.run(rows, [])
    took: dict[str, list[float]] = {name: [] for name in WAYS}
    counts: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    dice = random.Random(0)
    for _ in range(rounds):
        for name in dice.sample(list(WAYS), len(WAYS)):
            again, seconds, counted = server.run(rows, WAYS[name](outputs, random.Random(0)))
            if again != outputs:
                raise AssertionError(f"{rows} rows, {name}: other tokens than without prediction")
            took[name].append(seconds)
            counts[name].append(counted)
    plain, total = took["nothing"], rows * tokens

    def count(way: str, name: str) -> float:
        return statistics.median(counted[name] for counted in counts[way])

    return [
        Finding(
            rows,
            way,
            1000 * statistics.median(took[way]) / (tokens - 1),
            statistics.median(one / other for one, other in zip(plain, took[way], strict=True)),
            int(count(way, "steps")),
            count(way, "drafted_tokens") / total,
            count(way, "accepted_tokens") / total,
        )
        for way in WAYS
    ]


def main() -> None:
    parser = new_parser("prediction", __doc__)
    parser.add_argument("--model", type=Path, default=demo_model(), help="a folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 8), help="at a time")
    parser.add_argument("--tokens", type=int, default=256, help="of an output")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    console, report = console_of(80), Report("prediction", args)
    server = Server(args.model, args.tokens, max(args.rows), args.dtype)
    found: list[Finding] = []
    with progress_bar(console) as bar:
        for rows in bar.track(args.rows, description="rows"):
            found += measure(server, rows, args.tokens, args.rounds)
    columns = {
        "ms/token": "{milliseconds:.3f}",
        "speedup": "{speedup:.2f}",
        "steps": "{steps}",
        "drafted": "{drafted:.2f}",
        "accepted": "{accepted:.2f}",
    }
    table = {f"{one.rows} rows, {one.predicted} predicted": asdict(one) for one in found}
    console.print(table_of(f"{args.tokens} tokens of each row", table, columns))
    console.print(report.foreign_line())
    report.add("model", args.model.name)
    report.add("findings", found)
    report.write()


if __name__ == "__main__":
    main()
