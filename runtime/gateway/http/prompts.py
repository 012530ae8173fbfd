"""Prompts as bodies carry them: a text, token ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.wire.protocol import Part, Text, Tokens

MAX_PROMPTS = 4096
"""Also of their samples, together: each is a request of the engine."""


@dataclass(frozen=True)
class Prompt:
    """One prompt; exactly one of the two is set."""

    text: str | None = None
    ids: tuple[int, ...] | None = None

    def parts(self, begin: bool = True) -> tuple[Part, ...]:
        """What to append to a branch.

        Whoever sends a raw prompt wrote its template too, so special tokens in it are recognised.
        The empty piece of ordinary text makes the branch begin as the tokenizer's post-processor
        would (BOS), which a branch that begins with special text does not; without `begin` it is
        left out.
        """
        if self.ids is not None:
            return (Tokens(self.ids),)
        text = Text(self.text or "", special=True)
        return (Text(""), text) if begin else (text,)


def parse_prompts(
    given: str | Sequence[str | int | Sequence[int]], param: str, vocab_size: int
) -> list[Prompt]:
    """The prompts of a field that holds a text, token ids, or a list of texts or of token ids.

    Raises InvalidParameter for an empty list, a mixed one, or an id outside the vocabulary.
    """
    if isinstance(given, str):
        return [Prompt(text=given)]
    if not given:
        raise InvalidParameter(param, f"{param} must not be empty")
    if set(map(type, given)) == {int}:
        return [_of_ids(given, param, vocab_size)]  # type: ignore[arg-type]
    if len(given) > MAX_PROMPTS:
        raise InvalidParameter(param, f"{param}: at most {MAX_PROMPTS} prompts, not {len(given)}")
    prompts = []
    for index, item in enumerate(given):
        if isinstance(item, int) or isinstance(item, str) != isinstance(given[0], str):
            raise InvalidParameter(
                param,
                f"{param} must be a text, a list of texts, a list of token ids or a list of lists "
                f"of token ids; {param}[{index}] does not fit",
            )
        if isinstance(item, str):
            prompts.append(Prompt(text=item))
        else:
            prompts.append(_of_ids(item, f"{param}[{index}]", vocab_size))
    return prompts


def check_texts(texts: Sequence[str], param: str) -> None:
    """Raises InvalidParameter for an empty one."""
    for index, text in enumerate(texts):
        if not text:
            raise InvalidParameter(f"{param}[{index}]", f"{param}[{index}] is empty")


def check_samples(count: int, param: str) -> None:
    """Raises InvalidParameter for more samples, of all prompts of a body, than may be asked for."""
    if count > MAX_PROMPTS:
        raise InvalidParameter(
            param, f"{param}: at most {MAX_PROMPTS} samples of all prompts together, not {count}"
        )


def _of_ids(ids: Sequence[int], param: str, vocab_size: int) -> Prompt:
    if not ids:
        raise InvalidParameter(param, f"{param} must not be empty")
    if min(ids) < 0 or max(ids) >= vocab_size:
        token = next(token for token in ids if not 0 <= token < vocab_size)
        raise InvalidParameter(
            param, f"{param}: {token} is not a token id (vocabulary of {vocab_size})"
        )
    return Prompt(ids=tuple(ids))
