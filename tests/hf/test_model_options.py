from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from msrnn.errors import UsageError
from msrnn.hf.model_options import ModelOptions
from msrnn.policy import FULL, Policy
from msrnn.recall import Recall
from msrnn.size import Size
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.tiny import build, llama


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"state_dtype": "int3"}, "state_dtype"),
        ({"positions": "odd"}, "positions"),
        ({"backend": "cobol"}, "backend"),
        ({"recall": -1}, "recall"),
        ({"recall": 8, "policy": FULL, "size": None}, "recall"),
        ({"recall": 8, "recall_every": 0}, "recall_every"),
        ({"recall": 8, "recall_while_reading": 0}, "recall_while_reading"),
        ({"recall": 8, "archive": ""}, "archive"),
        ({"recall_every": 2}, "recall_every"),
        ({"recall_while_reading": 64}, "recall_while_reading"),
        ({"archive": "device"}, "archive"),
        ({"recall": 8, "archive_bytes": 0}, "archive_bytes"),
        ({"recall": 8, "search": "odd"}, "search"),
        ({"archive_bytes": 10**9}, "archive_bytes"),
        ({"search": "int8"}, "search"),
    ],
)
def test_bad_values_are_refused_before_a_model_is_loaded(change: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError) as refused:
        ModelOptions(model="there-is-no-such-model", **change)
    assert name in (refused.value.name or str(refused.value))


def test_good_values() -> None:
    ModelOptions(seed=0, state_dtype="int8", positions="compressed", backend="torch")
    ModelOptions(policy=FULL, size=None, seed=2**32 - 1)


def test_the_state_of_a_model() -> None:
    options = ModelOptions(policy=Policy.parse("window+4"), size=Size(9), state_dtype="int8", positions="compressed")
    rnn = options.rnn(build(llama()))
    found = rnn.spec.fingerprint
    assert (found["policy"], found["dtype"], found["positions"]) == ("window+4", "int8", "compressed:lnln")
    assert [*rnn.spec.sizes] == [9, 9]


def test_recall_reaches_the_model() -> None:
    place: Any = {"archive": "device", "archive_bytes": 10**9, "search": "int8"}
    options = ModelOptions(size=Size(9), recall=4, recall_every=2, recall_while_reading=64, **place)
    for made in (options, options.extend(options.rnn(build(llama())), 64)):
        rnn = made.rnn(build(llama()))
        assert (rnn.spec.recall, rnn.recall_while_reading) == (Recall(4, 2, "device", search="int8", limit=10**9), 64)
    assert ModelOptions(size=Size(9)).rnn(build(llama())).spec.recall is None


def test_past_the_training_length() -> None:
    options = ModelOptions(size=Size(9))
    extended = options.extend(options.rnn(build(llama())), 64)
    assert (extended.policy.name, extended.positions, extended.size) == ("tova+1~36", "compressed", Size(9))
    assert extended.flags == "--policy tova+1~36 --positions compressed"
    with pytest.raises(UsageError, match="is not below the 64"):
        ModelOptions(size=Size(70)).extend(ModelOptions(size=Size(70)).rnn(build(llama())), 64)


def test_flags_have_the_budget() -> None:
    assert ModelOptions().flags == "--policy tova --positions original"
    assert ModelOptions(policy=FULL, size=None).flags == "--policy full --positions original"


def test_a_model_is_loaded_from_a_folder(tmp_path: Path) -> None:
    character_model().save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    rnn, tokenizer = ModelOptions(model=str(tmp_path), size=Size(9), device="cpu", seed=3).load()
    assert torch.initial_seed() == 3
    assert (rnn.device.type, rnn.spec.mean_size, len(tokenizer)) == ("cpu", 9, len(character_tokenizer()))


def test_options_are_checked_without_torch() -> None:
    code = "import sys, msrnn.hf.model_options as m; m.ModelOptions(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
