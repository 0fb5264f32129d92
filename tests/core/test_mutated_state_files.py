"""State files with random changes: each is refused with one line, or loads as a state that works."""

from __future__ import annotations

import json
import os
import random
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

import msrnn
from msrnn.core.slots import Slots
from msrnn.core.state_file import checksum
from tests.helpers.saved_states import KINDS, Saved
from tests.helpers.tiny import tokens

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
TIMES = 900
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
        assert outcomes[f"{mutate.__name__} refused"] > 10, outcomes
    assert sum(count for name, count in outcomes.items() if name.endswith("works")) > 128, outcomes
