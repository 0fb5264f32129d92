"""Any Hugging Face decoder as an exact, bounded multi-state RNN."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from msrnn.errors import UsageError
from msrnn.policy import Policy
from msrnn.scored import Candidates, ScoredPolicy
from msrnn.size import Size

__version__ = "0.1.0"

if TYPE_CHECKING:
    from msrnn.core.state import MultiState
    from msrnn.engine.constraint import Constraint
    from msrnn.engine.engine import Engine
    from msrnn.engine.requests import SamplingParams
    from msrnn.hf.cache import MultiStateCache
    from msrnn.hf.rnn import MultiStateRNN
    from msrnn.hf.trace import Trace, trace
    from msrnn.server.start import serve

__all__ = [
    "Candidates",
    "Constraint",
    "Engine",
    "MultiState",
    "MultiStateCache",
    "MultiStateRNN",
    "Policy",
    "SamplingParams",
    "ScoredPolicy",
    "Size",
    "Trace",
    "UsageError",
    "__version__",
    "serve",
    "trace",
]

# Imported on first use: torch and transformers take seconds to import, and `msrnn --help` does not need them.
_LAZY_MODULES = {
    "Constraint": "engine.constraint",
    "Engine": "engine.engine",
    "MultiState": "core.state",
    "MultiStateCache": "hf.cache",
    "MultiStateRNN": "hf.rnn",
    "SamplingParams": "engine.requests",
    "Trace": "hf.trace",
    "serve": "server.start",
    "trace": "hf.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module 'msrnn' has no attribute {name!r}")
    return getattr(import_module(f"msrnn.{_LAZY_MODULES[name]}"), name)
