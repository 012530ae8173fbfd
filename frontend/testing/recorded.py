"""A backend that says what a real one said."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from rootlace.client.channel import Channel
from rootlace.client.default import endpoint_of
from rootlace.client.endpoint import Answer, RuntimeEndpoint
from rootlace.client.machine import Ask, BranchText, LocalChannel
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.sampling import PLAIN

Said = protocol.Generated | protocol.Selected


class Cassette(msgspec.Struct, omit_defaults=True):
    """What is in a cassette's file: the answers to each question, in the order they were given."""

    model: protocol.ModelInfo
    answers: dict[str, list[Said]] = {}


class Recorded(RuntimeEndpoint):
    """Answers from the cassette at `path`, a JSON file. A question is the text before a `gen` or
    `select` and all its options; one that was asked several times gets its answers in turn, and the
    last one from then on.

    With a `backend`, what is not in the cassette is asked there and kept; without one, it fails.
    Raises InvalidRequest for a file that is no cassette, or is not there.
    """

    def __init__(self, path: str | Path, backend: Any = None) -> None:
        self._path = Path(path)
        self._real = None if backend is None else endpoint_of(backend)
        self._cassette = self._read()
        self._asked: dict[str, int] = {}
        self.url = str(path)
        self._channel = LocalChannel(self._cassette.model, self._answer)

    def _read(self) -> Cassette:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Cassette)
        except FileNotFoundError:
            if self._real is None:
                raise InvalidRequest(
                    f"there is no cassette {self._path}; give backend=... to record one"
                ) from None
            return Cassette(self._real.model_info)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"{self._path} is no cassette: {error}") from None

    def connect(self) -> Channel:
        return self._channel

    def close(self) -> None:
        """Nothing is open."""

    def _answer(self, branch: BranchText, op: Ask) -> list[protocol.Event]:
        key = _key(branch, op)
        answers = self._cassette.answers.get(key, [])
        turn = self._asked.get(key, 0)
        self._asked[key] = turn + 1
        if self._real is not None and turn >= len(answers):
            answers = [*answers, _ask(self._real.connect(), branch, op)]
            self._cassette.answers[key] = answers
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(msgspec.json.format(msgspec.json.encode(self._cassette)))
        if not answers:
            raise InvalidRequest(
                f"the cassette {self._path} has no answer to {op.name!r} after "
                f"{branch.text[-80:]!r}; record it with backend=..."
            )
        said = msgspec.structs.replace(answers[min(turn, len(answers) - 1)], op=op.op)
        events: list[protocol.Event] = [said]
        if isinstance(op, protocol.Generate) and op.stream and isinstance(said, protocol.Generated):
            chunks = [
                protocol.Chunk(op.op, index, output.text, output.token_ids, output.logprobs)
                for index, output in enumerate(said.outputs)
            ]
            events[:0] = chunks
        return events


def _key(branch: BranchText, op: Ask) -> str:
    """A question, whatever its numbers are."""
    plain: dict[str, Any] = {"op": 0, "branch": 0, "name": "", "handling": PLAIN}
    if isinstance(op, protocol.Generate):
        plain["stream"] = False
    question = (branch.text, msgspec.structs.replace(op, **plain))
    return hashlib.sha256(msgspec.json.encode(question, order="sorted")).hexdigest()[:32]


def _ask(real: Channel, branch: BranchText, op: Ask) -> Said:
    number = real.next_branch()
    plain: dict[str, Any] = {"op": real.next_op(), "branch": number}
    if isinstance(op, protocol.Generate):
        plain["stream"] = False
    answer = Answer()
    real.send(protocol.Open(real.next_op(), number), Answer())
    real.send(protocol.Append(real.next_op(), number, tuple(branch.parts)), Answer())
    real.send(msgspec.structs.replace(op, **plain), answer)
    real.send(protocol.Close(real.next_op(), number), Answer())
    real.flush()
    event = answer.get()
    assert isinstance(event, Said)
    return event
