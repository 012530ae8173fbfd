"""Signatures that list what a function takes as `**options`: for `help`, shells and notebooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """A keyword-only parameter."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def with_keywords(options: Iterable[inspect.Parameter]) -> Callable[[F], F]:
    """A decorator: the signature lists `options`, as keywords, before `**options`.

    Options that the function names itself stay as they are. Calls are not affected: `**options`
    stays, since it also takes sglang's names.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        others = [each for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]
        taken = {each.name for each in own}
        listed = [
            each.replace(kind=each.KEYWORD_ONLY)
            for each in options
            if each.name not in taken and each.kind is not each.VAR_KEYWORD
        ]
        shown = signature.replace(parameters=[*own, *listed, *others])
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return decorate
