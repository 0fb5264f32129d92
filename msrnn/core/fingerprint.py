"""Fingerprints: the model, policy, size, dtype and positions that a state is of, as fields of its description."""

from __future__ import annotations

from typing import Any

LATER = ("rotary", "windows")  # fields that older files do not have: states without them fit
ARCHITECTURE = "architecture"  # a field that names a model in messages, and decides nothing
RECALL = "recall"  # a field of states with an archive alone
ARCHIVED_KEYS, UNROTATED = "archived_keys", "unrotated"  # a field of those whose positions are not original
WEIGHTS = "row_weights"  # a field of states with learned row weights alone: the digest of their file
_NAMED = {"model": "weights", "rotary": "RoPE parameters"}  # fields that hold a digest, which says nothing to a reader


def find_difference(actual: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """What makes a state of one fingerprint unusable under another; None: nothing."""
    theirs, mine = actual.get(ARCHITECTURE), expected.get(ARCHITECTURE, "the model")
    for name, value in {**expected, **{name: expected.get(name) for name in (RECALL, WEIGHTS)}}.items():
        if name != ARCHITECTURE and actual.get(name, value if name in LATER else None) != value:
            difference = f"{name} {actual.get(name)!r}, and this model has {name} {value!r}"
            if name in _NAMED and theirs not in (None, mine):
                difference = f"the {_NAMED[name]} of {theirs}, and this model is {mine}"
            elif name in _NAMED:
                difference = f"other {_NAMED[name]} than those of this model, {mine}"
            return f"with {difference}: use the model and options that it was made with"
    return None
