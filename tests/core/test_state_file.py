"""Damaged and manipulated state files: each is refused with one line, or loads as a state that works."""

from __future__ import annotations

import json
import os
import random
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as to_bytes
from tiny import FAMILIES, build, llama, tokens
from torch import Tensor

import msrnn
from msrnn.core.slots import Slots
from msrnn.core.state_file import checksum, load_description, load_tensors
from msrnn.policy import Policy

Tensors = dict[str, Tensor]
SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "head": {"policy": "h2o", "size": 6},
    "value": {"policy": Policy(0.9, recent=0.5, value_norm=True), "size": 5, "state_dtype": "int8"},
    "fp8": {"policy": "echo", "size": 5, "state_dtype": "fp8"},
    "horizon": {"policy": "tova+1~12", "size": 6, "positions": "compressed"},
    "full": {"policy": "full", "size": None},
    "sliding": {"policy": "tova", "size": 20},
}


class Saved:
    """A state of one kind: as it was saved, and the models that go on from it."""

    def __init__(self, kind: str, folder: Path) -> None:
        layers = 2 if kind in ("head", "full") else 1
        if kind == "sliding":
            config = FAMILIES["mistral-sliding"]()
            config.num_hidden_layers = 1
        else:
            config = llama(2, 2, **{**SMALL, "num_hidden_layers": layers})
        model = build(config)
        self.path, self.huge = folder / kind, True
        self.rnns = [msrnn.MultiStateRNN(model, backend=b, chunk=8, **KINDS[kind]) for b in ("numba", "torch")]
        self.state = self.rnns[0].state(2)
        self.rnns[0].read(tokens(2, 17), self.state)
        self.state.save(self.path)
        self.whole = self.path.read_bytes()
        self.tensors, self.description = load_tensors(self.path)
        self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def write(self, tensors: Tensors, description: object) -> None:
        """With the checksum that fits, as whoever forges a file would write it."""
        if isinstance(description, dict):
            description = {**description, "checksum": checksum(tensors)}
        self.path.write_bytes(to_bytes(tensors, {"msrnn": json.dumps(description)}))

    def edited(self, **edits: Callable[[Tensor], Any]) -> None:
        """`edited(position=...)`: change the first layer's tensors in place."""
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        for name, edit in edits.items():
            edit(tensors[f"0.{name}"])
        self.write(tensors, self.description)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def of(kind: str) -> Saved:
        if kind not in made:
            made[kind] = Saved(kind, tmp_path_factory.mktemp("states"))
        return made[kind]

    return of


def at(*index: int, value: float) -> Callable[[Tensor], Any]:
    return lambda tensor: tensor.__setitem__(index, value)


FORGED: dict[str, tuple[str, dict[str, Callable[[Tensor], Any]], str]] = {
    "no free slot": ("head", {"position": lambda p: p[0, 0].copy_(torch.arange(7))}, "no slot is free"),
    "beyond what was read": ("head", {"position": lambda p: p.clamp_(min=17)}, "17 is not the position of a token"),
    "below -1": ("head", {"position": lambda p: p[p < 0].numel() and p.clamp_(max=-2)}, "-2 is not the position"),
    "held twice": ("head", {"position": lambda p: p[1, 1].fill_(3)[6:].fill_(-1)}, "row 1: 3 is a position .* twice"),
    "too few": ("head", {"position": lambda p: p[0, 0, :6].fill_(-1)}, "too few for size 6"),
    "none of a window": ("horizon", {"position": lambda p: p.fill_(-1)}, "0 tokens are held"),
    "other count": ("head", {"seen": lambda s: s.add_(100)}, "117 tokens of 17 columns|100 tokens"),
    "importance": ("head", {"importance": lambda i: i.fill_(torch.nan)}, "nan is not an importance"),
    "negative importance": ("head", {"importance": lambda i: i.fill_(-1.0)}, "-1 is not an importance"),
    "infinite importance": ("head", {"importance": lambda i: i.fill_(torch.inf)}, "inf is not an importance"),
    "huge importance": ("head", {"importance": lambda i: i.fill_(1e9)}, "1e.09 is not an importance"),
    "norm": ("value", {"norm": lambda n: n.fill_(torch.nan)}, "nan is not the norm"),
    "another norm": ("value", {"norm": lambda n: n.mul_(2)}, "is not the norm"),
    "scale of 0": ("value", {"key_scale": lambda s: s.zero_()}, "0 scales the keys"),
    "negative scale": ("value", {"value_scale": lambda s: s.neg_()}, "scales the values"),
    "infinite scale": ("value", {"key_scale": lambda s: s.fill_(torch.inf)}, "inf scales the keys"),
    "keys": ("head", {"keys": lambda k: k.fill_(torch.inf)}, "keys that are not finite"),
    "values": ("full", {"values": lambda v: v.fill_(torch.nan)}, "values that are not finite"),
    "codes": ("fp8", {"keys": lambda k: k.view(torch.uint8).fill_(0x7F)}, "keys that are not finite"),
    "out of order": ("full", {"position": lambda p: p[0, 0, :2].copy_(torch.tensor([1, 0]))}, "out of order"),
    "column not read": ("full", {"position": lambda p: p[0, 0].copy_(p[0, 0].roll(1))}, "17|column that was not read"),
    "lost": ("full", {"position": lambda p: p[0, 0, 16].fill_(-1)}, "not all that were read"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_tensors_are_refused(name: str, saved: Callable[[str], Saved]) -> None:
    kind, edits, message = FORGED[name]
    one = saved(kind)
    one.edited(**edits)
    with pytest.raises(ValueError, match=message) as error:
        one.rnns[0].load_state(one.path)
    assert str(error.value).startswith(str(one.path))
    assert "\n" not in str(error.value)


DESCRIBED: dict[str, tuple[dict[str, Any], str]] = {
    "no rows": ({"batch_size": 0}, "batch_size 0"),
    "fewer than none": ({"batch_size": -1}, "batch_size -1"),
    "more than fit": ({"batch_size": 10**12}, r"keys: .*, not .*\[1000000000000, "),
    "true rows": ({"batch_size": True}, "batch_size True"),
    "no number of rows": ({"batch_size": None}, "batch_size None"),
    "rows by half": ({"batch_size": 2.0}, "batch_size 2.0"),
    "columns": ({"columns": 17}, "columns 17"),
    "true columns": ({"columns": [True, True]}, "columns .True, True."),
    "fewer columns": ({"columns": [17]}, "list of 2 whole numbers"),
    "columns that differ": ({"columns": [17, 18]}, "same number in every layer"),
    "columns below tokens": ({"columns": [16, 16]}, "17 tokens of 16 columns"),
    "endless columns": ({"columns": [10**30, 10**30]}, "same number in every layer"),
}


@pytest.mark.parametrize("kind", ["head", "full"])
@pytest.mark.parametrize("name", DESCRIBED)
def test_forged_descriptions_are_refused(name: str, kind: str, saved: Callable[[str], Saved]) -> None:
    change, message = DESCRIBED[name]
    one = saved(kind)
    one.write(one.tensors, {**one.description, **change})
    with pytest.raises(ValueError, match=message):
        one.rnns[0].load_state(one.path)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"words"', "true", "[" * 100_000, "{", "", "NaN"])
def test_descriptions_that_are_no_object(text: str, saved: Callable[[str], Saved]) -> None:
    one = saved("head")
    one.path.write_bytes(to_bytes(one.tensors, {"msrnn": text}))
    for load in (one.rnns[0].load_state, load_description):
        with pytest.raises(ValueError, match="not a state that msrnn saved") as error:
            load(one.path)
        assert "\n" not in str(error.value)


def test_tensors_that_are_missing_or_belong_to_nothing(saved: Callable[[str], Saved]) -> None:
    one = saved("head")
    one.write({**one.tensors, "9.keys": torch.zeros(1)}, one.description)
    with pytest.raises(ValueError, match=r"9\.keys belongs to no layer"):
        one.rnns[0].load_state(one.path)
    one.write({name: t for name, t in one.tensors.items() if name != "1.seen"}, one.description)
    with pytest.raises(ValueError, match=r"1\.seen is missing"):
        one.rnns[0].load_state(one.path)


@pytest.mark.parametrize("rows", [0, 1, 16, 63])
def test_growing_rows_must_agree(rows: int, saved: Callable[[str], Saved]) -> None:
    one = saved("full")
    one.write({**one.tensors, "0.keys": one.tensors["0.keys"][:, :, :rows].contiguous()}, one.description)
    with pytest.raises(ValueError, match=r"keys: .* not .* 64, 8"):
        one.rnns[0].load_state(one.path)
    cut = {name: t[:, :, :rows].contiguous() if t.ndim > 1 else t for name, t in one.tensors.items()}
    one.write(cut, one.description)
    if rows >= 17:
        assert one.rnns[0].load_state(one.path).seen.tolist() == [17, 17]
    else:
        with pytest.raises(ValueError, match="not a usable state"):
            one.rnns[0].load_state(one.path)


def test_a_flipped_bit_is_noticed(saved: Callable[[str], Saved]) -> None:
    """A key that is a little off would answer a little wrong, and nobody would know."""
    one = saved("head")
    flipped = bytearray(one.whole)
    flipped[-5] ^= 1
    one.path.write_bytes(flipped)
    with pytest.raises(ValueError, match="damaged"):
        one.rnns[0].load_state(one.path)
    bare = {name: value for name, value in one.description.items() if name != "checksum"}
    one.path.write_bytes(to_bytes(one.tensors, {"msrnn": json.dumps(bare)}))  # as states were saved before
    assert one.rnns[0].load_state(one.path).seen.tolist() == [17, 17]


def test_numbers_that_cannot_be_loaded_are_not_saved(tmp_path: Path) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(2, 2, **SMALL)), "h2o", 6, backend="torch")
    state = rnn.state(3)
    rnn.read(tokens(3, 5), state)
    state.layers[1].importance[1] = torch.nan
    with pytest.raises(ValueError, match=r"layer 1, row 1: nan is not an importance .*; save the other rows"):
        state.save(tmp_path / "state")
    assert os.listdir(tmp_path) == []
    state.select([0, 2]).save(tmp_path / "state")
    assert rnn.load_state(tmp_path / "state").batch_size == 2


@pytest.mark.parametrize("kind", ["head", "value", "fp8", "full"])
def test_what_free_slots_hold_means_nothing(kind: str, saved: Callable[[str], Saved], tmp_path: Path) -> None:
    one = saved(kind)
    plain, state = one.rnns[0].state(2), one.rnns[0].state(2)
    for each in (plain, state):
        one.rnns[0].read(tokens(2, 3), each)
    for layer in state.layers:
        bits = layer.keys.view(torch.int8) if layer.keys.itemsize == 1 else layer.keys
        bits[:, :, -1] = 0x7F if layer.keys.itemsize == 1 else torch.nan
        if kind == "value":
            layer.key_scale[:, :, -1] = layer.norm[:, :, -1] = layer.importance[:, :, -1] = torch.nan
    state.save(tmp_path / "state")
    more = tokens(2, 12, seed=4)
    loaded = one.rnns[0].load_state(tmp_path / "state")
    torch.testing.assert_close(one.rnns[0].read(more, loaded), one.rnns[0].read(more, plain), atol=1e-4, rtol=1e-4)


def test_a_horizon_that_was_lifted_can_be_saved(tmp_path: Path) -> None:
    """Such a state holds fewer tokens than its size has room for, and says so in its file."""
    model = build(llama(2, 2, **SMALL))
    near, free = (msrnn.MultiStateRNN(model, policy, 6) for policy in ("h2o+1~8", "h2o+1"))
    state = free.state()
    free.read(tokens(1, 60), state)
    begun = near.convert_state(state)
    near.step(tokens(1, 1), begun)  # a horizon that begins late drops many tokens at once
    adopted = free.convert_state(begun)
    assert min(int((layer.position >= 0).sum(-1).min()) for layer in adopted.layers) < 6
    adopted.save(tmp_path / "state")
    assert load_description(tmp_path / "state")["incomplete"] is True
    assert torch.equal(free.load_state(tmp_path / "state").positions(0), adopted.positions(0))


def test_more_tokens_than_positions_can_count(saved: Callable[[str], Saved]) -> None:
    one = saved("horizon")
    many = {**one.tensors, "0.seen": torch.full((2,), 2**31)}
    one.write(many, {**one.description, "columns": [2**31]})
    with pytest.raises(ValueError, match="tokens of 2147483648 columns"):
        one.rnns[0].load_state(one.path)


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_states_are_no_views_of_the_file(kind: str, saved: Callable[[str], Saved]) -> None:
    one = saved(kind)
    one.path.write_bytes(one.whole)
    state = one.rnns[0].load_state(one.path)
    with one.path.open("r+b") as file:  # in place, as `cp` overwrites a file
        file.write(os.urandom(len(one.whole)))
    more = tokens(2, 9, seed=4)
    assert torch.equal(one.rnns[0].read(more, state), one.rnns[0].read(more, one.state.fork(1)))


# Mutations ------------------------------------------------------------------------------------------------------------

ODD: list[Any] = [None, True, [], {}, "", "tova", -1, 0, 1, 2, 3, 10**12, 2**31, 2**63, 1.5, [1, 2], [17, 17], [[]]]
NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5, 10.0, float("nan"), float("inf"), -float("inf"), 1e-40]
HUGE = [1e30, -1e30, 3e38, 1e10]  # finite, and attention to it is not
WHOLE = [-(2**31), -2, -1, 0, 1, 5, 16, 17, 18, 2**20, 2**31 - 1]
DTYPES = ["F32", "F16", "BF16", "I32", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F4", "E8M0", "nonsense"]


def flipped(one: Saved, chance: random.Random) -> bytes:
    data = bytearray(one.whole if chance.random() < 0.5 else without_checksum(one))
    for _ in range(chance.choice([1, 1, 2, 8])):
        header = chance.random() < 0.3
        data[chance.randrange(600 if header else len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def without_checksum(one: Saved) -> bytes:
    """As states were saved before there was one."""
    description = {name: value for name, value in one.description.items() if name != "checksum"}
    return to_bytes(one.tensors, {"msrnn": json.dumps(description)})


def cut(one: Saved, chance: random.Random) -> bytes:
    end = chance.randrange(len(one.whole))
    return one.whole[:end] if chance.random() < 0.7 else one.whole + os.urandom(end % 64)


def with_header(one: Saved, chance: random.Random) -> bytes:
    data = without_checksum(one)
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = chance.choice([n for n in header if n != "__metadata__"])
    match chance.randrange(5):
        case 0:
            header[name]["dtype"] = chance.choice(DTYPES)
        case 1:
            header[name]["shape"] = chance.choice([[], [0], [10**12], [2, 2], [*header[name]["shape"], 1], [-1]])
        case 2:
            header[name]["data_offsets"][chance.randrange(2)] += chance.choice([-4, 4, 1, 10**9])
        case 3:
            header[chance.choice(["9.keys", "0.nothing", "", "a" * 500])] = header.pop(name)
        case _:
            other = chance.choice([n for n in header if n != "__metadata__"])
            header[name], header[other] = header[other], header[name]
    new = json.dumps(header).encode()
    size = len(new) if chance.random() < 0.9 else chance.choice([0, 1, 2**40, 2**63])
    return struct.pack("<Q", size) + new + data[8 + length :]


def described(one: Saved, chance: random.Random) -> bytes:
    description = {**one.description, chance.choice([*one.description]): chance.choice(ODD)}
    if chance.random() < 0.2:
        del description[chance.choice([*description])]
    text = json.dumps(description if chance.random() < 0.9 else chance.choice(ODD))
    return to_bytes(one.tensors, {"msrnn": text})


def valued(one: Saved, chance: random.Random) -> bytes:
    tensors = {name: tensor.clone() for name, tensor in one.tensors.items()}
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        tensor = tensors[chance.choice([*tensors])]
        flat = tensor.view(torch.uint8).flatten() if tensor.dtype == torch.float8_e4m3fn else tensor.flatten()
        where = torch.tensor([chance.randrange(flat.numel()) for _ in range(chance.choice([1, 2, flat.numel()]))])
        if flat.dtype.is_floating_point:
            flat[where] = chance.choice([*NUMBERS, *HUGE] if one.huge else NUMBERS)
        elif flat.dtype in (torch.int8, torch.uint8):
            flat[where] = chance.randrange(127)
        else:
            flat[where] = chance.choice(WHOLE)
    return to_bytes(tensors, {"msrnn": json.dumps({**one.description, "checksum": checksum(tensors)})})


def permuted(one: Saved, chance: random.Random) -> bytes:
    """Slots in another order, which means nothing where all of a slot moves, and something else where not."""
    tensors = {name: tensor.clone() for name, tensor in one.tensors.items()}
    rows = tensors["0.position"].shape[2]
    order = torch.tensor(chance.sample(range(rows), rows))
    names = [name for name, tensor in tensors.items() if name.startswith("0.") and tensor.ndim > 1]
    for name in names if chance.random() < 0.5 else chance.sample(names, 1):
        bits = tensors[name].view(torch.uint8) if tensors[name].itemsize == 1 else tensors[name]
        bits.copy_(bits[:, :, order])
    return to_bytes(tensors, {"msrnn": json.dumps({**one.description, "checksum": checksum(tensors)})})


def reshaped(one: Saved, chance: random.Random) -> bytes:
    tensors = dict(one.tensors)
    name = chance.choice([*tensors])
    tensor = tensors.pop(name)
    changes = [tensor[:1], tensor.flatten(), tensor[None], tensor.transpose(0, -1), tensor[..., :1], tensor.double()]
    if chance.random() < 0.8:
        tensors[name] = chance.choice(changes).contiguous().clone()
    return to_bytes(tensors, {"msrnn": json.dumps({**one.description, "checksum": checksum(tensors)})})


MUTATIONS = [flipped, cut, with_header, described, valued, valued, permuted, reshaped]
TIMES = 2100
GUARD = 64


def guarded(state: msrnn.MultiState) -> list[Tensor]:
    """Put every buffer between two guards, which show whether something was written beside it."""
    guards = []
    for layer in state.layers:
        for name, tensor in layer.tensors().items():
            room = torch.full((tensor.nbytes + 2 * GUARD,), 0x5A, dtype=torch.uint8)
            inner = room[GUARD : GUARD + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            inner.copy_(tensor)
            setattr(layer, name, inner)
            guards += [room[:GUARD], room[GUARD + tensor.nbytes :]]
    return guards


def test_mutated_files_are_refused_or_work(saved: Callable[[str], Saved]) -> None:
    chance, outcomes, refused = random.Random(0), Counter[str](), list[str]()
    kinds = [saved(kind) for kind in KINDS]
    for turn in range(TIMES):
        one, mutate = kinds[turn % len(kinds)], chance.choice(MUTATIONS)
        plain = turn // len(kinds) % 4 == 0
        rnn, one.huge = one.rnns[plain], not plain
        data = mutate(one, chance)
        one.path.unlink(missing_ok=True)  # cheaper than to overwrite it
        one.path.write_bytes(data)
        try:
            state = rnn.load_state(one.path)
        except ValueError as error:
            refused.append(str(error))
            outcomes[f"{mutate.__name__} refused"] += 1
            continue
        guards = guarded(state)
        before = int(state.seen[0])
        rnn.step(tokens(state.batch_size, 1, seed=turn), state)
        rnn.read(tokens(state.batch_size, 9, seed=turn), state)
        assert all((guard == 0x5A).all() for guard in guards), f"{mutate.__name__} wrote out of bounds"
        assert int(state.seen[0]) == before + 10
        for layer in state.layers:
            assert int((layer.position >= 0).sum(-1).max()) <= (layer.bound.size if isinstance(layer, Slots) else 99)
        outcomes[f"{mutate.__name__} works"] += 1
    folders = [str(one.path.parent) for one in kinds]
    assert [why for why in refused if "\n" in why or not why.startswith(tuple(folders))] == []
    for mutate in MUTATIONS:
        assert outcomes[f"{mutate.__name__} refused"] > 50, outcomes
    assert sum(count for name, count in outcomes.items() if name.endswith("works")) > 300, outcomes
