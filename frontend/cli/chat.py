"""`rootlace chat`: a conversation in the terminal, over one growing branch."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rootlace.cli.common import KeyOption, ModelOption, UrlOption, connected, fail
from rootlace.wire.errors import RootlaceError

if TYPE_CHECKING:
    from rootlace.program.branch import Branch

HELP = "/stats tokens per turn · /reset start anew · /quit (or Ctrl-D) · Ctrl-C stops a reply"


def chat(
    model: ModelOption = None,
    url: UrlOption = None,
    api_key: KeyOption = "",
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 is greedy.", show_default="the model's, else 0.7"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest reply.")] = 512,
) -> None:
    """Chat with a model. Every turn reuses the cache of those before, to the last token."""
    with connected(model, url, api_key) as backend:
        conversation = Conversation(backend, system, temperature, max_tokens)
        try:
            _talk(conversation)
        except RootlaceError as error:
            fail(str(error))
        finally:
            conversation.close()


@dataclass(frozen=True)
class Turn:
    """Tokens of one turn."""

    prompt: int
    cached: int
    reply: int

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt} tokens: {self.cached} cached, "
            f"{self.prompt - self.cached} computed; reply {self.reply}"
        )


class Conversation:
    """A conversation as a branch of one program.

    A turn runs on a fork that replaces the branch once it is complete. Its tokens, generated ones
    included, stay what they are; a turn that fails or is interrupted leaves no trace.
    """

    def __init__(
        self, backend: Any, system: str, temperature: float | None, max_tokens: int
    ) -> None:
        from rootlace.client.endpoint import endpoint_of
        from rootlace.program.run import ProgramRun

        self.turns: list[Turn] = []
        self._system = system
        endpoint = endpoint_of(backend)
        defaults: dict[str, Any] = {"max_tokens": max_tokens}
        if temperature is not None or "temperature" not in endpoint.model_info.sampling:
            defaults["temperature"] = 0.7 if temperature is None else temperature
        self._run = ProgramRun(endpoint, defaults, stream=True)
        self._branch = self._begin()

    def reset(self) -> None:
        self.turns.clear()
        self._branch.remote.close("the conversation was reset")
        self._branch = self._begin()

    def ask(self, message: str) -> Any:
        """Yield the reply as it comes. Raises the typed error of what fails."""
        from rootlace import ProgramState, assistant, gen, user

        (turn,) = self._branch.fork(1)
        state = ProgramState(turn)
        done = False
        try:
            state += user(message)
            state += assistant(gen("reply"))
            yield from state.text_iter("reply")
            meta = state.get_meta_info("reply")
            done = True
        finally:
            if not done:
                turn.remote.cancel()
                turn.remote.close("this turn was interrupted")
        self._branch.remote.close("the conversation went on")
        self._branch = turn
        self.turns.append(
            Turn(meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"])
        )

    def close(self) -> None:
        with contextlib.suppress(RootlaceError):
            self._run.cancel()
            self._run.finish()
        self._run.conclude(None)

    def _begin(self) -> Branch:
        from rootlace import system
        from rootlace.program.branch import Branch

        branch = Branch(self._run)
        if self._system:
            branch.append(system(self._system))
        return branch


def _talk(conversation: Conversation) -> None:
    # Importing it gives `input` line editing and a history.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    interactive = sys.stdin.isatty()
    if interactive:
        typer.secho(HELP, dim=True)
    while (message := _read(interactive)) is not None:
        command = message.strip()
        if command in ("/quit", "/exit"):
            return
        if command == "/reset":
            conversation.reset()
            typer.secho("the conversation starts anew", dim=True)
        elif command == "/stats":
            _show_stats(conversation)
        elif command in ("/help", "/?"):
            typer.secho(HELP, dim=True)
        elif command:
            _reply(conversation, message)


def _read(interactive: bool) -> str | None:
    """The next line; None at the end of the input."""
    while True:
        try:
            return input("you> " if interactive else "")
        except EOFError:
            if interactive:
                typer.echo()
            return None
        except KeyboardInterrupt:
            typer.secho("\n(/quit or Ctrl-D ends the chat)", dim=True)


def _reply(conversation: Conversation, message: str) -> None:
    try:
        with contextlib.closing(conversation.ask(message)) as reply:
            for text in reply:
                sys.stdout.write(text)
                sys.stdout.flush()
        typer.echo()
        typer.secho(f"[{conversation.turns[-1]}]", dim=True)
    except KeyboardInterrupt:
        typer.secho("\n[interrupted; this turn is forgotten]", dim=True)
    except RootlaceError as error:
        typer.echo()
        typer.secho(f"[{error}]", fg=typer.colors.RED)


def _show_stats(conversation: Conversation) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("turn", "prompt", "cached", "computed", "reply"):
        table.add_column(title, justify="right")
    for number, turn in enumerate(conversation.turns, 1):
        counts = (number, turn.prompt, turn.cached, turn.prompt - turn.cached, turn.reply)
        table.add_row(*map(str, counts))
    Console().print(table)
