"""Definition of a program: a Python function whose first parameter is a state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rootlace.language import sampling
from rootlace.language.failures import Site
from rootlace.language.state import State
from rootlace.language.variables import check_awaited

Body = Callable[[State], Any]
"""Program with bound arguments: takes the state."""

_RESERVED = frozenset({"backend", "stream"})


class Definition:
    """Program's function, its parameters (without the state) and the arguments bound to them."""

    def __init__(self, func: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        functools.update_wrapper(self, func)  # type: ignore[arg-type]  # subclasses are called
        self.func = func
        self.bind_arguments = dict(bound or {})
        self._unbound: Self | None = None
        self._is_method = False
        if isinstance(func, classmethod):
            raise TypeError(f"{self.name}: a class method is no program; a method of an object is")
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(f"{self.name}: a program has no `yield`; stream() yields its text")
        called = type(func).__call__  # of an object that is no function
        self.is_async = inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(called)
        self._signature = inspect.signature(func)
        parameters = list(self._signature.parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise TypeError(f"{self.name}: a program's first parameter (behind self) is its state")
        self._parameters = parameters[1:]
        for parameter in self._parameters:
            if parameter.name in _RESERVED:
                raise TypeError(f"{self.name}: {parameter.name!r} is run()'s own argument")

    @property
    def name(self) -> str:
        return getattr(self.func, "__qualname__", type(self.func).__qualname__)

    @functools.cached_property
    def _called(self) -> str:
        """Return how errors about arguments name the program. Of a method whose object has another
        name than `self`, they say what the method takes as its object and as its state."""
        if not inspect.ismethod(self.func):
            return f"{self.name}()"
        of = next(iter(inspect.signature(self.func.__func__).parameters))
        state = next(iter(self._signature.parameters))
        static = f" ({of!r} is its object, {state!r} its state; a @staticmethod has no object)"
        return f"{self.name}()" + (static if of != "self" else "")

    @property
    def plain_name(self) -> str:
        """Return `name` without the enclosing classes and functions."""
        return self.name.rpartition(".")[2]

    @property
    def arg_names(self) -> list[str]:
        """Return the names of the program's parameters, without the state."""
        return [parameter.name for parameter in self._parameters]

    @property
    def _greedy(self) -> bool:
        """Return whether the program has `**kwargs`, which take any name."""
        return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self._parameters)

    @property
    def required(self) -> list[str]:
        """Return the names of the parameters without a default, in order."""
        return [
            parameter.name
            for parameter in self._parameters
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]

    def bind(self, **arguments: Any) -> Self:
        """Return the program with some arguments fixed. Raises TypeError for an unknown name."""
        for name in arguments:
            if name not in self.arg_names:
                raise TypeError(f"{self.name}() has no parameter {name!r} to bind")
        program = type(self)(self.func, {**self.bind_arguments, **arguments})
        program._unbound = self._unbound or self
        return program

    def __set_name__(self, owner: type, name: str) -> None:
        # A program assigned to another class stays a function.
        self._is_method |= self.name.rpartition(".")[0] == owner.__qualname__

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        """Bind the instance as `self`, before the state, if its class defines the program."""
        if instance is None or not self._is_method:
            return self
        program = type(self)(self.func.__get__(instance))
        return program.bind(**self.bind_arguments) if self.bind_arguments else program

    def __reduce__(self) -> Any:
        """Pickle by name, as functions are, with a method's object and the bound arguments."""
        if self._unbound is not None:
            return _bind, (self._unbound, self.bind_arguments)
        if inspect.ismethod(self.func):
            return getattr, (self.func.__self__, self.func.__name__)
        return self.name

    def take(self, keyword: str, kwargs: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Return the value of `run`'s argument `keyword` (None if missing), and the other keywords.
        A program's own parameter of that name keeps its value."""
        if keyword not in kwargs or keyword in self.arg_names:
            return None, kwargs
        rest = dict(kwargs)
        return rest.pop(keyword), rest

    def split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the program's own arguments, and sampling defaults under canonical names."""
        own = set(self.arg_names)
        values: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in own or (self._greedy and name not in sampling.OPTIONS - sampling.EVERYDAY):
                values[name] = value
            else:
                options[name] = value
        return values, sampling.normalise(options, self._called, own)

    def body(self, args: Sequence[Any], values: Mapping[str, Any]) -> Body:
        """Return the program with its arguments, ready for a state. Raises TypeError if they do not
        fit."""
        merged = {**self.bind_arguments, **values}
        if not self._greedy:
            sampling.check_names(merged, self.arg_names, self._called)
        try:
            self._signature.bind(None, *args, **merged)
        except TypeError as error:
            raise TypeError(f"{self._called}: {error}") from None
        if not self.is_async:
            return lambda state: self.func(state, *args, **merged)

        async def returned(state: Any) -> Any:
            value = await self.func(state, *args, **merged)
            code = getattr(self.func, "__code__", None)
            site = code and Site(code.co_filename, code.co_firstlineno, code.co_name)
            check_awaited(value, site)
            return value

        return returned


def _bind(program: Definition, arguments: Mapping[str, Any]) -> Definition:
    return program.bind(**arguments)
