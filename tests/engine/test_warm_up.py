from __future__ import annotations

from typing import Any

import pytest

import msrnn
from msrnn.engine.local_executor import LocalExecutor
from msrnn.hf.captured_graph import Graph
from tests.helpers.tiny import build, llama, tokens

LENGTHS = (5, 16, 20, 20, 21, 21, 33, 64, 100, 200, 256, 300)


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True], ids=["as it is", "compiled"])
def test_requests_after_a_warm_up_wait_for_no_capture(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    model = build(llama(eos_token_id=None), "cuda")
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in LENGTHS]
    plain = msrnn.MultiStateRNN(model, "tova", 9, backend="torch")
    params = msrnn.SamplingParams(temperature=0, max_tokens=6)
    expected = [
        request.answers[0].tokens for request in msrnn.Engine(plain, 4).generate(prompts, params, progress=False)
    ]
    captured: list[Any] = []

    def capture(*args: Any) -> Graph:
        captured.append(args)
        return Graph(*args)

    monkeypatch.setattr("msrnn.hf.cuda_graphs.Graph", capture)
    rnn = msrnn.MultiStateRNN(model, "tova", 9, compile=compiles)
    engine = msrnn.Engine(LocalExecutor(rnn, 4, together=2), prompt_tokens=256)
    engine.warm_up()
    count = len(captured)
    assert count > len(engine.executor.plan_warm_up(256)) // 2
    requests = engine.generate(prompts, params, progress=False)
    assert [request.answers[0].tokens for request in requests] == expected
    assert len(captured) == count
