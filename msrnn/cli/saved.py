"""What a saved state says of how it was made: options that are not given are taken from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrnn.cli.options import DEFAULT_POLICY, DEFAULT_SIZE, ORIGINAL, Choice
from msrnn.errors import UsageError
from msrnn.policy import FULL, Policy, is_full, ranks_alike

_PLAIN = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Saved:
    """The options that a state was saved under."""

    policy: str
    size: int | None  # None: policy full
    dtype: str | None  # of the model; None: not known
    state_dtype: str | None
    positions: str

    @classmethod
    def of(cls, path: Path) -> Saved:
        from msrnn.core.quantization import STATE_DTYPES
        from msrnn.core.state_file import load_description

        found = load_description(path)
        for name, kinds in (("policy", str), ("size", int | None), ("dtype", str), ("positions", str)):
            value = found.get(name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise UsageError(f"{path}: saved with {name} {value!r:.40}; not a state that msrnn saved")
        kept = found["dtype"]
        computed = found.get("model_dtype", kept)
        return cls(
            found["policy"],
            found["size"],
            computed if computed in _PLAIN else None,
            kept if kept in STATE_DTYPES else None,
            found["positions"],
        )


def choose(
    path: Path | None,
    model: str | None,
    policy: str | None,
    size: int | None,
    device: str,
    dtype: str | None,
    seed: int | None,
    state_dtype: str | None,
    positions: str | None,
    adopt: bool = False,
) -> Choice:
    """The options that were given; of the rest, those that the state in `path` was saved under, or the defaults.

    Options that disagree with the state are refused. With `adopt`, a policy may be given without the horizon and the
    first tokens that the state was saved under.
    """
    if path is None:
        bound = DEFAULT_POLICY if policy is None else policy, DEFAULT_SIZE if size is None else size
        return Choice(model, *bound, device, dtype, seed, state_dtype, ORIGINAL if positions is None else positions)
    saved = Saved.of(path)
    if adopt and policy is not None and size in (None, saved.size) and _alike(policy, saved.policy):
        policy = None
    _agree(path, "--policy", policy, policy and _policy_name(policy), saved.policy)
    if saved.size is not None:  # policy full has no size
        _agree(path, "--size", size, size, saved.size)
    _agree(path, "--state-dtype", state_dtype, state_dtype, saved.state_dtype)
    _agree(path, "--positions", positions, positions and _positions_name(positions), saved.positions)
    if saved.dtype is not None and dtype != "auto":
        _agree(path, "--dtype", dtype, dtype, saved.dtype)
    try:
        bound = saved.policy, DEFAULT_SIZE if saved.size is None else saved.size
        return Choice(model, *bound, device, dtype or saved.dtype, seed, saved.state_dtype, saved.positions)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: its options cannot be given on the command line ({error})") from error


def _agree(path: Path, option: str, given: Any, meant: Any, saved: Any) -> None:
    if given is not None and meant != saved:
        was = f"with {option} {saved}" if saved is not None else f"without {option}"
        raise UsageError(f"{option} {given}: {path} was saved {was}; leave {option} out")


def _policy_name(name: str) -> str:
    return FULL if is_full(name) else Policy.parse(name).name


def _alike(one: str, other: str) -> bool:
    _policy_name(one)  # a name that is none is said to be none
    try:
        return ranks_alike(one, other)
    except ValueError:
        return False


def _positions_name(name: str) -> str:
    from msrnn.core.rope import name_of, spacing

    return name_of(spacing(name))
