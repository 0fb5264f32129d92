"""`ModelOptions`: a model and its bounded state, as values that are checked before the model is loaded.

Another process can load the same model from them. This module does not import torch before it loads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from msrnn.checks import check_count
from msrnn.core.notes import loading
from msrnn.core.torchrun import is_torchrun
from msrnn.errors import UsageError
from msrnn.hf.extension import COMPRESSED, extend_policy, largest_size
from msrnn.policy import Policy
from msrnn.recall import HOST, Recall
from msrnn.size import Size, joint_name, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from msrnn.hf.rnn import MultiStateRNN

SMALL = "SmolLM2-135M-Instruct"  # the model that is loaded without a name
DEFAULT_POLICY, DEFAULT_SIZE = "tova", "512"
ORIGINAL, AUTO = "original", "auto"  # positions; auto: original, and past the training length as `extend` has them
PROTECT = ("none", "system", "prompt")  # what a chat or a server may protect from eviction
_DEFAULT_POLICY, _DEFAULT_SIZE = Policy.parse(DEFAULT_POLICY), Size.parse(DEFAULT_SIZE)


@dataclass(frozen=True)
class ModelOptions:
    """A model, its bounded state, and where it is computed. Bad values are refused before the model is loaded."""

    model: str | None = None
    policy: Policy = _DEFAULT_POLICY
    size: Size | None = _DEFAULT_SIZE  # None: policy full
    device: str = "auto"
    dtype: str | None = None
    seed: int | None = None
    state_dtype: str | None = None
    positions: str = ORIGINAL
    backend: str = "auto"
    compile: bool = False
    recall: int = 0  # KV rows; 0: nothing is archived
    recall_every: int = 1
    recall_while_reading: int | None = None
    archive: str = HOST
    archive_bytes: int | None = None  # of a sequence; None: an archive has all tokens
    search: str = AUTO
    revision: str | None = None  # of a model on the hub; None: its main branch
    trust_remote_code: bool = False  # run the model's own code, if it has some
    lora: str | None = None  # the folder of a LoRA adapter, which is merged into the weights

    def __post_init__(self) -> None:
        resolve(self.policy, self.size)
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise UsageError(f"must be from 0 to {2**32 - 1}", name="seed", value=self.seed)
        if self.state_dtype is not None:
            from msrnn.core.quantization import STATE_DTYPES

            if self.state_dtype not in STATE_DTYPES:
                raise UsageError(f"must be {' or '.join(STATE_DTYPES)}", name="state_dtype", value=self.state_dtype)
        if self.positions != ORIGINAL:
            from msrnn.core.rope import spacing

            spacing(self.positions)
        if self.backend != "auto":
            from msrnn.backends import BACKENDS

            if self.backend not in BACKENDS:
                raise UsageError(f"must be one of {', '.join(BACKENDS)}", name="backend", value=self.backend)
        self._check_recall()

    def _check_recall(self) -> None:
        check_count("recall", self.recall, least=0, of="KV rows")
        if self.recall:
            self._make_recall()
            if self.recall_while_reading is not None:
                check_count("recall_while_reading", self.recall_while_reading, of="tokens")
            if self.size is None:
                raise UsageError(
                    "policy full evicts nothing that could be recalled",
                    name="recall",
                    value=self.recall,
                    advice="use another policy, or leave it out",
                )
            return
        unused = {
            "recall_every": 1,
            "recall_while_reading": None,
            "archive": HOST,
            "archive_bytes": None,
            "search": AUTO,
        }
        for name, default in unused.items():
            if getattr(self, name) != default:
                advice = "give recall, the number of rows to recall, or leave it out"
                raise UsageError("nothing is archived", name=name, value=getattr(self, name), advice=advice)

    def _make_recall(self) -> Recall:
        return Recall(self.recall, self.recall_every, self.archive, search=self.search, limit=self.archive_bytes)

    def load(self) -> tuple[MultiStateRNN, PreTrainedTokenizerBase]:
        """Load the model and its tokenizer, and bound its state."""
        shared = is_torchrun()
        with loading(self.model or SMALL) as remark:
            import transformers

            from msrnn.backends import resolve_backend
            from msrnn.hf.loading import device_named, load

            if self.backend != "auto":
                resolve_backend(self.backend, device_named(self.device))  # refuses one that cannot run here
            transformers.logging.set_verbosity_error()
            if self.seed is not None:
                transformers.set_seed(self.seed)
            source: Any = {
                "revision": self.revision,
                "trust_remote_code": self.trust_remote_code,
                "lora": self.lora,
            }
            model, tokenizer = load(self.model, self.device, self.dtype, on_convert=remark, shared=shared, **source)
            if shared:
                _share_seed(model)
            return self.rnn(model), tokenizer

    def rnn(self, model: PreTrainedModel) -> MultiStateRNN:
        from msrnn.hf.rnn import MultiStateRNN

        return MultiStateRNN(
            model,
            self.policy,
            self.size,
            state_dtype=self.state_dtype,
            positions=self.positions,
            backend=self.backend,
            compile=self.compile,
            recall=self._make_recall() if self.recall else 0,
            recall_while_reading=self.recall_while_reading,
        )

    def extend(self, rnn: MultiStateRNN, length: int) -> ModelOptions:
        """The options of a state that reads past the training length `length`.

        Raises a UsageError where the rule of `msrnn.hf.extension` cannot hold.
        """
        policy = extend_policy(self.policy, largest_size(rnn.spec), length)
        return replace(self, policy=policy, positions=COMPRESSED)

    @property
    def summary(self) -> str:
        """The policy and the positions, as a phrase."""
        policy = joint_name(self.policy, self.size.budget if self.size else None)
        return f"policy {policy} and positions {self.positions}"

    @property
    def flags(self) -> str:
        """The policy and the positions, as the command line takes them."""
        policy = joint_name(self.policy, self.size.budget if self.size else None)
        return f"--policy {policy} --positions {self.positions}"


def _share_seed(model: PreTrainedModel) -> None:
    """Give all processes the first one's seed, so that they sample the same tokens."""
    import torch
    import torch.distributed as dist

    seed = torch.tensor([torch.initial_seed() % 2**63], device=model.device)
    dist.broadcast(seed, 0)
    torch.manual_seed(int(seed))
