"""What a constraint costs while decoding: the same requests with it and without, in turns."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gpu.engine import decode_rate, started
from benchmarks.gpu.setting import Report, Setting

WARM_UPS = 2
"""In the first rounds graphs are captured and the automaton is walked until it is known whole."""
PAIRS = r'\{("[a-z ]{3,30}": [0-9]{2,6}, )*"#": true\}'
"""A JSON object of any length: states that allow most words, a digit or two, a quote. Only one word
in a hundred thousand leads to its end, so that no row ends early."""


def measure(setting: Setting, report: Report) -> None:
    """Decode tokens per second at a full batch, sampled at temperature 1. Nothing is forced without
    sampling, so that both runs take equally many steps."""
    name, rows, new = ("smoke", 3, 8) if setting.smoke else ("1B", 64, 256)
    # Nothing is banned or penalised: lists of tokens are beyond what a captured graph does.
    kinds: dict[str, dict[str, Any]] = {
        "constrained": {"regex": PAIRS, "jump_forward": "off"},
        "unconstrained": {},
    }
    prompts = [[2 + (7 * row + i) % 250 for i in range(16)] for row in range(rows)]
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    with started(name, setting.device, rows) as engine:
        for number in range(WARM_UPS + setting.choose(5, 3, 1)):
            for kind, params in kinds.items():
                rate = decode_rate(engine, prompts, new, {"temperature": 1.0, **params})
                if number >= WARM_UPS:
                    rates[kind].append(rate)
    constrained, plain = (statistics.median(found) for found in rates.values())
    case = {"shape": name, "rows": rows, "new": new, "decode_tokens_per_second": rates}
    report.add({**case, "over_unconstrained": constrained / plain})
