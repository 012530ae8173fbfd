"""A batch, as it is kept and as it is shown."""

from __future__ import annotations

import time
from typing import Any

import msgspec

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


class Counts(msgspec.Struct):
    """The rows of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def all_done(self) -> bool:
        return self.completed + self.failed == self.total


class Batch(msgspec.Struct):
    """OpenAI's batch object."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    request_counts: Counts = msgspec.field(default_factory=Counts)
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: dict[str, Any] | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    object: str = "batch"
    owner: str = ""

    @property
    def unfinished(self) -> bool:
        return self.status in UNFINISHED

    @property
    def result_ids(self) -> tuple[str, str]:
        """The ids of the files of its good answers and of its errors."""
        hexes = self.id.removeprefix("batch_")
        return f"file-{hexes}-output", f"file-{hexes}-errors"

    def enter(self, status: str) -> None:
        """Go on to `status`, and note the time."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def fail(
        self, code: str, message: str, line: int | None = None, param: str | None = None
    ) -> None:
        """End for this, and say in which `line` of the input it is, and in which field."""
        self.enter("failed")
        data = [{"code": code, "message": message, "line": line, "param": param}]
        self.errors = {"object": "list", "data": data}
