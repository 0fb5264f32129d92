"""The attention backends that vLLM knows by name, each of which the option turns into msrnn's.

vLLM loads plug-ins before it has a configuration, and chooses a backend by the device. So each of its names leads to a
subclass of its own class, `choice.FLASH_ATTN` and so on. These are made when they are asked for, since some of vLLM's
cannot be imported everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from msrnn.integrations.vllm.backend import BoundedBackend, Chosen

SWITCHED = (
    "get_impl_cls",
    "get_builder_cls",
    "customize_spec",
    "get_kv_cache_shape",
    "get_kv_cache_stride_order",
    "get_required_kv_cache_layout",
    "get_supported_kernel_block_sizes",
    "supports_alibi_sqrt",
    "validate_configuration",
)


def list_names() -> Iterator[str]:
    """The backends that vLLM has itself."""
    return (name for name, member in AttentionBackendEnum.__members__.items() if member.value)


def make_choice(name: str) -> Any:
    """A subclass of vLLM's backend. It answers as that does, or as msrnn's where the option is there."""
    own: type = resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    methods = {method: _switch(method, own) for method in SWITCHED if hasattr(own, method)}
    return type(name, (own,), {"__module__": __name__, "__doc__": own.__doc__, **methods})


def _switch(method: str, own: Any) -> Any:
    def answer(_: type, *args: Any, **others: Any) -> Any:
        return getattr(BoundedBackend if Chosen.find() else own, method)(*args, **others)

    return classmethod(answer)


def __getattr__(name: str) -> Any:
    if name not in list_names():
        raise AttributeError(f"module {__name__} has no {name}")
    globals()[name] = make_choice(name)  # one class per name: vLLM compares them
    return globals()[name]
