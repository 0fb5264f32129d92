"""Bytes of files that several states have: each file counts once, until the last of them is deleted."""

from __future__ import annotations

import random

from msrnn.core.shared_sizes import FileSizes, SharedSizes


def test_shared_segments_count_once() -> None:
    sizes = SharedSizes[str]()
    sizes.set("a", FileSizes(10, {"s1": 100, "s2": 200}))
    sizes.set("b", FileSizes(20, {"s1": 100, "s3": 400}))
    assert sizes.nbytes == 10 + 20 + 100 + 200 + 400
    assert (sizes.count_freed(["a"]), sizes.count_freed(["b"])) == (210, 420)
    assert sizes.count_freed(["a", "b"]) == sizes.nbytes
    sizes.pop("a")
    sizes.pop("a")
    assert (sizes.nbytes, sizes.count_freed(["b"]), sizes.count_freed(["a"])) == (520, 520, 0)
    sizes.set("b", FileSizes(30, {"s3": 400}))
    assert sizes.nbytes == 430
    assert FileSizes(30, {"s3": 400}).nbytes == 430


def test_any_order_of_changes_counts_as_a_fresh_sum() -> None:
    chance, sizes, known = random.Random(0), SharedSizes[int](), dict[int, FileSizes]()

    def total(states: dict[int, FileSizes]) -> int:
        segments = {name: size for one in states.values() for name, size in one.segments.items()}
        return sum(one.own for one in states.values()) + sum(segments.values())

    for _ in range(300):
        key = chance.randrange(6)
        if chance.random() < 0.3:
            sizes.pop(key)
            known.pop(key, None)
        else:
            known[key] = FileSizes(chance.randrange(9), {f"s{n}": 10 + n for n in chance.sample(range(8), 3)})
            sizes.set(key, known[key])
        assert sizes.nbytes == total(known)
        some = chance.sample(range(6), 3)
        rest = {key: one for key, one in known.items() if key not in some}
        assert sizes.count_freed(some) == total(known) - total(rest)
