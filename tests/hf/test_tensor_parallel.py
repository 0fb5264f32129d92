"""A model that several processes share computes what one process computes; see in_ranks.py for what is compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

import msrnn
from msrnn.core.slots import LayerShape
from msrnn.core.state_file import load_tensors
from msrnn.errors import UsageError
from msrnn.hf.tensor_parallel import check_groups_divide, check_heads_divide, is_split, shards_of
from tests.helpers import in_ranks
from tests.helpers.in_ranks import names
from tests.helpers.shards import Others
from tests.helpers.tiny import build, llama, tokens
from tests.helpers.torchrun import BASE, NEEDS_GLOO, torchrun

pytestmark = NEEDS_GLOO
CONFIGS = {
    "llama": tf.LlamaConfig(**BASE),
    "qwen3": tf.Qwen3Config(**BASE, head_dim=16),
    "mixtral": tf.MixtralConfig(**BASE, num_local_experts=4),
    "phi3": tf.Phi3Config(**BASE),
    "gpt_oss": tf.GptOssConfig(**BASE, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
}
# One check of each kind; `all` has every policy, and every family of models.
FOR_TWO = (
    *(
        "llama: full reads*",
        "llama: echo reads*",
        *("llama: tova generates", "llama: learned weights*"),
        "llama: tova, comp*",
    ),
    *("llama: MultiStateCache", "llama: fork*", "llama: an engine*", "llama: echo is saved"),
    *("llama: a broken state", "llama: other *", "gpt_oss: tova reads*"),
    *("llama: tova recalls", "llama: *and recalls", "llama: tova is saved with*"),
)
FOR_FOUR = (
    *("llama: tova reads*", "llama: h2o reads*", "llama: an engine on the leader rank", "llama: echo is saved"),
    *("llama: h2o recalls", "llama: an engine that recalls", "llama: tova is saved with*"),
)


@pytest.mark.parametrize(
    "patterns_for",
    [
        {2: FOR_TWO},
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({2: FOR_TWO, 4: FOR_FOUR}, {2: ["*"], 4: ["*"]})),
    ],
    ids=["two", "four", "all"],
)
def test_processes_that_share_a_model_compute_what_one_computes(
    patterns_for: dict[int, Sequence[str]], tmp_path: Path
) -> None:
    for name, config in CONFIGS.items():
        build(config).save_pretrained(tmp_path / name)
    for ranks, patterns in patterns_for.items():  # four go on from what two have saved, too
        done = torchrun(ranks, Path(in_ranks.__file__), tmp_path, *patterns)
        results = tmp_path / f"{ranks}-ranks.json"
        assert results.exists(), done.stderr[-3000:]
        found: dict[str, str] = json.loads(results.read_text())
        assert [*found] == names(patterns)
        failed = {name: why for name, why in found.items() if why}
        assert not failed, f"{ranks} ranks: {', '.join(failed)}\n{next(iter(failed.values()))}"
        # The last rank was killed: the others say so, before they are killed, too, and what they have saved is whole.
        assert done.returncode != 0
        assert "another process of this job has ended or does not answer" in done.stderr
        load_tensors(tmp_path / "last.safetensors")

    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype="float32")
    for ranks in patterns_for:
        saved = tmp_path / "llama-states" / f"echo-{ranks}.safetensors"
        check_saved(msrnn.MultiStateRNN(model, "echo", 9), saved)
        saved = tmp_path / "llama-states" / f"tova-recall-{ranks}.safetensors"
        check_saved(msrnn.MultiStateRNN(model, "tova", 9, recall=4), saved, recall_every=4)


def check_saved(rnn: msrnn.MultiStateRNN, path: Path, **asking: Any) -> None:
    """One process goes on from what several have saved."""
    state, loaded = rnn.state(2), rnn.load_state(path)
    rnn.read(tokens(2, 30), state)
    rnn.read(tokens(2, 3, seed=6), state, protect=True)
    found, expected = (rnn.read(tokens(2, 12, seed=5), one, **asking) for one in (loaded, state))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "count", "refused"),
    [
        (6, 2, 2, None),
        (6, 3, 3, None),
        (6, 3, 2, "3 KV heads, which 2 processes"),
        (6, 2, 4, "6 query heads, which 4 processes"),
    ],
)
def test_processes_must_divide_the_heads(heads: int, kv_heads: int, count: int, refused: str | None) -> None:
    model = build(llama(heads, kv_heads))
    shards = Others([torch.zeros(1)] * (count - 1))
    if refused is None:
        check_heads_divide(model, model.config, shards)
    else:
        with pytest.raises(UsageError, match=refused):
            check_heads_divide(model, model.config, shards)


def test_every_process_has_all_query_heads_of_its_kv_heads() -> None:
    module, shape = nn.Module(), LayerShape(4, 2, 8, 8, torch.float32, torch.device("cpu"))
    check_groups_divide(module, shape)
    module.num_key_value_groups = 2  # type: ignore[assignment]
    check_groups_divide(module, shape)
    with pytest.raises(UsageError, match="2 query heads for each KV head, and a process has 1"):
        check_groups_divide(module, replace(shape, kv_heads=4))


def test_a_model_of_one_process() -> None:
    model = build(llama())
    assert shards_of(model) is None
    assert not is_split(model)
