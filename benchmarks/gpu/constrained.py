"""What a constraint costs while decoding: the same requests with it and without, in turns."""

from __future__ import annotations

import statistics
from typing import Any

import rootlace as rl
from benchmarks.gpu.engine import decode_rate, started
from benchmarks.gpu.setting import Findings, Setting

WARM_UPS = 2
"""In the first rounds graphs are captured and the automaton is walked until it is known whole."""
PAIRS = r'\{("[a-z ]{3,30}": [0-9]{2,6}, )*"#": true\}'
"""A JSON object of any length: states that allow most words, a digit or two, a quote. Only one word
in a hundred thousand leads to its end, so that no row ends early."""
LEAST_SHARE = 0.95
"""Of the constrained tokens, so many the device must have masked by itself."""


def measure(setting: Setting, findings: Findings) -> None:
    """Decode tokens per second at a full batch, sampled at temperature 1. Nothing is forced without
    sampling, so that both runs take equally many steps. `automaton_share`: of the constrained
    tokens those that the device masked by itself, as its counter says; None where it has none."""
    name, rows, new = ("smoke", 3, 8) if setting.smoke else ("1B", 64, 256)
    # Nothing is banned or penalised: lists of tokens are beyond what a captured graph does.
    kinds: dict[str, dict[str, Any]] = {
        "constrained": {"regex": PAIRS, "jump_forward": "off"},
        "unconstrained": {},
    }
    prompts = [[5 + (7 * row + i) % 250 for i in range(16)] for row in range(rows)]
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    rounds = setting.choose(5, 3, 1)
    with started(name, setting.device, rows) as engine:
        for number in range(WARM_UPS + rounds):
            if number == WARM_UPS:
                before = _automaton_rows(engine)
            for kind, params in kinds.items():
                rate = decode_rate(engine, prompts, new, {"temperature": 1.0, **params})
                if number >= WARM_UPS:
                    rates[kind].append(rate)
        after = _automaton_rows(engine)
    constrained, plain = (statistics.median(found) for found in rates.values())
    share = None if after is None else (after - (before or 0)) / (rounds * rows * new)
    case = {"shape": name, "rows": rows, "new": new, "decode_tokens_per_second": rates}
    case |= {"automaton_share": share, "over_unconstrained": constrained / plain}
    findings.add(case)
    if setting.on_gpu and (share or 0.0) < LEAST_SHARE:
        raise RuntimeError(f"the device masked {share} of the tokens by itself, not {LEAST_SHARE}")


def _automaton_rows(engine: rl.Engine) -> int | None:
    """See `automaton_rows` among the counters; None: this engine has none."""
    found: int | None = engine.get_server_info().get("automaton_rows")
    return found
