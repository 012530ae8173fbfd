"""Testing programs without a model, a server or a process: in milliseconds.

    from rootlace.testing import Scripted

    def test_triage():
        backend = Scripted(label="refund")
        assert triage.run("I want my money back", backend=backend)["label"] == "refund"
        assert backend.calls[0].prompt.endswith("Label: ")

`Scripted` is a backend that says what it is told to say; `Recorded` one that says what a real one
said when the cassette was recorded. `plugin` has both as fixtures for pytest, which finds them
where the package is installed. `replies` makes events of texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rootlace.testing.recorded import Recorded
    from rootlace.testing.scripted import Call, Scripted

# pytest imports the plugin in every run, also where no program is tested.
_LAZY = {"Call": "scripted", "Recorded": "recorded", "Scripted": "scripted"}

__all__ = ["Call", "Recorded", "Scripted"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
