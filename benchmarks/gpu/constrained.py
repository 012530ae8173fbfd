"""What a constraint costs while decoding: the same requests with it and without, in turns."""

from __future__ import annotations

import statistics

from benchmarks.gpu.engine import InProcessEngine, grammar_compiler
from benchmarks.gpu.models import random_model
from benchmarks.gpu.setting import Report, Setting
from rootlace.wire.protocol import Constraint, SamplingParams

WARM_UPS = 2
"""In the first rounds graphs are captured and the automaton is walked until it is known whole."""
PAIRS = r'\{("[a-z ]{3,30}": [0-9]{2,6}, )*"#": true\}'
"""A JSON object of any length: states that allow most words, a digit or two, a quote. Only one word
in a hundred thousand leads to its end, so that no row ends early."""


def measure(setting: Setting, report: Report) -> None:
    """Decode tokens per second at a full batch, sampled at temperature 1. Nothing is forced without
    sampling, so that both runs take equally many steps."""
    name, rows, new = ("smoke", 3, 8) if setting.smoke else ("1B", 64, 256)
    regex = Constraint("regex", PAIRS, jump_forward="off")
    # Nothing is banned or penalised: lists of tokens are beyond what a captured graph does.
    params = SamplingParams(max_tokens=new, temperature=1.0, seed=0, ignore_eos=True)
    prompts = [[2 + (7 * row + i) % 250 for i in range(16)] for row in range(rows)]
    rates: dict[str, list[float]] = {"constrained": [], "unconstrained": []}
    with random_model(name, setting.device) as model:
        runner = model.runner_for(rows, 16 + new)
        compiler = grammar_compiler(model.config.spec.vocab_size)
        rounds = WARM_UPS + setting.choose(5, 3, 1)
        with InProcessEngine(runner, compiler, rows) as engine:
            for number in range(rounds):
                for label, found in rates.items():
                    constraint = regex if label == "constrained" else None
                    served = engine.serve(prompts, params, constraint)
                    if number >= WARM_UPS:
                        found.append(served.decode_tokens_per_second)
        on_device = compiler.compile(regex).matcher().automaton() is not None
    constrained, plain = (statistics.median(found) for found in rates.values())
    case = {"shape": name, "rows": rows, "new": new, "automaton_on_device": on_device}
    case |= {"decode_tokens_per_second": rates, "over_unconstrained": constrained / plain}
    report.add(case)
