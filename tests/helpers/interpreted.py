"""Triton's interpreter, mended and quicker. Import this after `TRITON_INTERPRET` is set.

A loop bound that is known at run time only is an array of one number there, which numpy 2.4 takes for no int. And the
interpreter prepares the whole language again for every call of a function in a kernel: once for a launch is
enough. It also makes the table of dtypes again for every number.
"""

from __future__ import annotations

from functools import cache
from inspect import ismodule
from types import ModuleType
from typing import Any

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


interpreter._patch_lang_tensor = _patch_tensor_and_bounds
interpreter._patch_lang = _patch_language_once
interpreter._LangPatchScope = _LaunchScope
interpreter._get_np_dtype = _numpy_dtype_of
