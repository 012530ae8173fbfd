"""What a constraint costs while decoding: the same requests with it and without, in turns."""

from __future__ import annotations

import statistics

from benchmarks.gpu_parts.engine import EOS, InProcessEngine, grammar_compiler
from benchmarks.gpu_parts.models import random_model
from benchmarks.gpu_parts.setting import Report, Setting
from rootlace.protocol import Constraint, SamplingParams

BLOCK_SIZE = 16
ROUNDS = 5
RECORDS = (
    r'(\{"name": "[a-z ]{1,40}", "age": [1-9][0-9]{0,2}, "tags": \["[a-z]{1,12}"'
    r'(, "[a-z]{1,12}"){0,6}\]\}\n)*'
)
"""Lines of JSON without end: states that allow most of the vocabulary's words, a digit, a quote."""


def measure(setting: Setting, report: Report) -> None:
    """Decode tokens per second at a full batch, sampled at temperature 1; no text may end before
    its length, and nothing is forced without sampling, so that both runs take equally many steps.
    """
    name, rows, new = ("smoke", 3, 8) if setting.smoke else ("1B", 64, 256)
    regex = Constraint("regex", RECORDS, jump_forward="off")
    # Stop tokens are banned before `min_tokens`: in both runs, so that both do the same.
    params = SamplingParams(
        max_tokens=new, min_tokens=new, temperature=1.0, seed=0, stop_token_ids=(EOS,)
    )
    with random_model(name, setting.device) as model:
        blocks = (rows + 2) * (-(-(16 + new) // BLOCK_SIZE) + 1)
        runner = model.runner(blocks, max_running=rows)
        engine = InProcessEngine(
            runner, grammar_compiler(model.config.vocab_size), max_running=rows
        )
        prompts = [[2 + (7 * row + i) % 250 for i in range(16)] for row in range(rows)]
        rates: dict[str, list[float]] = {"constrained": [], "unconstrained": []}
        try:
            rounds = 1 if setting.smoke else max(setting.repeats(ROUNDS), 3)
            for number in report.progress(range(rounds + 1), "constrained"):
                for label, found in rates.items():
                    served = engine.serve(
                        prompts, params, regex if label == "constrained" else None
                    )
                    if number:  # the first round warms up
                        found.append(served.decode_tokens_per_second)
        finally:
            engine.close()
    medians = {label: statistics.median(found) for label, found in rates.items()}
    report.add({"shape": name, "rows": rows, "new": new, "decode_tokens_per_second": rates})
    report.set("constrained_over_unconstrained", medians["constrained"] / medians["unconstrained"])
