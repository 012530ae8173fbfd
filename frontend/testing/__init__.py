"""Testing of programs without a model, a server or a process, in milliseconds.

    from rootlace.testing import Scripted

    def test_triage():
        backend = Scripted(label="refund")
        assert triage.run("I want my money back", backend=backend)["label"] == "refund"
        assert backend.calls[0].prompt.endswith("Label: ")

`Scripted` is a backend with given replies; `Recorded` repeats a real backend's recorded replies.
`plugin` has both as fixtures, which pytest finds if the package is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rootlace.testing.backends import Call, Recorded, Scripted

# pytest imports the plugin in every run, also where no program is tested.
__all__ = ["Call", "Recorded", "Scripted"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rootlace.testing import backends

    return getattr(backends, name)
