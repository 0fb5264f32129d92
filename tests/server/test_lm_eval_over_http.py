"""lm-evaluation-harness over HTTP (`--model local-completions`) gives the log-likelihoods of our own integration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.live_server import running
from tests.helpers.tiny import build, llama

pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'msrnn[lm-eval]'")
pytest.importorskip("tenacity", reason="the harness has no API models: pip install 'msrnn[lm-eval]'")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

import msrnn
from msrnn.hf.loading import Loaded
from msrnn.integrations.lm_eval import BoundedLM
from msrnn.server.limits import Limits

CONTEXT = "The quick brown fox jumps over the lazy dog, and then it"
PAIRS = [
    (CONTEXT, " sleeps"),
    (CONTEXT, " runs away into the deep dark wood"),
    (CONTEXT * 6, " sleeps"),  # longer than the state
    ("Once", " upon a time, 🌊 there was"),
    ("Two and two", " are"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small: Loaded) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    small.tokenizer.save_pretrained(path)
    build(llama(vocab_size=len(small.tokenizer), max_position_embeddings=2048), "cpu").save_pretrained(path)
    return str(path)


def asked(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=0) for pair in arguments]


@pytest.mark.parametrize("settings", [{"batch_size": 1}, {"batch_size": 3}, {"tokenized_requests": False}], ids=str)
def test_log_likelihoods(folder: str, settings: dict[str, Any]) -> None:
    ours = BoundedLM(folder, "tova", 16, device="cpu")
    tokenizer: Any = ours.tokenizer
    with running(msrnn.Engine(ours.rnn, slots=4, tokenizer=tokenizer), Limits()) as address:
        options = {"tokenizer": folder, "tokenizer_backend": "huggingface", "max_retries": 1, **settings}
        theirs = LocalCompletionsAPI(base_url=f"{address}/v1/completions", model="tiny", **options)
        pairs = [*PAIRS]
        for context in ("The sea was calm", "Two and two"):  # greedy ones too
            ids = torch.tensor([tokenizer(context)["input_ids"]])
            out = ours.rnn.generate(ids, max_new_tokens=1, do_sample=False)
            said = tokenizer.decode(out[0, ids.shape[1] :])
            if tokenizer(context + said)["input_ids"] == out[0].tolist():
                pairs.append((context, said))
        expected = ours.loglikelihood(asked("loglikelihood", *pairs))
        found = theirs.loglikelihood(asked("loglikelihood", *pairs))
    torch.testing.assert_close(
        torch.tensor([score for score, _ in found]),
        torch.tensor([score for score, _ in expected]),
        atol=1e-4,
        rtol=1e-5,
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {True, False}
