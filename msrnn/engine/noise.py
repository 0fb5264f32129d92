"""Random numbers that are a function of a seed and of a token's number."""

from __future__ import annotations

_MASK = 2**64 - 1


def mix(number: int) -> int:
    """A 64-bit number that looks random (the finalizer of SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def uniform(seed: int, number: int) -> float:
    """A number in [0, 1) for the token of this number."""
    return (mix(mix(seed & _MASK) ^ number) >> 40) / 2**24  # as many bits as a float32 holds
