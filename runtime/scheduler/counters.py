"""What the scheduler counts; docs/architecture.md, "Counters", says what each means."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    steps: int = 0
    requests_added: int = 0
    requests_refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    dropped_samples: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    copies: int = 0
    by_finish: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )

    def values(self) -> dict[str, int | float]:
        """By name, `by_finish` as `requests_stop` and so on."""
        values: dict[str, int | float] = dict(vars(self))
        del values["by_finish"]
        return values | {f"requests_{finish}": count for finish, count in self.by_finish.items()}
