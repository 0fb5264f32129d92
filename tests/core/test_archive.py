"""Archives: what is appended comes back, forks share it, and the oldest rows are dropped beyond a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from msrnn.core.archive import Archive, ArchivePart
from msrnn.core.segments import ArchiveLayout
from msrnn.core.shards import Shards
from msrnn.errors import UsageError
from msrnn.recall import SEGMENT, count_dropped
from tests.helpers.shards import run_in_turns


def layout(**changes: Any) -> ArchiveLayout:
    return ArchiveLayout(
        **{
            "kv_heads": 2,
            "key_dim": 4,
            "value_dim": 3,
            "dtype": torch.float32,
            "code": None,
            "device": torch.device("cpu"),
            **changes,
        }
    )


def draw(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, 4, generator=generator), torch.randn(2, count, 3, generator=generator)


def rows_of(archive: Archive) -> tuple[Tensor, Tensor]:
    tensors = archive.tensors()
    return tensors["keys"], tensors["values"]


@pytest.mark.parametrize("place", ["memory", "folder"])
def test_what_is_appended_comes_back(place: str, tmp_path: Path) -> None:
    archive = Archive(layout(folder=tmp_path / "rows" if place == "folder" else None))
    key, value = draw(SEGMENT + 300)
    for begin, end in ((0, 1), (1, 200), (200, 300), (300, SEGMENT), (SEGMENT, SEGMENT + 300)):
        archive.append(key[:, begin:end], value[:, begin:end])
    assert (archive.begin, archive.end) == (0, SEGMENT + 300)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(rows_of(archive), (key, value), strict=True))
    at = torch.tensor([[0, SEGMENT, 5, -1], [SEGMENT + 299, 7, SEGMENT - 1, 10**6]])
    keys, values = archive.gather(at)
    for head in range(2):
        for i, position in enumerate(at[head].tolist()):
            known = 0 <= position < archive.end
            assert torch.equal(keys[head, i], key[head, position] if known else torch.zeros(4))
            assert torch.equal(values[head, i], value[head, position] if known else torch.zeros(3))
    if place == "folder":
        assert list((tmp_path / "rows").iterdir()) == []


@pytest.mark.parametrize("begin", [10, SEGMENT, SEGMENT + 10])
def test_forks_continue_on_their_own(begin: int) -> None:
    archive = Archive(layout(index_on=torch.device("cpu")))
    text, more, other = draw(begin), draw(40, 1), draw(30, 2)
    archive.append(*text)
    fork = archive.fork()
    archive.append(*more)
    fork.append(*other)
    second = fork.fork()
    fork.append(*more)
    for own, parts in ((archive, [text, more]), (fork, [text, other, more]), (second, [text, other])):
        expected = [torch.cat([part[i] for part in parts], 1) for i in range(2)]
        assert all(torch.equal(*pair) for pair in zip(rows_of(own), expected, strict=True))
    for own in (archive, fork):
        index = torch.cat([rows.dequantized(torch.float32) for _, rows in own.keys_to_search()], 1)
        torch.testing.assert_close(index, rows_of(own)[0], atol=0.03, rtol=0.01)


def test_forks_share_whole_segments() -> None:
    archive = Archive(layout())
    archive.append(*draw(2 * SEGMENT + 5))
    fork = archive.fork()
    fork.append(*draw(3, 1))
    mine, theirs = ([segment[0] for segment in own.addresses()] for own in (archive, fork))
    assert mine[:2] == theirs[:2]
    assert mine[2] != theirs[2]


def test_room_of_a_fork_is_its_own() -> None:
    archive = Archive(layout(whole=True))
    archive.append(*draw(10))
    archive.make_room(2 * SEGMENT)
    fork = archive.fork()
    assert fork.capacity == 0
    assert fork.make_room(1)
    assert {segment[0] for segment in archive.addresses()}.isdisjoint(segment[0] for segment in fork.addresses())
    assert not fork.make_room(SEGMENT - 10)


def test_the_oldest_rows_are_dropped() -> None:
    archive = Archive(layout(most_tokens=2 * SEGMENT))
    key, value = draw(3 * SEGMENT + 5)
    archive.append(key, value)
    assert archive.begin == 2 * SEGMENT
    assert archive.end == 3 * SEGMENT + 5
    assert torch.equal(rows_of(archive)[0], key[:, archive.begin :])
    assert torch.equal(archive.gather(torch.tensor([[3 * SEGMENT], [5]]))[0][0, 0], key[0, 3 * SEGMENT])


@pytest.mark.parametrize("code", [None, torch.int8, torch.float8_e4m3fn])
def test_files(code: torch.dtype | None) -> None:
    archive, loaded = Archive(layout(code=code)), Archive(layout(code=code))
    assert archive.tensors()["keys"].shape == (2, 0, 4)
    archive.append(*draw(50))
    loaded.restore([ArchivePart(archive.tensors())], 0)
    at = torch.arange(50).expand(2, -1)
    assert all(torch.equal(*pair) for pair in zip(archive.gather(at), loaded.gather(at), strict=True))
    torch.testing.assert_close(loaded.gather(at)[0], draw(50)[0], atol=0.2, rtol=0.1)
    assert loaded.nbytes == archive.nbytes > 0


@pytest.mark.parametrize(
    "damage",
    [
        {"keys": torch.zeros(2, 5, 3)},
        {"values": torch.zeros(1, 5, 3)},
        {"keys": torch.zeros(2, 5, 4, dtype=torch.float16)},
        {"keys": torch.zeros(2, 6, 4)},
    ],
)
def test_files_of_other_rows_are_refused(damage: dict[str, Tensor]) -> None:
    archive = Archive(layout())
    archive.append(*draw(5))
    with pytest.raises(UsageError, match="archived"):
        Archive(layout()).restore([ArchivePart({**archive.tensors(), **damage})], 0)


def test_scales_of_another_dtype_are_refused() -> None:
    archive = Archive(layout(code=torch.int8))
    archive.append(*draw(5))
    tensors = {**archive.tensors(), "key_scale": torch.ones(2, 5)}
    with pytest.raises(UsageError, match="archived key_scale"):
        Archive(layout(code=torch.int8)).restore([ArchivePart(tensors)], 0)


@pytest.mark.parametrize("code", [None, torch.int8, torch.float8_e4m3fn])
def test_every_number_is_checked(code: torch.dtype | None) -> None:
    archive = Archive(layout(code=code))
    archive.append(*draw(SEGMENT + 5))
    archive.check_finite()
    (_, keys, values), *_, last = archive.segments()
    damages = {"keys": keys.codes, "values": last[2].codes} if code != torch.int8 else {}
    if values.scale is not None and last[1].scale is not None:
        damages |= {"value_scale": values.scale, "key_scale": last[1].scale}
    for name, numbers in damages.items():
        for wrong in (torch.nan, torch.inf, -1.0, 0.0) if "scale" in name else (torch.nan,):
            before, numbers[1, 3] = numbers[1, 3].clone(), wrong
            reason = "above 0" if wrong <= 0 else "finite"
            with pytest.raises(UsageError, match=f"archived {name} that are not {reason}"):
                archive.check_finite()
            numbers[1, 3] = before
    archive.check_finite()


@pytest.mark.parametrize("code", [None, torch.int8])
def test_heads_of_several_processes_are_joined_and_divided(code: torch.dtype | None) -> None:
    whole = Archive(layout(kv_heads=4, code=code, most_tokens=2 * SEGMENT))
    generator = torch.Generator().manual_seed(0)
    whole.append(*(torch.randn(4, 2 * SEGMENT + 300, width, generator=generator) for width in (4, 3)))
    assert whole.begin == SEGMENT

    def divide_and_join(shards: Shards) -> tuple[Archive, Archive]:
        index = layout(code=code, most_tokens=2 * SEGMENT, index_on=torch.device("cpu"))
        own = whole.pick_heads(index, shards)
        return own, own.gather_heads(shards, torch.device("cpu"), keeps=shards.rank == 1)

    (first, empty), (second, joined) = run_in_turns(2, divide_and_join)
    assert all((one.begin, one.end) == (whole.begin, whole.end) for one in (first, second, joined))
    for name, tensor in whole.tensors().items():
        assert torch.equal(torch.cat([first.tensors()[name], second.tensors()[name]]), tensor)
        assert torch.equal(joined.tensors()[name], tensor)
    assert empty.end == empty.begin
    assert next(first.keys_to_search())[1].codes.dtype == torch.int8  # the copies that a search reads
    assert joined.layout == whole.layout


@pytest.mark.parametrize("step", [1, 700, SEGMENT, 3000])
def test_what_is_dropped_depends_on_the_length_alone(step: int) -> None:
    most = 2 * SEGMENT + 5
    archive = Archive(layout(most_tokens=most))
    archive.append(*draw(most - 3))
    for _ in range(max(8, 6 * SEGMENT // step) if step > 1 else 8):
        archive.append(*draw(step))
        assert archive.begin == count_dropped(archive.end, most)
    assert archive.begin > 0
