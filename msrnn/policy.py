"""Eviction policies: which KV row a bounded layer evicts. A policy has seven fields; a name stands for their values.

This module reads no file and does not use torch: backends, slots, evaluations and the command line all use the same
`Policy` value. The number of KV rows of a layer is a `Size` (`msrnn.size`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, Literal

from msrnn.checks import check_count, is_number, is_whole
from msrnn.errors import UsageError

RANDOM = "random"
WEIGHTS_SUFFIX = ".safetensors"
_WITH_WEIGHTS = re.compile(r"[^@=,]*@.+?" + re.escape(WEIGHTS_SUFFIX) + r"(?=$|[:@])", re.DOTALL)


@dataclass(frozen=True)
class Policy:
    """An eviction policy: of the KV rows that are not protected, the least important one is evicted.

    importance <- decay * importance + attention of the newest query; `decay=None`: importance is the position itself.
    The policy `full` protects every token (`recent=inf`), and has no size.
    """

    decay: float | None
    per: Literal["layer", "head"] = "layer"  # which heads evict the same token: all of a layer, or those of one KV head
    first: int = 0  # the first tokens of a sequence, which are never evicted (attention sinks)
    recent: int | float = 0  # the newest tokens, never evicted; below 1 a share of the size, rounded down; inf: all
    value_norm: bool = False  # whether KV rows are ranked by importance times the norm of their value vector
    horizon: int | None = None  # tokens that are not among the last `horizon` are evicted, except the `first`
    # RANDOM: random numbers alone rank KV rows. A file's name: what its networks say of a row multiplies its norm.
    weights: str | None = None

    def __post_init__(self) -> None:
        if self.decay is not None and not (is_number(self.decay) and 0 <= self.decay <= 1):
            raise UsageError("must be None or a number from 0 to 1", name="decay", value=self.decay)
        if self.per not in ("layer", "head"):
            raise UsageError("must be 'layer' or 'head'", name="per", value=self.per)
        check_count("first", self.first, 0, of="tokens")
        if is_whole(self.recent):
            if self.recent < 0:
                raise UsageError("must be 0 or more tokens", name="recent", value=self.recent)
        elif self.recent != math.inf and not (is_number(self.recent) and 0 <= self.recent < 1):
            raise UsageError(
                "must be a number of tokens, or a share of the size in [0, 1)", name="recent", value=self.recent
            )
        if not isinstance(self.value_norm, bool):
            raise UsageError("must be True or False", name="value_norm", value=self.value_norm)
        if self.horizon is not None and (not is_whole(self.horizon) or self.horizon < 2):
            raise UsageError("must be None or a whole number of tokens, 2 or more", name="horizon", value=self.horizon)
        if self.weights is not None:
            self._check_weights()
        if self.value_norm and self.decay is None:
            raise UsageError(
                "with decay=None there is no importance to multiply by the norm",
                name="value_norm",
                value=True,
                advice="give a decay from 0 to 1",
            )
        others = self.decay, self.per, self.first, self.value_norm, self.horizon, self.weights
        if not self.evicts and others != (None, "layer", 0, False, None, None):
            raise UsageError(
                "protects every token, so that no other field has an effect",
                name="recent",
                value=self.recent,
                advice="leave the others out",
            )
        # Equal policies have equal names.
        if self.decay is not None:
            object.__setattr__(self, "decay", float(self.decay))
        if isinstance(self.recent, float):
            object.__setattr__(self, "recent", float(self.recent))
        if self.recent == 0:
            object.__setattr__(self, "recent", 0)

    def _check_weights(self) -> None:
        named = isinstance(self.weights, str) and len(self.weights) > len(WEIGHTS_SUFFIX)
        if self.weights != RANDOM and not (named and str(self.weights).endswith(WEIGHTS_SUFFIX)):
            message = f"must be None, {RANDOM!r}, or the name of a {WEIGHTS_SUFFIX} file"
            raise UsageError(message, name="weights", value=self.weights)
        if self.learned and not self._can_be_read_back:
            raise UsageError(
                f"with {WEIGHTS_SUFFIX!r} inside, or a comma among fields, the name cannot be read back",
                name="weights",
                value=self.weights,
                advice="rename the file or its folder",
            )
        if self.learned and not self.value_norm:
            raise UsageError(
                "learned weights multiply the norm of the value vector",
                name="weights",
                value=self.weights,
                advice="use a policy with value_norm, as in echo@FILE",
            )
        if not self.learned and (self.decay is not None or self.value_norm):
            raise UsageError(
                "random numbers rank alone, without importance and norm",
                name="weights",
                value=self.weights,
                advice="use decay=None, value_norm=False",
            )

    @property
    def _can_be_read_back(self) -> bool:
        """Whether the name of the file is where a parser finds it."""
        file, by_fields = str(self.weights), "=" in self.without_weights.name
        return not re.search(re.escape(WEIGHTS_SUFFIX) + "[:@]", file) and not (by_fields and "," in file)

    @classmethod
    def parse(cls, name: str) -> Policy:
        """Read a policy's name. Upper and lower case mean the same.

        A name is "full" or one of `NAMES`. "NAME+I" also protects the first I tokens, and "NAME~H" evicts every other
        token that is not among the last H. "NAME@FILE.safetensors" has learned row weights; the file is not read here.
        Fields work as well: "decay=0.9,recent=0.25,value_norm=1"; fields that are not given are 0, and `per` is
        "layer".
        """
        if not isinstance(name, str):
            raise TypeError(f"policy name {name!r}: must be a string such as 'tova' or 'window+4'")
        named, follows = split_weights(name)
        if named and not follows:
            plain, _, file = named.partition("@")
            return replace(cls.parse(plain), weights=file)
        if not named and "=" in name:
            return _parse_fields(name)
        rest, tilde, horizon = name.lower().partition("~")
        base, plus, first = rest.partition("+")
        if base == _FULL and not (plus or tilde):
            return FULL
        if base in NAMES and (not plus or first.isdecimal()) and (not tilde or horizon.isdecimal()):
            return replace(NAMES[base], first=int(first or 0), horizon=int(horizon) if tilde else None)
        raise UsageError(f"unknown policy {name!r}: {_hint(follows if named else base)}")

    @property
    def evicts(self) -> bool:
        """False for `full` alone, which keeps every token."""
        return self.recent != math.inf

    @property
    def weighs(self) -> bool:
        """Whether a number is stored beside each KV row that ranks it, or multiplies its importance."""
        return self.value_norm or self.weights is not None

    @property
    def learned(self) -> bool:
        """Whether a file has row weights for this policy."""
        return self.weights is not None and self.weights != RANDOM

    @property
    def without_weights(self) -> Policy:
        """The policy without the file of row weights, if it has one."""
        return replace(self, weights=None) if self.learned else self

    def recent_at(self, size: int) -> int:
        """The number of newest tokens protected at this size."""
        if not self.evicts:
            return size
        if isinstance(self.recent, int):
            return self.recent
        numerator, denominator = _ratio(self.recent)
        return numerator * size // denominator

    @property
    def name(self) -> str:
        """The shortest name of this policy, or its fields."""
        if not self.evicts:
            return _FULL
        for name, value in NAMES.items():
            if replace(value, first=self.first, horizon=self.horizon) == self.without_weights:
                first = f"+{self.first}" if self.first else ""
                horizon = f"~{self.horizon}" if self.horizon is not None else ""
                return f"{name}{first}{horizon}" + (f"@{self.weights}" if self.learned else "")
        numbers = f"decay={self.decay},per={self.per},first={self.first},recent={self.recent}"
        value_norm = ",value_norm=1" if self.value_norm else ""
        weights = f",weights={self.weights}" if self.weights is not None else ""
        return numbers + value_norm + (f",horizon={self.horizon}" if self.horizon is not None else "") + weights

    @property
    def numbers(self) -> dict[str, Any] | None:
        """The fields, which identify results under this policy: the meaning of a name may change. `full` has none.

        A file of weights is named here; `msrnn.size.joint_numbers` has its content.
        """
        fields = asdict(self)
        if self.weights is None:
            del fields["weights"]  # as before there was such a field: stored results are found
        return fields if self.evicts else None


@cache
def _ratio(share: float) -> tuple[int, int]:
    """The decimal number as it was written: 0.29 is 29 / 100, so that 0.29 of 100 is 29, not 28."""
    return Fraction(repr(share)).as_integer_ratio()


NAMES: dict[str, Policy] = {
    "window": Policy(decay=None),
    "h2o": Policy(decay=1.0, per="head", recent=0.5),
    "h2o-layer": Policy(decay=1.0, recent=0.5),
    "tova": Policy(decay=0.0),
    "tova-head": Policy(decay=0.0, per="head"),
    "echo": Policy(decay=0.98, recent=0.4, value_norm=True),
    "random": Policy(decay=None, per="head", weights=RANDOM),
}
MEANINGS: dict[str, str] = {
    "window": "evicts the oldest token (Longformer, Beltagy et al. 2020)",
    "h2o": "evicts the least attention summed over time, per KV head (H2O, Zhang et al. 2023)",
    "h2o-layer": "evicts the least attention summed over time, one choice per layer (H2O, Zhang et al. 2023)",
    "tova": "evicts the least attention of the newest token, one choice per layer (TOVA, Oren et al. 2024)",
    "tova-head": "evicts the least attention of the newest token, per KV head (TOVA, Oren et al. 2024)",
    "echo": "evicts the least decayed sum of attention times the norm of the value vector",
    "random": "evicts a token at random, per KV head: a baseline that every other policy has to beat",
}
_FULL = "full"
FULL = Policy(decay=None, recent=math.inf)  # the unmodified model


def _hint(base: str) -> str:
    """Advice for an unknown name that begins with `base`."""
    if "@" in base:
        return f"row weights are a file whose name ends with {WEIGHTS_SUFFIX}, as in echo@weights{WEIGHTS_SUFFIX}"
    if ":" in base:
        return "a budget belongs to the size, as in policy 'echo' and size '512:upper'"
    known = [_FULL, *NAMES]
    near = difflib.get_close_matches(base, known, n=1)
    if not near:
        return f"use one of {', '.join(known)}, or NAME+I to protect the first I tokens"
    if base == _FULL:
        return "full evicts nothing, so that there is nothing to protect; write 'full'"
    return f"did you mean {near[0]!r}?" if near[0] != base else "numbers must follow '+' and '~', as in 'tova+4~4096'"


def split_weights(name: str) -> tuple[str, str]:
    """Split NAME@FILE.safetensors from what follows, a budget (":") or positions ("@"); "" and all, without a file."""
    found = _WITH_WEIGHTS.match(name)
    return (found[0], name[found.end() :]) if found else ("", name)


def same_ranking(one: Policy, other: Policy) -> bool:
    """Whether two policies differ at most in `first` and `horizon`: then one can continue from the other's state."""
    if not (one.evicts and other.evicts):
        return one == other
    return replace(one, first=0, horizon=None) == replace(other, first=0, horizon=None)


def _yes_or_no(text: str) -> bool:
    if text not in ("0", "1"):
        raise UsageError("must be 0 or 1", name="value_norm", value=text)
    return text == "1"


_FIELD_PARSERS: dict[str, Callable[[str], Any]] = {
    "decay": lambda text: None if text == "none" else float(text),
    "per": str,
    "first": int,
    "recent": lambda text: int(text) if text.isdecimal() else float(text),
    "value_norm": _yes_or_no,
    "horizon": lambda text: None if text == "none" else int(text),
    "weights": lambda text: None if text.lower() == "none" else RANDOM if text.lower() == RANDOM else text,
}


def _parse_fields(name: str) -> Policy:
    fields: dict[str, Any] = {}
    try:
        for field, _, text in (part.partition("=") for part in name.split(",")):
            field = field.lower()
            text = text if field == "weights" else text.lower()
            if field not in _FIELD_PARSERS:
                raise UsageError(f"unknown field {field!r}, use one of {', '.join(_FIELD_PARSERS)}")
            if field in fields:
                raise UsageError(f"{field} is given twice")
            fields[field] = _FIELD_PARSERS[field](text)
        return Policy(**{"decay": 0.0, **fields})
    except ValueError as error:
        raise UsageError(f"policy {name!r}: {error}; write it as decay=0.9,per=layer,first=0,recent=0.25") from error
