"""Triton's interpreter, mended and quicker. Import this after `TRITON_INTERPRET` is set.

A loop bound that is known at run time only is an array of one number there, which numpy 2.4 takes for no int. And the
interpreter prepares the whole language again for every call of a function in a kernel: once for a launch is
enough. It also makes the table of dtypes again for every number, and the shape of every value. It looks whether a sum
of integers overflows, and does not say it, unless it debugs.
"""

from __future__ import annotations

from functools import cache, cached_property
from inspect import ismodule
from types import ModuleType
from typing import Any

from triton import knobs
from triton.language import core
from triton.runtime import interpreter

_patch_tensor, _patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
_numpy_dtype = cache(interpreter._get_np_dtype)
_prepared: set[ModuleType] = set()  # in this launch


def _patch_tensor_and_bounds(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


class _LaunchScope(interpreter._LangPatchScope):
    def restore(self) -> None:
        """Called at the end of a launch."""
        super().restore()
        _prepared.clear()


@cache
def _languages_of(fn: Any) -> frozenset[ModuleType]:
    languages = (interpreter.tl, interpreter.tl.core)
    return frozenset(value for value in fn.__globals__.values() if ismodule(value) and value in languages)


def _patch_language_once(fn: Any) -> Any:
    languages = _languages_of(fn)
    if languages and languages <= _prepared:
        return interpreter._LangPatchScope()
    scope = _patch_language(fn)
    _prepared.update(languages)
    return scope


def _numpy_dtype_of(dtype: Any) -> Any:
    return interpreter.np.dtype("uint64") if dtype.scalar.is_ptr() else _numpy_dtype(dtype.scalar)


_prepare_block, _prepare_value = core.block_type.__init__, core.tensor.__init__
_broadcast = interpreter.interpreter_semantic.broadcast_impl_value


@cache
def _block_of(shape: tuple[int, ...]) -> Any:
    block = object.__new__(core.block_type)
    _prepare_block(block, core.int32, list(shape))
    return block


@cache
def _value_of(shape: tuple[int, ...]) -> Any:
    value = object.__new__(core.tensor)
    _prepare_value(value, None, _block_of(shape) if shape else core.int32)
    return value


def _prepare_block_once(block: Any, element_ty: Any, shape: Any) -> None:
    known = _block_of(tuple([side.value if isinstance(side, core.constexpr) else side for side in shape]))
    block.element_ty, block.shape, block.numel = element_ty, known.shape, known.numel


def _prepare_value_once(value: Any, handle: Any, kind: Any) -> None:
    known = _value_of(tuple(kind.shape) if kind.is_block() else ())
    value.handle, value.type, value.dtype = handle, kind, kind.scalar
    value.shape, value.numel = known.shape, known.numel


def _broadcast_to_other_shapes(one: Any, other: Any) -> tuple[Any, Any]:
    return (one, other) if one.shape is other.shape else _broadcast(one, other)


if knobs.runtime.interpret:  # a GPU's kernels are compiled with the same classes
    core.block_type.__init__, core.tensor.__init__ = _prepare_block_once, _prepare_value_once
    core.block_type.name = cached_property(lambda block: f"<{block.shape}, {block.element_ty}>")
    core.block_type.name.__set_name__(core.block_type, "name")
    interpreter.interpreter_semantic.broadcast_impl_value = _broadcast_to_other_shapes
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
interpreter._patch_lang_tensor = _patch_tensor_and_bounds
interpreter._patch_lang = _patch_language_once
interpreter._LangPatchScope = _LaunchScope
interpreter._get_np_dtype = _numpy_dtype_of
