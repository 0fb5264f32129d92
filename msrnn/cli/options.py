"""The options that verbs have in common, stated once, and what they choose together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from msrnn.cli.terminal import loading
from msrnn.errors import UsageError
from msrnn.policy import FULL, is_full, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from msrnn.core.state import MultiState
    from msrnn.hf.rnn import MultiStateRNN

ORIGINAL = "original"
SMALL = "SmolLM2-135M-Instruct"
DEFAULT_POLICY, DEFAULT_SIZE = "tova", 512
LEAST_TEMPERATURE = 1e-6  # below, logits divided by it overflow

Model = Annotated[str | None, Option(help="A folder, a .gguf file or a name on the hub.", show_default=SMALL)]
PolicyName = Annotated[str, Option("--policy", help="Which state leaves; see `msrnn policies`.")]
Size = Annotated[int, Option(help="States that each layer may hold; policy full has no such limit.")]
Device = Annotated[str, Option(help="cpu, cuda, or auto: cuda where there is one.")]
Dtype = Annotated[
    str | None,
    Option(help="float32, bfloat16, float16, or auto: the checkpoint's own.", show_default="float32 on cpu, else auto"),
]
Positions = Annotated[
    str,
    Option(
        help="Where kept tokens stand: original; closer, for texts beyond the model's length: compressed "
        "(or compressed:ln, compressed:sqrt, compressed:16); fitted; compact."
    ),
]
StateDtype = Annotated[str | None, Option(help="int8 or fp8: states in half the bytes, rounded.", show_default="dtype")]
Seed = Annotated[int | None, Option(help="Makes sampling repeatable.", show_default=False)]

# Where a saved state can be given, it decides what is not.
SavedPolicy = Annotated[
    str | None,
    Option("--policy", help="Which state leaves; see `msrnn policies`.", show_default="the saved state's, or tova"),
]
SavedSize = Annotated[
    int | None,
    Option(
        "--size",
        help="States that each layer may hold; policy full has no such limit.",
        show_default="the saved state's, or 512",
    ),
]
SavedDtype = Annotated[
    str | None,
    Option(
        "--dtype",
        help="float32, bfloat16, float16, or auto: the checkpoint's own.",
        show_default="the saved state's, or float32 on cpu, else auto",
    ),
]
SavedPositions = Annotated[
    str | None,
    Option(
        "--positions",
        help="Where kept tokens stand: original; closer, for texts beyond the model's length: compressed "
        "(or compressed:ln, compressed:sqrt, compressed:16); fitted; compact.",
        show_default="the saved state's, or original",
    ),
]
SavedStateDtype = Annotated[
    str | None,
    Option(
        "--state-dtype",
        help="int8 or fp8: states in half the bytes, rounded.",
        show_default="the saved state's, or dtype",
    ),
]

MaxNewTokens = Annotated[int, Option(help="Tokens to say at most.")]
Sample = Annotated[
    bool | None, Option("--sample/--greedy", help="Draw each token, or take the likeliest.", show_default="greedy")
]
Temperature = Annotated[float | None, Option(help="Sample at this temperature.", show_default=False)]
TopP = Annotated[float | None, Option(help="Sample from the likeliest tokens of this mass.", show_default=False)]

SaveTo = Annotated[Path | None, Option("--save", help="Write the state to this file at the end.", show_default=False)]
Force = Annotated[bool, Option("--force", help="Replace the file to save to, if it exists.")]


@dataclass(frozen=True)
class Choice:
    """A model, bounded how and computed where. What can be refused without loading the model is refused at once."""

    model: str | None = None
    policy: str = "tova"
    size: int = 512
    device: str = "auto"
    dtype: str | None = None
    seed: int | None = None
    state_dtype: str | None = None
    positions: str = ORIGINAL

    def __post_init__(self) -> None:
        if is_full(self.policy):
            object.__setattr__(self, "policy", FULL)
        resolve(self.policy, self.size)
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed {self.seed}: must be from 0 to {2**32 - 1}")
        if self.state_dtype is not None:
            from msrnn.core.quantization import parse_state_dtype

            parse_state_dtype(self.state_dtype)
        if self.positions != ORIGINAL:
            from msrnn.core.rope import spacing

            spacing(self.positions)

    def load(self) -> tuple[MultiStateRNN, PreTrainedTokenizerBase]:
        with loading(self.model or SMALL) as remark:
            import transformers

            from msrnn.hf.loading import load

            transformers.logging.set_verbosity_error()
            if self.seed is not None:
                transformers.set_seed(self.seed)
            model, tokenizer = load(self.model, self.device, self.dtype, on_convert=remark)
            return self.bounded(model), tokenizer

    def bounded(self, model: PreTrainedModel) -> MultiStateRNN:
        from msrnn.hf.rnn import MultiStateRNN

        return MultiStateRNN(model, self.policy, self.size, state_dtype=self.state_dtype, positions=self.positions)


def state_of(rnn: MultiStateRNN, path: Path | None) -> MultiState:
    """The state that was saved, or an empty one."""
    return rnn.load_state(path) if path else rnn.state()


@dataclass(frozen=True)
class Speech:
    """How the model speaks."""

    max_new_tokens: int
    sample: bool | None  # None: as the other two wish
    temperature: float | None
    top_p: float | None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens {self.max_new_tokens}: must be 1 or more")
        if self.temperature is not None and not math.isfinite(self.temperature):
            raise UsageError(f"--temperature {self.temperature}: must be a finite number")
        if self.temperature is not None and self.temperature < LEAST_TEMPERATURE:
            mend = f"must be at least {LEAST_TEMPERATURE}; for the likeliest token use --greedy"
            raise UsageError(f"--temperature {self.temperature}: {mend}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p}: must be above 0 and at most 1")
        if self.sample is False and self._given:
            wishes = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self._given.items())
            raise UsageError(
                f"--greedy: takes the likeliest token, and {wishes} is for sampling; leave one of them out"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """As arguments of `generate`: a temperature or a top-p is a wish to sample."""
        given = self._given
        return {"max_new_tokens": self.max_new_tokens, "do_sample": bool(self.sample or given), **given}

    @property
    def _given(self) -> dict[str, float]:
        given = {"temperature": self.temperature, "top_p": self.top_p}
        return {name: value for name, value in given.items() if value is not None}
