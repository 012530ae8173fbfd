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
    remember_shapes()


def remember_array_types() -> None:
    """The interpreter makes a table of them whenever it looks one up."""
    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def array_type(of: tl.dtype) -> Any:
        number = of.scalar
        if number.name not in known:
            known[number.name] = look_up(number)
        return known[number.name]

    interpreter._get_np_dtype = array_type


def remember_shapes() -> None:
    """Every result of every operation has its shape checked, wrapped and written out anew."""
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    of_types, of_tensors = dict[tuple[int, ...], Any](), dict[tuple[int, ...], Any]()

    def block_type(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if sizes not in of_types:
            make_type(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel, f"<{self.shape}, "
        self.element_ty = element_ty
        self.shape, self.numel, name = of_types[sizes]
        self.name = f"{name}{element_ty}>"

    def tensor(self: Any, handle: Any, type: tl.dtype) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[sizes]

    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor


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
