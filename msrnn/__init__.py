"""Any Hugging Face decoder as an exact, bounded multi-state RNN."""

from msrnn.plan import MultiStateCache
from msrnn.policy import Policy, policy
from msrnn.rnn import MultiStateRNN
from msrnn.state import MultiState
from msrnn.trace import Trace, trace
from msrnn.version import __version__

__all__ = ["MultiState", "MultiStateCache", "MultiStateRNN", "Policy", "Trace", "__version__", "policy", "trace"]
