"""What can be wrong with a checkpoint."""

from __future__ import annotations

from rootlace.errors import RootlaceError


class UnsupportedModel(RootlaceError):
    """A model folder that is missing, damaged, or of a kind that is not implemented.

    The message names the file and the field or weight.
    """

    code = "unsupported_model"
