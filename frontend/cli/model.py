"""Which model a command means."""

from __future__ import annotations

from rootlace.cli.failure import fail
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.folder import servable_folder
from rootlace.wire.errors import UnsupportedModel


def described_model(given: str) -> str:
    """The folder `given`, which has a model's configuration; ends the command if it is none."""
    try:
        return str(ModelConfig.read(given).path.resolve())
    except UnsupportedModel as error:
        fail(str(error))


def served_model(given: str | None) -> str:
    """The folder `given`, or the embedded demo model's; ends the command if it cannot be served."""
    if given is None:
        from rootlace.runtime.assets import demo_model

        try:
            return str(demo_model())
        except FileNotFoundError as error:
            fail(str(error))
    try:
        return str(ModelConfig.read(servable_folder(given)).path.resolve())
    except UnsupportedModel as error:
        fail(str(error))
