"""LoRA adapters in PEFT's format, which are merged into the weights of a model after it is loaded."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from msrnn.errors import UsageError

_NAME = "lora"  # of the adapter, while it is merged
_CONFIG = "adapter_config.json"


def check_adapter(folder: Path) -> None:
    """Refuse what cannot be merged, before a model is loaded."""
    if find_spec("peft") is None:
        raise UsageError("needs the package peft", name="lora", value=str(folder), advice="pip install 'msrnn[lora]'")
    kind = _read_kind(folder)
    if kind != "LORA":
        reason = f"an adapter of kind {kind}; only LoRA is merged into weights"
        raise UsageError(reason, name="lora", value=str(folder), advice="give a folder of a LoRA adapter")


def merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Add an adapter to the weights of the model, which stays what it is: nothing is left of PEFT."""
    from peft import PeftConfig, PeftModel

    try:
        config = PeftConfig.from_pretrained(str(folder))
        config.inference_mode = True
        adapted: Any = PeftModel(model, config, _NAME)
        _refuse_tied(model, adapted, folder)
        found = adapted.load_adapter(str(folder), _NAME)
        if found.missing_keys or found.unexpected_keys:
            tensor = [*found.missing_keys, *found.unexpected_keys][0]
            raise ValueError(f"its tensors are not those of its configuration, {tensor} for one")
        merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except UsageError:
        raise
    except Exception as error:  # PEFT's and torch's errors have no common kind
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"does not fit this model ({' '.join(line.strip() for line in lines[:2])})"
        raise UsageError(reason, name="lora", value=str(folder), advice="give an adapter made for it") from error
    return merged


def _read_kind(folder: Path) -> str:
    try:
        config = json.loads((folder / _CONFIG).read_text())
        return str(config["peft_type"])
    except OSError as error:
        reason = f"no such folder, or one without {_CONFIG}"
        raise UsageError(reason, name="lora", value=str(folder), advice="give the folder of an adapter") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{_CONFIG} is damaged", name="lora", value=str(folder), advice="save it again") from error


def _refuse_tied(model: PreTrainedModel, adapted: Any, folder: Path) -> None:
    """One weight that is embedding and output: what an adapter adds to one of them would change the other."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is None or outputs.weight is not inputs.weight:
        return
    for name in adapted.base_model.targeted_module_names:
        layer = model.get_submodule(name)
        if getattr(layer, "weight", None) is inputs.weight:
            reason = f"changes {name}, which shares its weight with another layer of this model"
            raise UsageError(reason, name="lora", value=str(folder), advice="train one without it")
