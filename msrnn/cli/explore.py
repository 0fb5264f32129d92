from __future__ import annotations


def explore() -> None:
    """x

    Examples:
        msrnn explore
    """
