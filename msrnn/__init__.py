"""Any Hugging Face decoder as an exact, bounded multi-state RNN."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from msrnn.policy import Policy, policy
from msrnn.version import __version__

if TYPE_CHECKING:
    from msrnn.plan import MultiStateCache
    from msrnn.rnn import MultiStateRNN
    from msrnn.state import MultiState
    from msrnn.tracing import Trace, trace

__all__ = ["MultiState", "MultiStateCache", "MultiStateRNN", "Policy", "Trace", "__version__", "policy", "trace"]

# Loaded on first use: torch and transformers take seconds, which `msrnn --help` need not wait for.
_HOMES = {
    "MultiState": "state",
    "MultiStateCache": "plan",
    "MultiStateRNN": "rnn",
    "Trace": "tracing",
    "trace": "tracing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'msrnn' has no attribute {name!r}")
    return getattr(import_module(f"msrnn.{_HOMES[name]}"), name)
