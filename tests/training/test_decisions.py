from __future__ import annotations

from pathlib import Path

import torch

from msrnn.training.decisions import Decisions, join, load_decisions, save_decisions


def make(moments: int, seed: int = 0) -> Decisions:
    torch.manual_seed(seed)
    numbers = (torch.randn(moments, 2, 1, 5) for _ in range(3))
    return Decisions(torch.randn(moments, 2, 3, 5, 4).half(), *numbers)


def test_they_are_joined_and_chosen_by_moment() -> None:
    one, other = make(2), make(3, seed=1)
    (whole,) = join([[one], [other]])
    assert whole.moments == 5
    chosen = whole.at(torch.tensor([4, 0]))
    for field, first, last in zip(chosen, one, other, strict=True):
        assert torch.equal(field, torch.stack([last[2], first[0]]))


def test_a_file_has_all_stacks_and_a_damaged_one_none(tmp_path: Path) -> None:
    path, stacks = tmp_path / "decisions.safetensors", [make(2), make(4, seed=1)]
    assert load_decisions(path) is None
    save_decisions(path, stacks)
    loaded = load_decisions(path)
    assert loaded is not None
    for one, other in zip(loaded, stacks, strict=True):
        assert all(map(torch.equal, one, other))
    path.write_bytes(path.read_bytes()[:-5])
    assert load_decisions(path) is None
