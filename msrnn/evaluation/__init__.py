"""Evaluations: what a bounded state costs and gains, compared with the full model.

Each evaluation is a function that returns an `EvaluationResult`: its records, its tables, and the numbers themselves.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msrnn.evaluation.api.chat_memory import chat_memory
    from msrnn.evaluation.api.efficiency import efficiency
    from msrnn.evaluation.api.extrapolation import extrapolation
    from msrnn.evaluation.api.judge import judge, judge_cost
    from msrnn.evaluation.api.layer_budget import layer_budget
    from msrnn.evaluation.api.perplexity import perplexity
    from msrnn.evaluation.api.reasoning import reasoning
    from msrnn.evaluation.api.result import EvaluationResult
    from msrnn.evaluation.api.retrieval import retrieval
    from msrnn.evaluation.api.stories import stories
    from msrnn.evaluation.api.understanding import understanding
    from msrnn.evaluation.runner import Progress
    from msrnn.evaluation.tasks.judge_models import EndpointJudge, LocalJudge

__all__ = [
    "EndpointJudge",
    "EvaluationResult",
    "LocalJudge",
    "Progress",
    "chat_memory",
    "efficiency",
    "extrapolation",
    "judge",
    "judge_cost",
    "layer_budget",
    "perplexity",
    "reasoning",
    "retrieval",
    "stories",
    "understanding",
]

# Imported on first use, as torch and transformers take seconds to import.
_LAZY_MODULES = {
    "EndpointJudge": "tasks.judge_models",
    "EvaluationResult": "api.result",
    "LocalJudge": "tasks.judge_models",
    "Progress": "runner",
    "chat_memory": "api.chat_memory",
    "efficiency": "api.efficiency",
    "extrapolation": "api.extrapolation",
    "judge": "api.judge",
    "judge_cost": "api.judge",
    "layer_budget": "api.layer_budget",
    "perplexity": "api.perplexity",
    "reasoning": "api.reasoning",
    "retrieval": "api.retrieval",
    "stories": "api.stories",
    "understanding": "api.understanding",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module 'msrnn.evaluation' has no attribute {name!r}")
    return getattr(import_module(f"msrnn.evaluation.{_LAZY_MODULES[name]}"), name)
