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
from triton.language.semantic import TritonSemantic
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
    return_what_fits()
    look_for_overflows_only_to_tell()
    remember_types_of_results()


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


def return_what_fits() -> None:
    """Most values have the type and shape that they are brought to, and are no constants of the
    language: that is seen at once. Shapes are the same object since they are remembered."""
    cast, broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value
    unwrap, equal = tl.core._unwrap_if_constexpr, tl.dtype.__eq__
    wrapped = (tl.constexpr, list, tuple, tl.tuple)

    def cast_others(self: Any, value: tl.tensor, to: tl.dtype, *rounding: Any, **named: Any) -> Any:
        return value if value.dtype is to.scalar else cast(self, value, to, *rounding, **named)

    def broadcast_others(self: Any, a: tl.tensor, b: tl.tensor) -> Any:
        return (a, b) if a.shape is b.shape else broadcast(self, a, b)

    def unwrap_others(value: Any) -> Any:
        return unwrap(value) if isinstance(value, wrapped) else value

    def equal_others(self: tl.dtype, other: Any) -> bool:
        return self is other or equal(self, other)

    TritonSemantic.cast = cast_others
    TritonSemantic.broadcast_impl_value = broadcast_others
    tl.core._unwrap_if_constexpr = unwrap_others
    tl.dtype.__eq__ = equal_others


def look_for_overflows_only_to_tell() -> None:
    """Behind each sum, difference and product the interpreter computes whether it overflowed. It
    tells of that with the option `debug` alone, which is off."""
    look = TritonSemantic.binary_op_sanitize_overflow_impl

    def look_and_tell(self: Any, *given: Any) -> None:
        if self.builder.options.debug:
            look(self, *given)

    TritonSemantic.binary_op_sanitize_overflow_impl = look_and_tell


def remember_types_of_results() -> None:
    """The type of what comes of two types."""
    find, known = TritonSemantic.computation_type_impl, dict[tuple[Any, ...], tl.dtype]()

    def find_once(
        self: Any, a: tl.dtype, a_is_number: bool, b: tl.dtype, b_is_number: bool, divides: bool
    ) -> tl.dtype:
        key = (a.name, a_is_number, b.name, b_is_number, divides)
        if key not in known:
            known[key] = find(self, a, a_is_number, b, b_is_number, divides)
        return known[key]

    TritonSemantic.computation_type_impl = find_once


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
