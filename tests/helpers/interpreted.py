"""Triton's interpreter, mended: a loop bound that is known at run time only is an array of one number there, which
numpy 2.4 takes for no int. Import this after `TRITON_INTERPRET` is set.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_bounds(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_and_bounds
