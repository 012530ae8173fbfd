"""Triton's interpreter without its repeated work, which takes more than half of its time.

Before each call of a function, also of one that a kernel calls, it looks through the whole language
for what it must replace by functions on arrays. What there is does not change; and within a kernel
the language is replaced already.
"""

import functools
import inspect
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

ROOMS = (tl, tl.core)
"""The modules by which a kernel names the language."""


@functools.cache
def replace_once_a_kernel() -> None:
    """From now on, in this process. Another version of Triton may work otherwise: then nothing is
    done."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    there: set[ModuleType] = set()
    replace, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore

    def replace_missing(function: FunctionType) -> Any:
        rooms = rooms_of(function)
        if rooms and rooms <= there:
            return interpreter._LangPatchScope()
        there.update(rooms)
        return replace(function)

    def restore_all(scope: Any) -> None:
        restore(scope)
        there.clear()

    interpreter._patch_lang = replace_missing
    interpreter._LangPatchScope.restore = restore_all
    interpreter._patch_builtin = replace_builtins
    remember_array_types()


def remember_array_types() -> None:
    """The interpreter makes a table of them whenever it looks one up."""
    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def array_type(of: tl.dtype) -> Any:
        number = of.scalar
        if number.name not in known:
            known[number.name] = look_up(number)
        return known[number.name]

    interpreter._get_np_dtype = array_type


@functools.cache
def rooms_of(function: FunctionType) -> frozenset[ModuleType]:
    values = function.__globals__.values()
    return frozenset(room for room in ROOMS if any(value is room for value in values))


def replace_builtins(owner: Any, builder: Any, scope: Any) -> None:
    for name in builtins_of(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(owner, name, member, builder, scope)


@functools.cache
def builtins_of(owner: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]
