"""The options of verbs that can continue from a saved state, and those that a state was saved under."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrnn.cli.options import (
    Backend,
    Device,
    Model,
    Positions,
    SavedDtype,
    SavedPolicy,
    SavedSize,
    SavedStateDtype,
    Seed,
)
from msrnn.cli.recall_options import Archive, ArchiveBytes, RecallEvery, RecallWhileReading, SavedRecall, Search
from msrnn.errors import FileError, UsageError
from msrnn.hf.model_options import AUTO, DEFAULT_POLICY, DEFAULT_SIZE, ORIGINAL, ModelOptions
from msrnn.policy import Policy, same_ranking
from msrnn.recall import HOST
from msrnn.size import Size, joint_name, parse_policy, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from msrnn.core.state import MultiState
    from msrnn.hf.rnn import MultiStateRNN

_DEFAULT_POLICY, _DEFAULT_SIZE = Policy.parse(DEFAULT_POLICY), Size.parse(DEFAULT_SIZE)
_MODEL_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class GivenOptions:
    """The group of options of a verb that can continue from a saved state; None: not given."""

    model: Model = None
    policy: SavedPolicy = None
    size: SavedSize = None
    positions: Positions = AUTO
    state_dtype: SavedStateDtype = None
    recall: SavedRecall = None
    recall_every: RecallEvery = 1
    recall_while_reading: RecallWhileReading = None
    archive: Archive = HOST
    archive_bytes: ArchiveBytes = None
    search: Search = AUTO
    dtype: SavedDtype = None
    device: Device = "auto"
    backend: Backend = "auto"
    seed: Seed = None

    @property
    def auto(self) -> bool:
        """Whether positions and horizon may change past the training length."""
        return self.positions == AUTO

    def complete(self, state: Path | None) -> ModelOptions:
        """Fill in what was not given: from the state file, or with the defaults. Refuse what contradicts the file.

        With positions `auto`, the policy may be given without the horizon and the protected first tokens that a text
        past the training length was saved under.
        """
        if self.auto:
            return replace(self, positions=None)._complete(state, extendable=True)
        return self._complete(state, extendable=False)

    def _complete(self, state: Path | None, extendable: bool) -> ModelOptions:
        if state is None:
            own = self._own_options(self.recall or 0)
            size = _DEFAULT_SIZE if self.size is None else Size.parse(self.size)
            policy, bound = resolve(_DEFAULT_POLICY if self.policy is None else self.policy, size)
            positions = ORIGINAL if self.positions is None else self.positions
            return replace(own, policy=policy, size=bound, state_dtype=self.state_dtype, positions=positions)
        saved = SavedOptions.load(state)
        given = self
        same_size = self.size is None or Size.parse(self.size) == saved.size
        if extendable and self.policy is not None and same_size and _can_continue(self.policy, saved.policy):
            given = replace(self, policy=None)
        given._check_agrees(state, saved)
        own, policy = self._own_options(saved.recall or 0), self._find_weights(state, saved)
        try:
            return replace(
                own,
                policy=policy,
                size=saved.size,
                dtype=self.dtype or saved.dtype,
                state_dtype=saved.state_dtype,
                positions=saved.positions,
            )
        except (UsageError, TypeError) as error:
            raise UsageError(f"{state}: its options cannot be given on the command line ({error})") from error

    def _own_options(self, recall: int) -> ModelOptions:
        """The options that a saved state leaves open."""
        return ModelOptions(
            self.model,
            device=self.device,
            dtype=self.dtype,
            seed=self.seed,
            backend=self.backend,
            recall=recall,
            recall_every=self.recall_every,
            recall_while_reading=self.recall_while_reading,
            archive=self.archive,
            archive_bytes=self.archive_bytes,
            search=self.search,
        )

    def _find_weights(self, state: Path, saved: SavedOptions) -> Policy:
        """The saved policy, with the file of row weights that is given: a state does not know its name."""
        given = parse_policy(self.policy)[0] if self.policy else saved.policy
        if saved.row_weights is not None and not given.learned:
            digest, example = f"{saved.row_weights:.12}", f"--policy {saved.policy.name}@FILE.safetensors"
            raise UsageError(
                f"{state}: was saved with learned row weights, whose file has the SHA-256 digest {digest}…; "
                f"name that file, as in {example}"
            )
        if saved.row_weights is None and given.learned:
            raise UsageError(f"--policy {self.policy}: {state} was saved without row weights; leave @FILE out")
        return replace(saved.policy, weights=given.weights) if given.learned else saved.policy

    def _check_agrees(self, state: Path, saved: SavedOptions) -> None:
        value, budget = parse_policy(self.policy) if self.policy else (saved.policy, None)
        policy = joint_name(value.without_weights, budget)
        _check_agrees(state, "--policy", self.policy, policy, saved.policy.name)
        if saved.size is not None:  # policy full has no size
            size = None if self.size is None else Size.parse(self.size).name
            _check_agrees(state, "--size", self.size, size, saved.size.name)
        _check_agrees(state, "--state-dtype", self.state_dtype, self.state_dtype, saved.state_dtype)
        _check_agrees(state, "--recall", self.recall, self.recall or None, saved.recall)
        positions = self.positions and _positions_name(self.positions)
        _check_agrees(state, "--positions", self.positions, positions, saved.positions)
        if saved.dtype is not None and self.dtype != "auto":
            _check_agrees(state, "--dtype", self.dtype, self.dtype, saved.dtype)


@dataclass(frozen=True)
class SavedOptions:
    """The options that a state was saved under."""

    policy: Policy
    size: Size | None  # None: policy full
    dtype: str | None  # of the model; None: not known
    state_dtype: str | None
    positions: str
    recall: int | None  # KV rows; None: nothing was archived
    row_weights: str | None  # the digest of their file; None: there was none

    @classmethod
    def load(cls, path: Path) -> SavedOptions:
        from msrnn.core.fingerprint import WEIGHTS
        from msrnn.core.quantization import STATE_DTYPES
        from msrnn.core.state_file import load_description

        description = load_description(path)
        for name, kinds in (("policy", str), ("size", int | list | None), ("dtype", str), ("positions", str)):
            value = description.get(name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise FileError(
                    f"not a state that msrnn saved, its {name} is {value!r:.40}", path, advice="use another"
                )
        try:
            policy, size = resolve(description["policy"], description["size"])
        except (UsageError, TypeError) as error:
            raise FileError(f"its options cannot be given on the command line ({error})", path) from error
        recall = description.get("recall")
        if recall is not None and not (isinstance(recall, str) and re.fullmatch("[1-9][0-9]{0,8}", recall)):
            raise FileError(f"its options cannot be given on the command line (recall {recall!r:.40})", path)
        weights = description.get(WEIGHTS)
        if weights is not None and not isinstance(weights, str):
            raise FileError(f"its options cannot be given on the command line ({WEIGHTS} {weights!r:.40})", path)
        stored = description["dtype"]
        computed = description.get("model_dtype", stored)
        return cls(
            policy,
            size,
            computed if computed in _MODEL_DTYPES else None,
            stored if stored in STATE_DTYPES else None,
            description["positions"],
            None if recall is None else int(recall),
            weights,
        )


def _check_agrees(path: Path, option: str, given: Any, value: Any, saved: Any) -> None:
    """Refuse an option (`given`, with the canonical name `value`) that contradicts the saved state."""
    if given is not None and value != saved:
        was = f"with {option} {saved}" if saved is not None else f"without {option}"
        raise UsageError(f"{option} {given}: {path} was saved {was}; leave {option} out")


def _can_continue(policy: str, saved: Policy) -> bool:
    """Whether a policy can continue from a state that was saved under another."""
    value, budget = parse_policy(policy)
    return budget is None and same_ranking(value.without_weights, saved)


def _positions_name(name: str) -> str:
    from msrnn.core.rope import name_of, spacing

    return name_of(spacing(name))


def load_or_empty(rnn: MultiStateRNN, path: Path | None) -> MultiState:
    """The saved state, or an empty one."""
    return rnn.load_state(path) if path else rnn.state()


def check_chat_template(tokenizer: PreTrainedTokenizerBase, instead: str) -> None:
    """Refuse a model that cannot chat, and say what to do on the command line instead."""
    from msrnn.hf.chat_template import check_template

    try:
        check_template(tokenizer)
    except UsageError as error:
        raise UsageError(f"{error}, or {instead}") from error
