"""The gateway of one process, which serves ZeroMQ and HTTP clients alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.server.auth import Account
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.core import Core, Engine
from rootlace.runtime.server.model_texts import check_name
from rootlace.runtime.server.server_state import ServerState
from rootlace.runtime.server.session import Session
from rootlace.runtime.server.session_log import SessionLog
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.errors import ServerUnavailable
from rootlace.wire.protocol import Event


class ServedModel(Core):
    """Hands out sessions. `program_address` is where programs connect, once it is known."""

    def __init__(
        self,
        config: GatewayConfig,
        engine: Engine,
        tokenizer: Tokenizer,
        chat: ChatTemplate,
        eos_ids: Iterable[int] = (),
        house: ServerState | None = None,
    ) -> None:
        super().__init__(config, engine, tokenizer, chat, eos_ids, house)
        self.program_address: str | None = None
        self.answering: object = None
        """Its HTTP endpoints, where there are several models: they go with it."""
        self._sessions: set[Session] = set()
        self._next_session = 0

    def loaded(self, asked: str) -> ServedModel:
        """Itself, the only model there is. Raises ModelNotFound for another one."""
        check_name(self.model_info, asked)
        return self

    async def load(self, asked: str) -> ServedModel:
        """The same."""
        return self.loaded(asked)

    def open_session(
        self,
        on_events: Callable[[list[Event]], None],
        client: str = "",
        account: Account | None = None,
        source: str = "",
        log: SessionLog | None = None,
    ) -> Session:
        """A client's session. `on_events` gets what happened, at most once per loop turn. `source`:
        where its requests come from, if it is not the only session of its client. `log`: what keeps
        it."""
        self._next_session += 1
        session = Session(
            self,
            on_events,
            self._next_session,
            client,
            self._sessions.discard,
            account,
            source,
            log,
        )
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """End every session, telling its client; the engine is the caller's to stop."""
        error = ServerUnavailable(f"the model {self.model_info.name} was unloaded")
        for session in list(self._sessions):
            session.end(error)
        super().close()
