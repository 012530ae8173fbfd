"""Which requests can be served at all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rootlace.runtime.contracts.request import Request
from rootlace.wire.errors import ContextLengthExceeded, InvalidRequest


@dataclass(frozen=True)
class Limits:
    """`capacity` is what the KV pool holds, in tokens; `vocab_size` 0 allows any token id. `labels`
    and `adapters` are those of `Ready`."""

    context_length: int
    capacity: int
    vocab_size: int
    labels: int | None = None
    adapters: tuple[str, ...] = ()

    def beside(self, pinned: int) -> Limits:
        """The limits while `pinned` tokens of the pool are not to be had."""
        return replace(self, capacity=self.capacity - pinned) if pinned else self

    @property
    def max_length(self) -> int:
        """A sequence of this many tokens ends; the last needs no KV, as nothing attends to it."""
        return min(self.context_length, self.capacity + 1)

    def longest(self, request: Request, block_size: int) -> int:
        """At this length a sequence of `request`, which was checked, ends. Who pins a prompt that
        ends within a block leaves room for a copy of that block: the pin holds the one that is in
        the tree."""
        prompt = len(request.token_ids)
        if not request.handling.cache.pin or not prompt % block_size:
            return self.max_length
        return max(self.beside(block_size).max_length, prompt + len(request.output_ids) + 1)

    def check(self, request: Request, *, constrained: bool) -> None:
        """Raises InvalidRequest, or ContextLengthExceeded if not even one token fits."""
        params = request.params
        if not len(request.token_ids):
            raise InvalidRequest("the prompt is empty")
        if params.max_tokens is None:
            raise InvalidRequest("max_tokens must be a number here")
        self._check_kind(request)
        for name, ids in (
            ("prompt", request.token_ids),
            ("output", request.output_ids),
            ("prediction", request.prediction),
        ):
            # One bad id would make the executor fail the whole step.
            bad = len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size)
            if bad and self.vocab_size:
                raise InvalidRequest(f"the {name} has ids outside 0..{self.vocab_size - 1}")
        if constrained and not self.vocab_size:
            raise InvalidRequest("constrained requests need a scheduler that knows vocab_size")
        outputs = len(request.output_ids)
        length = len(request.token_ids) + outputs
        cached = min(self.context_length, self.capacity)
        room = self.max_length - 1 if outputs < params.max_tokens else cached
        if length > room:
            raise ContextLengthExceeded(
                f"the prompt has {length} tokens; at most {room} fit into the context window and "
                f"the KV cache ({self.capacity} tokens)"
            )

    def adapter(self, request: Request) -> int:
        """The number of a request's adapter, -1 where it has none. Raises InvalidRequest."""
        if not request.adapter:
            return -1
        if request.adapter not in self.adapters:
            known = f"there are {', '.join(self.adapters)}" if self.adapters else "there are none"
            raise InvalidRequest(f"the adapter {request.adapter!r} is not loaded: {known}")
        return self.adapters.index(request.adapter)

    def _check_kind(self, request: Request) -> None:
        """Whether the model has what is asked for."""
        if request.pooling == "none":
            if self.labels is not None:
                head = f"its head scores {self.labels} labels" if self.labels else "it has no head"
                raise InvalidRequest(f"this model does not generate text: {head}")
        elif request.params.max_tokens or request.params.prompt_logprobs_from is not None:
            raise InvalidRequest("a request for a vector neither samples nor scores tokens")
        elif request.pooling == "labels" and not self.labels:
            raise InvalidRequest("this model has no head that scores labels")
