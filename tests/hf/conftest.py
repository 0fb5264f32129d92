from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel


@pytest.fixture
def passes() -> Iterator[list[torch.nn.Module]]:
    """The models that computed something, one entry per forward pass."""
    models: list[torch.nn.Module] = []

    def note(module: torch.nn.Module, *_: Any) -> None:
        if isinstance(module, PreTrainedModel):
            models.append(module)

    hook = register_module_forward_pre_hook(note)
    yield models
    hook.remove()
