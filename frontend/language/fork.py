"""Several continuations of one state, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from rootlace.language.expressions import Appendable, Expression
from rootlace.wire.errors import InvalidRequest

# sglang spells the last one `concate_and_append`.
_JOIN_MODES = ("gather_variable", "concate_and_append", "concatenate_and_append")


class Forks(Sequence[Any]):
    """What `s.fork(n)` gives: n states, which grow one by one or all at once.

    `forks[i]` is a state and `forks["x"]` the list of all their `x`; `forks += ...` appends an
    expression to all, the i-th of a list to the i-th, or `f(i)` of a function. As a context manager
    it joins at the end of the block.
    """

    def __init__(self, source: Any, size: int, adapter: str | None = None) -> None:
        if size < 1:
            raise InvalidRequest(f"fork() needs a size of at least 1, not {size}")
        self._states = [type(source)(branch) for branch in source.branch.fork(size, adapter)]
        self._source = source
        self._joined = False

    # ------------------------------------------------------------ a sequence of states

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states)

    def __getitem__(self, key: Any) -> Any:
        """A state (int), some of them (slice), or every state's value of a variable (str).

        In an `async def` program, the values of a variable are awaited.
        """
        if isinstance(key, str):
            return self.get_var(key)
        return self._states[key]

    def __setitem__(self, index: int, state: Any) -> None:
        # `forks[i] += x` ends with this assignment.
        if self._states[index] is not state:
            raise TypeError("a fork's states cannot be replaced")

    def get_var(self, name: str) -> Any:
        found = [state.branch.reader.find(name) for state in self._states]
        return self._source._read_all(found, self)

    def __iadd__(self, other: Appendable | Sequence[Appendable] | Callable[[int], Any]) -> Self:
        if isinstance(other, (str, Expression)):
            for state in self._states:
                state.append(other)
        elif callable(other):
            for index, state in enumerate(self._states):
                state.append(other(index))
        elif isinstance(other, (list, tuple)):
            if len(other) != len(self._states):
                raise InvalidRequest(
                    f"{len(self._states)} forks cannot take a list of {len(other)} expressions"
                )
            for state, expression in zip(self._states, other, strict=True):
                state.append(expression)
        else:
            raise TypeError(
                "forks take an expression, a list of them or a function of the index, "
                f"not {type(other).__name__}"
            )
        return self

    # ------------------------------------------------------------ the end

    def join(self, mode: str = "gather_variable") -> None:
        """End the forks and bring back their results. Nothing is waited for.

        `"gather_variable"`: every variable new in the forks becomes a list in the source state, in
        the order of the forks. `"concate_and_append"`: the texts the forks have gained are appended
        to the source, one after the other, by the server itself.
        """
        if self._joined:
            raise InvalidRequest("these forks were joined before")
        if mode not in _JOIN_MODES:
            raise InvalidRequest(
                f"join mode must be 'gather_variable' or 'concate_and_append', not {mode!r}"
            )
        self._source.branch.join([state.branch for state in self._states], mode)
        self._joined = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None and not self._joined:
            self.join()

    def __repr__(self) -> str:
        return f"Forks({len(self._states)})"
