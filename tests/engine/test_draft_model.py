"""A draft model in the engine: the same answers, in fewer passes, whatever it guesses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import msrnn
from msrnn.engine.draft_model import DraftModel
from msrnn.engine.guesses import FirstGuesser, TextGuesser
from msrnn.errors import UsageError
from tests.engine.test_guesses import WAYS, Widths
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.tiny import FAMILIES, build, llama

TOKENS = 24
PROMPT = [7, 30, 9, 41, 11, 52, 13, 64, 5, 76, 17]


def rnn_of(device: str, seed: int = 0, **config: Any) -> msrnn.MultiStateRNN:
    torch.manual_seed(seed)
    return msrnn.MultiStateRNN(build(llama(eos_token_id=None, **config), device), "tova", 12)


def answers(rnn: msrnn.MultiStateRNN, how: dict[str, Any], tokens: int = TOKENS, **options: Any) -> list[list[int]]:
    settings = msrnn.SamplingParams(max_tokens=tokens, **how)
    engine = msrnn.Engine(rnn, slots=2, **options)
    return [
        engine.generate([prompt], settings, progress=False)[0].answers[0].tokens for prompt in (PROMPT, PROMPT[::-1])
    ]


@pytest.mark.parametrize(
    ("way", "seed"), [*((way, 0) for way in WAYS), ("greedy", 1), ("sampled", 1)], ids=lambda given: str(given)
)
def test_answers_are_the_same(way: str, seed: int, device: str) -> None:
    """The draft is the model itself, or another one, which hardly ever guesses right."""
    how = WAYS[way]
    rnn = rnn_of(device)
    expected = answers(rnn, how)
    widths = Widths(rnn)
    assert answers(rnn, how, guesses=4, draft=rnn_of(device, seed)) == expected
    if seed == 0 and how is WAYS["greedy"]:
        passes = [width for width in widths.found if width < len(PROMPT)]
        assert len(passes) < 2 * TOKENS / 3, "most guesses of the model itself are right"


def test_beside_other_answers_nobody_guesses_and_sessions_go_on(device: str) -> None:
    rnn = rnn_of(device)
    found = []
    every: list[dict[str, Any]] = [{}, {"guesses": 4, "draft": rnn_of(device)}]
    for options in every:
        engine, said = msrnn.Engine(rnn, slots=3, **options), list[Any]()
        settings = msrnn.SamplingParams(temperature=0, max_tokens=20)
        said.append([one.answers[0].tokens for one in engine.generate([PROMPT, PROMPT[:4]], settings, progress=False)])
        for turn in range(3):
            request = engine.request(PROMPT[turn:], settings, session="chat")
            engine.add(request)
            while not engine.idle:
                engine.step()
            said.append(request.answers[0].tokens)
        found.append(said)
    assert found[0] == found[1]


def test_texts_that_the_draft_model_cannot_read(device: str) -> None:
    rnn = rnn_of(device)
    expected = answers(rnn, WAYS["greedy"])
    fewer = DraftModel(rnn_of(device, vocab_size=70), 97, 64)
    guesser = fewer.guesser(PROMPT, 4)
    assert guesser.guess(4) == [], "76 is not among its 70 tokens"
    guesser = fewer.guesser([5, 6], 4)
    assert max(guesser.guess(4)) < 70
    assert answers(rnn, WAYS["greedy"], guesses=4, draft=fewer.rnn) == expected
    short = msrnn.MultiStateRNN(build(FAMILIES["gpt2"](), device), "tova", 12)
    last = short.spec.model.last_position
    assert last is not None
    guesser = DraftModel(short, 97, 512).guesser([5] * (last - 3), 8)
    assert len(guesser.guess(3)) == 3
    for token in (6, 7, 8):
        guesser.add(token)
    assert guesser.guess(8) == [], "too few positions are left"


def test_a_long_prompt_is_read_in_parts(device: str) -> None:
    rnn, draft = rnn_of(device), rnn_of(device)
    widths = Widths(draft)
    assert answers(rnn, WAYS["greedy"], guesses=4, draft=draft, prompt_tokens=4) == answers(rnn, WAYS["greedy"])
    assert max(widths.found) <= 5
    assert len(widths.found) > 2 * TOKENS / 5, "then it guesses"


def test_a_failure_ends_guesses_and_no_answer(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rnn, draft, calls = rnn_of(device), rnn_of(device), list[int]()
    expected, read = answers(rnn, WAYS["greedy"]), draft.read

    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise torch.OutOfMemoryError("no memory is left")
        return read(*args, **kwargs)

    monkeypatch.setattr(draft, "read", fail)
    assert answers(rnn, WAYS["greedy"], guesses=4, draft=draft) == expected
    assert len(calls) == 4, "once for each answer"
    assert capsys.readouterr().err.count("the draft model failed") == 1


def test_the_text_is_asked_first() -> None:
    text = TextGuesser([1, 2, 3, 4, 1, 2, 3], most=4)

    class Draft(TextGuesser):
        learned = 0

        def guess(self, most: int) -> list[int]:
            return [9] * most

        def learn(self, guessed: int, right: int) -> None:
            self.learned += right

    draft = Draft([], most=4)
    both = FirstGuesser(text, draft)
    assert both.guess(1) == [4]
    both.learn(1, 1)
    both.add(50)
    assert both.guess(2) == [9, 9]
    both.learn(2, 1)
    assert draft.learned == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guesses": 0}, "draft: needs guesses, the most tokens guessed at once; give guesses=8"),
        ({"draft": "a model"}, "draft: is of type str, and must be a MultiStateRNN"),
        ({"draft": {"recall": 4}}, "draft: recalls rows"),
        (
            {"draft": {"vocab_size": 5000}},
            "draft: has 5,000 tokens, and the model 97; use a model with the same tokenizer",
        ),
    ],
    ids=lambda given: str(given)[:20],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    config = options.pop("draft", {})
    if isinstance(config, dict):
        recall = config.pop("recall", 0)
        model = build(llama(eos_token_id=None, **config), "cpu")
        config = msrnn.MultiStateRNN(model, "tova", 12, recall=recall)
    with pytest.raises(UsageError, match=re.escape(message)):
        msrnn.Engine(rnn_of("cpu"), slots=1, **{"guesses": 4, "draft": config, **options})


def test_a_warm_up_reads_and_steps() -> None:
    told = list[str]()
    draft = rnn_of("cpu")
    widths = Widths(draft)
    msrnn.Engine(FakeExecutor(), guesses=3, draft=draft).warm_up(told.append)
    assert told[-1] == "draft model"
    assert {*widths.found} == {1}
