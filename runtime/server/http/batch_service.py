"""What the endpoints of files and batches share: the folder, while the server runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from aiohttp import web

from rootlace.runtime.server.auth import caller
from rootlace.runtime.server.http.batch_runner import Answering, Runner
from rootlace.runtime.server.http.batch_store import Bounds, Records, RecordType, Storage
from rootlace.runtime.server.http.errors import RecordNotFound
from rootlace.runtime.server.model_registry import ModelRegistry
from rootlace.runtime.server.served_model import ServedModel
from rootlace.wire.errors import InvalidRequest


class BatchService:
    """`answers`: by path, the endpoints that rows may ask."""

    def __init__(
        self, server: ServedModel | ModelRegistry, answers: Mapping[str, Answering]
    ) -> None:
        self._server = server
        self.answers = answers
        self._open: tuple[Storage, Runner] | None = None

    async def lifetime(self, app: web.Application) -> AsyncIterator[None]:
        """While the application runs, batches are worked on, those of an earlier server first."""
        config = self._server.config
        if config.files or config.state:
            folder = Path(config.files) if config.files else Path(config.state) / "files"
            storage = Storage(folder, Bounds())
            self._open = storage, Runner(self._server, storage, self.answers)
        yield
        if self._open is not None:
            storage, runner = self._open
            await runner.stop()
            storage.close()

    @property
    def storage(self) -> Storage:
        """Raises InvalidRequest if the server was started without a folder."""
        return self._opened()[0]

    @property
    def runner(self) -> Runner:
        return self._opened()[1]

    def _opened(self) -> tuple[Storage, Runner]:
        if self._open is None:
            raise InvalidRequest("this server keeps no files and batches: start it with --files")
        return self._open

    def visible(self, records: Records[RecordType]) -> list[RecordType]:
        """Those that the caller may see: a key's own, all for the operator."""
        account = caller()
        return [one for one in records.all() if account is None or one.owner == account.name]

    def find(self, records: Records[RecordType], id_: str, param: str | None = None) -> RecordType:
        """One of them. Raises RecordNotFound, also for another's."""
        found = records.get(id_, param)
        account = caller()
        if account is not None and found.owner != account.name:
            raise RecordNotFound(records.noun, id_, param)
        return found


def owner() -> str:
    """Whose a record is that the caller makes."""
    account = caller()
    return "" if account is None else account.name
