"""The engine of a server with positions `auto`: a second lane past the training length, or a note why there is none."""

from __future__ import annotations

import pytest

from msrnn import Engine, SamplingParams
from msrnn.engine.lanes import LongEngine
from msrnn.errors import UsageError
from msrnn.hf.model_options import ModelOptions
from msrnn.server.engines import make_engine
from msrnn.size import Size
from tests.helpers.tiny import FAMILIES, build, llama


def test_the_engine_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    options = ModelOptions(size=Size(9))
    rnn = options.rnn(build(llama(max_position_embeddings=64, eos_token_id=None)))
    engine = make_engine(rnn, 2, options)
    assert isinstance(engine, LongEngine)
    assert (engine.length, engine.long_executor.facts.fingerprint["policy"]) == (64, "tova+1~36")
    assert capsys.readouterr().err == ""
    for _ in range(2):
        engine.generate([[*range(3, 80)]], SamplingParams(max_tokens=2), progress=False)
    told = "such requests are answered with policy tova+1~36 and positions compressed"
    assert capsys.readouterr().err.count(told) == 1


@pytest.mark.parametrize(
    ("family", "length", "size", "shared", "message"),
    [
        ("llama", 0, 9, False, "gives no training length, so positions are original"),
        ("llama", 64, 70, False, "positions are original, and answers may get worse (size=70 is not below the 64"),
        ("llama", 64, 9, True, "one kind of positions; start it with policy tova+1~36 and positions compressed"),
        ("gpt2", 512, 9, False, "past the 512 tokens that this model was trained on, requests are refused ("),
    ],
)
def test_servers_that_cannot_follow_the_rule(
    family: str, length: int, size: int, shared: bool, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They say at their start what happens past the training length."""
    model = build(FAMILIES[family]())
    if family == "llama":
        model.config.max_position_embeddings = length
    options = ModelOptions(size=Size(size))
    if shared:
        with pytest.raises(UsageError, match="this model is in one process"):
            make_engine(options.rnn(model), 1, options, shared)
    else:
        assert type(make_engine(options.rnn(model), 1, options)) is Engine
    err = capsys.readouterr().err
    assert (err.count("\n"), err.count(message)) == (1, 1), err
