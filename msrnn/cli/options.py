"""The options that several verbs share, each declared once, and how a verb is registered."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer import Option

from msrnn.checks import check_count, check_number
from msrnn.core.ray_cluster import ANY
from msrnn.errors import UsageError
from msrnn.hf.model_options import AUTO, SMALL

LEAST_TEMPERATURE = 1e-6  # below, logits divided by it overflow
LEAST_TOP_P = 1e-6  # as in `SamplingParams`

_POLICY = "Eviction policy: which token a full layer evicts; `msrnn policies` lists them."
_SIZE = "Most KV rows that each layer keeps (one per token), or a mean and a budget: 512:upper; policy full keeps all."
_DTYPE = "Dtype of the weights: float32, bfloat16, float16, or auto (the checkpoint's own)."
_DTYPE_DEFAULT = "float32 on cpu, else auto"
STATE_DTYPE = "Quantize the kept keys and values to 8 bits: int8 or fp8."
POSITIONS = (
    "Position ids of the kept tokens: original; or, for texts past the training length, compressed (also "
    "compressed:ln, compressed:sqrt, compressed:16), fitted or compact"
)
EXTENDED = (
    "compressed, with the first token protected and a horizon of 4 times the size (under a budget, that of the "
    "largest layer)"
)

Model = Annotated[
    str | None, Option(help="Model: a folder, a .gguf file, or a name on the Hugging Face hub.", show_default=SMALL)
]
PolicyName = Annotated[str, Option("--policy", help=_POLICY)]
LayerSize = Annotated[int, Option("--size", help="Most KV rows that each layer keeps (one per token).")]
Size = Annotated[str, Option(help=_SIZE)]
Device = Annotated[str, Option(help="Where to compute: cpu, cuda, or auto (cuda if there is one).")]
Dtype = Annotated[str | None, Option(help=_DTYPE, show_default=_DTYPE_DEFAULT)]
Backend = Annotated[
    str,
    Option(
        help="Implementation of attention and eviction: torch, numba (cpu), triton (cuda), or auto (the fastest). "
        "Results are the same."
    ),
]
Seed = Annotated[
    int | None, Option(help="Random seed, 0 to 4294967295: makes sampling repeatable.", show_default="none")
]

# With a saved state, options that are not given are those that it was saved under.
SavedPolicy = Annotated[str | None, Option("--policy", help=_POLICY, show_default="the saved state's, or tova")]
SavedSize = Annotated[str | None, Option("--size", help=_SIZE, show_default="the saved state's, or 512")]
SavedDtype = Annotated[
    str | None, Option("--dtype", help=_DTYPE, show_default=f"the saved state's, or {_DTYPE_DEFAULT}")
]
Positions = Annotated[
    str | None,
    Option(
        help=f"{POSITIONS}; auto: the saved state's, or original, and where the text may pass the training length "
        f"{EXTENDED}.",
        show_default=AUTO,
    ),
]
SavedStateDtype = Annotated[
    str | None, Option("--state-dtype", help=STATE_DTYPE, show_default="the saved state's, or not quantized")
]

Protect = Annotated[
    str,
    Option(
        help="Tokens that are never evicted: none, system (the system message of a chat) or prompt (the prompt, until "
        "the next turn)."
    ),
]
MaxNewTokens = Annotated[int, Option("--max-new-tokens", "--max-tokens", help="Most tokens to generate.")]
Sample = Annotated[
    bool | None,
    Option(
        "--sample/--greedy",
        help="Sample each token, or take the most likely one.",
        show_default="greedy; sample with --temperature or --top-p",
    ),
]
Temperature = Annotated[
    float | None, Option(help="Sampling temperature, above 0; above 1 is more random.", show_default="the model's own")
]
TopP = Annotated[
    float | None,
    Option(
        help="Sample only from the most likely tokens, up to this total probability (0 to 1).",
        show_default="the model's own",
    ),
]

Ray = Annotated[
    str | None,
    Option(
        metavar="[ADDRESS]",
        help="Compute on a Ray cluster: the one at this address; without one, that of this machine, or a new one.",
        show_default="this process",
    ),
]
Cpus = Annotated[
    int | None, Option(help="With --ray: CPUs of each worker, which then uses no GPU.", show_default="a GPU each, or 1")
]
SaveTo = Annotated[Path | None, Option("--save", help="Write the state to this file at the end.", show_default="none")]
SavedState = Annotated[
    Path | None, Option("--state", "--load", help="Continue from this saved state.", show_default="an empty one")
]
Force = Annotated[bool, Option("--force", help="Replace the output file if it exists.")]


def as_typed(number: float) -> str:
    """A number as a user writes it: 0 and not 0.0."""
    return str(number).removesuffix(".0")


@dataclass(frozen=True)
class SamplingOptions:
    """The group of options that decides how tokens are chosen."""

    sample: Sample = None  # None: sample if a temperature or a top-p is given
    temperature: Temperature = None
    top_p: TopP = None

    def __post_init__(self) -> None:
        if self.temperature is not None:
            advice = "use --greedy for the most likely token"
            check_number("temperature", self.temperature, LEAST_TEMPERATURE, advice=advice)
        if self.top_p is not None:
            check_number("top_p", self.top_p, LEAST_TOP_P, 1)
        if self.sample is False and self._given:
            flags = " ".join(f"--{name.replace('_', '-')} {as_typed(value)}" for name, value in self._given.items())
            raise UsageError(f"--greedy: takes the most likely token, and {flags} is for sampling; leave one out")

    def settings(self, max_new_tokens: int) -> dict[str, Any]:
        """Arguments of `generate`; a temperature or a top-p turns sampling on."""
        check_count("max_new_tokens", max_new_tokens)
        given = self._given
        return {"max_new_tokens": max_new_tokens, "do_sample": bool(self.sample or given), **given}

    @property
    def _given(self) -> dict[str, float]:
        given = {"temperature": self.temperature, "top_p": self.top_p}
        return {name: value for name, value in given.items() if value is not None}


def with_cluster(words: Sequence[str]) -> list[str]:
    """The words of a command; --ray without an address means any cluster."""
    given = list(words)
    for i, word in enumerate(words):
        if word == "--ray" and (i + 1 == len(words) or words[i + 1].startswith("-")):
            given[i] = f"--ray={ANY}"
    return given


def register(app: typer.Typer, *verbs: Callable[..., None]) -> None:
    """Make functions commands of an app. The docstring is the help; what follows `Examples:` ends it.

    A parameter that is a dataclass is a group of options: each of its fields is an option of the command.
    """
    for verb in verbs:
        about, _, examples = (inspect.getdoc(verb) or "").partition("\n\nExamples:\n")
        about = "\n\n".join(" ".join(paragraph.split()) for paragraph in about.split("\n\n"))
        lines = [line.strip() for line in examples.splitlines() if line.strip()]
        app.command(help=about, epilog="\n\n".join(["Examples:", *lines]))(_without_groups(verb))


def _without_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with the fields of its option groups as parameters."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    if not groups:
        return verb

    @wraps(verb)
    def command(**values: Any) -> None:
        groups_given = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()
        }
        verb(**values, **groups_given)

    parameters = []
    for name, parameter in inspect.signature(verb).parameters.items():
        defaults = {name: parameter.default}
        if name in groups:
            defaults = {field.name: field.default for field in fields(groups[name])}
            hints |= get_type_hints(groups[name], include_extras=True)
        for option, default in defaults.items():
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(option, kind, default=default, annotation=hints[option]))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
