"""A model that is served, to programs and HTTP clients alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.server.auth import Account
from rootlace.runtime.server.chat_template import ChatTemplate
from rootlace.runtime.server.core import Core, Engine, check_name
from rootlace.runtime.server.generate import Generation
from rootlace.runtime.server.score import Selection
from rootlace.runtime.server.sequence import (
    OpenSequences,
    TokenSequence,
    append,
    explain,
    prefill,
)
from rootlace.runtime.server.server_state import ServerState
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.errors import RootlaceError, ServerUnavailable
from rootlace.wire.protocol import Append, Event, Explain, Generate, Prefill, Select


def _nothing(event: Event) -> None:
    pass


class ServedModel(Core):
    """One model, and what can be done with it. `program_address` is where programs connect, once
    that is known."""

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

    def loaded(self, asked: str) -> ServedModel:
        """Itself, the only model there is. Raises ModelNotFound for another one."""
        check_name(self.model_info, asked)
        return self

    async def load(self, asked: str) -> ServedModel:
        """The same."""
        return self.loaded(asked)

    def open_sequences(
        self,
        end: Callable[[RootlaceError], None],
        account: Account | None = None,
        source: str = "",
        stays_wanted: bool = True,
    ) -> OpenSequences:
        """Those of an HTTP request; see `OpenSequences`."""
        return OpenSequences(self, end, account, source, stays_wanted)

    def perform(
        self,
        sequence: TokenSequence,
        op: Append | Prefill | Generate | Select | Explain,
        emit: Callable[[Event], None] = _nothing,
    ) -> Awaitable[Event]:
        """Do `op` with a sequence of no program; `emit` gets the chunks of `Generate`. What is
        awaited gives the terminal event. Raises a typed error where the operation fails."""
        if isinstance(op, Append):
            return append(self, sequence, op)
        if isinstance(op, Explain):
            return explain(self, sequence, op)
        sequence.check_handling(op.handling)
        if isinstance(op, Prefill):
            return prefill(self, sequence, op)
        if isinstance(op, Generate):
            return Generation(self, sequence, op, emit).run()
        return Selection(self, sequence, op).run()

    def close(self) -> None:
        """End every program and request; the engine is the caller's to stop."""
        error = ServerUnavailable(f"the model {self.model_info.name} was unloaded")
        for owner in list(self.owners):
            owner.end(error)
        super().close()
