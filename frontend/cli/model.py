"""Which model a command means."""

from __future__ import annotations

from rootlace.cli.failure import fail
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.source import servable_source
from rootlace.runtime.model.hub.local import local_model
from rootlace.wire.errors import RootlaceError


def described_model(given: str) -> str:
    """The model `given`, a folder or a GGUF file; ends the command if it is none."""
    try:
        return str(ModelConfig.read(local_model(given, weights=False)).path.absolute())
    except RootlaceError as error:
        fail(str(error))


def served_model(given: str | None) -> str:
    """As `described_model`, None: the embedded demo model; ends the command too if it cannot be
    served."""
    if given is None:
        from rootlace.runtime.assets import demo_model

        try:
            return str(demo_model())
        except FileNotFoundError as error:
            fail(str(error))
    try:
        return str(ModelConfig.of(servable_source(local_model(given))).path.absolute())
    except RootlaceError as error:
        fail(str(error))
