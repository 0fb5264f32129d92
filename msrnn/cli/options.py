"""The options that verbs have in common, stated once, and what they choose together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from msrnn.cli.terminal import note
from msrnn.policy import FULL, ranks_alike, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from msrnn.rnn import MultiStateRNN
    from msrnn.state import MultiState

ORIGINAL = "original"
SMALL = "SmolLM2-135M-Instruct"

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
        resolve(self.policy, self.size)
        if self.state_dtype is not None:
            from msrnn.rounding import state_dtype_of

            state_dtype_of(self.state_dtype)
        if self.positions != ORIGINAL:
            from msrnn.positions import spacing

            spacing(self.positions)

    def as_saved(self, path: Path | None) -> Choice:
        """With the positions that a state was saved with, and its horizon if it ranks as many states as this does."""
        from msrnn.files import load_tensors

        if path is None:
            return self
        saved = load_tensors(path)[1]
        policy = saved.get("policy", self.policy)
        if saved.get("size") != self.size or not ranks_alike(self.policy, policy):
            policy = self.policy
        return replace(self, policy=policy, positions=saved.get("positions", ORIGINAL))

    def check_state(self, path: Path | None) -> None:
        """Whether a saved state is whole and was bounded like this."""
        from msrnn.files import load_tensors
        from msrnn.rounding import STATE_DTYPES

        if path is None:
            return
        saved = load_tensors(path)[1]
        policy, size = resolve(self.policy, self.size)
        rounded = saved.get("dtype") if saved.get("dtype") in STATE_DTYPES else None
        found = {
            "--policy": saved.get("policy"),
            "--size": saved.get("size"),
            "--state-dtype": rounded,
            "--positions": saved.get("positions"),
        }
        asked = (policy.name if policy else FULL, size, self.state_dtype, self._placed)
        if tuple(found.values()) != asked:
            mend = " ".join(f"{name} {value}" for name, value in found.items() if value)
            raise ValueError(
                f"{path}: a state of another policy, size, dtype or positions than asked for; go on with {mend}"
            )

    @property
    def _placed(self) -> str:
        """The positions by the name that states are saved under."""
        from msrnn.positions import name_of, spacing

        return name_of(spacing(self.positions))

    def load(self) -> tuple[MultiStateRNN, PreTrainedTokenizerBase]:
        import transformers

        from msrnn.models import load

        transformers.logging.set_verbosity_error()
        if self.seed is not None:
            transformers.set_seed(self.seed)
        model, tokenizer = load(self.model, self.device, self.dtype, on_convert=note)
        return self.bounded(model), tokenizer

    def bounded(self, model: PreTrainedModel) -> MultiStateRNN:
        from msrnn.rnn import MultiStateRNN

        return MultiStateRNN(model, self.policy, self.size, state_dtype=self.state_dtype, positions=self.positions)


def state_of(rnn: MultiStateRNN, path: Path | None) -> MultiState:
    """The state that was saved, or an empty one."""
    return rnn.load(path) if path else rnn.state()


@dataclass(frozen=True)
class Speech:
    """How the model speaks."""

    max_new_tokens: int
    sample: bool | None  # None: as the other two wish
    temperature: float | None
    top_p: float | None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens}: must be 1 or more")
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature}: must be above 0; for the likeliest token use --greedy")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: must be above 0 and at most 1")
        if self.sample is False and self._given:
            wishes = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self._given.items())
            raise ValueError(
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
