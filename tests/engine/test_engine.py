"""The engine: answers are those of `generate`, whoever else is in the batch."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import msrnn
from msrnn.engine.requests import Event, Request
from msrnn.engine.scheduler import Counts
from msrnn.errors import UsageError
from tests.helpers.tiny import FAMILIES, build, llama

pytestmark = pytest.mark.usefixtures("overlaps")

GREEDY = msrnn.SamplingParams(temperature=0, max_tokens=12)


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 97) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def generated(rnn: msrnn.MultiStateRNN, prompt: list[int], tokens: int = 12) -> list[int]:
    """What `generate` answers, without the stop token."""
    ids = rnn.generate(torch.tensor([prompt], device=rnn.device), max_new_tokens=tokens, do_sample=False)
    answer: list[int] = ids[0, len(prompt) :].tolist()
    return answer[: answer.index(2)] if 2 in answer else answer


def tokens(requests: list[Request]) -> list[list[int]]:
    return [answer.tokens for request in requests for answer in request.answers]


@pytest.fixture
def rnn(device: str) -> msrnn.MultiStateRNN:
    return msrnn.MultiStateRNN(build(llama(), device), "tova", 9)


@pytest.mark.parametrize(
    ("policy", "kept"), [("tova", 0), pytest.param("tova", 2**24, marks=pytest.mark.slow), ("echo", 2**24)]
)
def test_requests_that_arrive_at_random(policy: str, kept: int, device: str) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), device), policy, 9)
    engine = msrnn.Engine(rnn, slots=5, prompt_tokens=16, prefix_bytes=kept, prefix_host_bytes=0)
    draw, waiting = random.Random(1), [engine.request(prompt, GREEDY) for prompt in prompts(20)]
    everything = [*waiting]
    while waiting or not engine.idle:
        for _ in range(min(len(waiting), draw.randint(0, 3))):
            engine.add(waiting.pop())
        engine.step()
    assert [request.answers[0].tokens for request in everything] == [generated(rnn, p) for p in prompts(20)]
    assert {request.answers[0].finish_reason for request in everything} <= {"stop", "length"}
    assert engine.counts == Counts(waiting=0, prefill=0, running=0)


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_families(family: str) -> None:
    rnn = msrnn.MultiStateRNN(build(FAMILIES[family](), "cpu"), "tova", 9)
    found = msrnn.Engine(rnn, slots=4, prompt_tokens=7).generate(prompts(9), GREEDY)
    assert tokens(found) == [generated(rnn, prompt) for prompt in prompts(9)]


@pytest.mark.parametrize(("size", "dtype"), [(9, "int8"), ([6, 14], None)])
def test_states_of_8_bits_and_layers_of_different_sizes(size: int | list[int], dtype: str | None) -> None:
    rnn = msrnn.MultiStateRNN(build(llama(), "cpu"), "tova", size, state_dtype=dtype)
    found = msrnn.Engine(rnn, slots=4, prompt_tokens=10**6, prefix_bytes=0).generate(prompts(9), GREEDY)
    assert tokens(found) == [generated(rnn, prompt) for prompt in prompts(9)]


def test_an_answer_does_not_depend_on_others(rnn: msrnn.MultiStateRNN) -> None:
    many = [
        msrnn.SamplingParams(temperature=0.7 + 0.1 * i, seed=i, max_tokens=8, top_k=i % 3 * 5, top_p=1 - 0.1 * (i % 2))
        for i in range(12)
    ]
    together = tokens(msrnn.Engine(rnn, slots=6).generate(prompts(12), many))
    alone = [tokens(msrnn.Engine(rnn, slots=1).generate([p], s))[0] for p, s in zip(prompts(12), many, strict=True)]
    assert together == alone
    assert len({tuple(answer) for answer in together}) > 6


def test_a_seed_decides_the_answer(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=4)
    with_seed = msrnn.SamplingParams(temperature=2.0, seed=7, max_tokens=10, ignore_eos=True)
    without = msrnn.SamplingParams(temperature=2.0, max_tokens=10, ignore_eos=True)
    same, again = engine.generate([[5, 6, 7]] * 2, with_seed)
    one, other = engine.generate([[5, 6, 7]] * 2, without)
    assert same.answers[0].tokens == again.answers[0].tokens
    assert one.answers[0].tokens != other.answers[0].tokens


def test_several_answers(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=4)
    params = msrnn.SamplingParams(temperature=2.0, seed=3, n=3, max_tokens=10, ignore_eos=True)
    (request,) = engine.generate([[9, 8, 7, 6]], params)
    assert len({tuple(answer.tokens) for answer in request.answers}) == 3
    (first,) = engine.generate([[9, 8, 7, 6]], msrnn.SamplingParams(**{**vars(params), "n": 1}))
    assert first.answers[0].tokens == request.answers[0].tokens
    with pytest.raises(UsageError, match="n=5: the engine has 4 batch slots"):
        engine.request([1], msrnn.SamplingParams(n=5))


def test_stop_tokens(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    params = msrnn.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (whole,) = tokens(engine.generate([[11, 12, 13]], params))
    stop = whole[5]
    cut = msrnn.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    (request,) = engine.generate([[11, 12, 13]], cut)
    assert request.answers[0].tokens == whole[: whole.index(stop)]
    assert (request.answers[0].finish_reason, request.answers[0].stop_reason) == ("stop", stop)
    (limited,) = engine.generate([[11, 12, 13]], msrnn.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert (limited.answers[0].tokens, limited.answers[0].finish_reason) == (whole[:3], "length")


def test_the_models_own_stop_token_ends_an_answer(rnn: msrnn.MultiStateRNN) -> None:
    """A bias makes it certain."""
    engine = msrnn.Engine(rnn, slots=2)
    params = msrnn.SamplingParams(temperature=0, max_tokens=5, logit_bias={2: 100})
    (request,) = engine.generate([[5]], params)
    assert (request.answers[0].tokens, request.answers[0].finish_reason) == ([], "stop")
    ignoring = msrnn.SamplingParams(temperature=0, max_tokens=5, logit_bias={2: 100}, ignore_eos=True)
    assert tokens(engine.generate([[5]], ignoring)) == [[2] * 5]


def test_a_conversation_that_is_sent_again_reads_only_what_is_new(rnn: msrnn.MultiStateRNN) -> None:
    engine, plain = msrnn.Engine(rnn, slots=2), msrnn.Engine(rnn, slots=2, prefix_bytes=0, prefix_host_bytes=0)
    history = [*range(3, 50)]
    for turn in range(5):
        (request,) = engine.generate([history], GREEDY)
        (expected,) = plain.generate([history], GREEDY)
        assert request.answers[0].tokens == expected.answers[0].tokens
        assert expected.cached_tokens == 0
        if turn:
            assert len(history) - request.cached_tokens <= 4 + 1  # the message, and the last token of the answer
        stop = [2] if request.answers[0].finish_reason == "stop" else []
        history = [*history, *request.answers[0].tokens, *stop, 60 + turn, 61, 62, 63]
    (again,) = engine.generate([history], GREEDY)
    (whole,) = engine.generate([history], GREEDY)
    assert whole.cached_tokens == len(history)
    assert whole.answers[0].tokens == again.answers[0].tokens


def test_prompts_that_begin_alike_read_the_beginning_once(rnn: msrnn.MultiStateRNN) -> None:
    shared = [*range(3, 80)]
    many = [[*shared, 80 + i, 5, 6 + i] for i in range(6)]
    engine = msrnn.Engine(rnn, slots=3)
    found = engine.generate(many, GREEDY)
    assert tokens(found) == [generated(rnn, prompt) for prompt in many]
    assert sorted(request.cached_tokens for request in found) == [0] + [len(shared)] * 5


def test_memory_of_kept_states_is_bounded(rnn: msrnn.MultiStateRNN) -> None:
    one = rnn.state().nbytes + 97 * 4
    engine = msrnn.Engine(rnn, slots=3, prefix_bytes=3 * one, prefix_host_bytes=0)
    engine.generate(prompts(20, longest=10), GREEDY)
    assert 0 < engine.prefixes.nbytes <= 3 * one
    assert len(engine.prefixes) <= 3


def test_cancelling_gives_the_row_back(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2, prompt_tokens=4)
    params = msrnn.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    one, two, waiting, other = (engine.request(prompt, params) for prompt in prompts(4, longest=6))
    for request in (one, two, waiting, other):
        engine.add(request)
    for _ in range(8):
        engine.step()
    assert engine.counts.running == 2
    two.cancel()
    waiting.cancel()
    events = engine.step()
    assert {(event.request, event.finish_reason) for event in events if event.finish_reason} == {
        (two, "cancelled"),
        (waiting, "cancelled"),
    }
    while not engine.idle:
        engine.step()
    expected = tokens(msrnn.Engine(rnn, slots=1).generate([one.prompt, other.prompt], params))
    assert [one.answers[0].tokens, other.answers[0].tokens] == expected
    assert 0 < len(two.answers[0].tokens) < 30
    assert not waiting.answers[0].tokens


def test_a_long_prompt_does_not_stop_running_answers(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2, prompt_tokens=8)
    params = msrnn.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    running, long = engine.request([5, 6], params), engine.request([*range(3, 90)] * 2, params)
    engine.add(running)
    engine.step()
    engine.add(long)
    before = len(running.answers[0].tokens)
    for _ in range(10):
        engine.step()
    assert len(running.answers[0].tokens) == before + 10
    assert not long.answers[0].tokens


def test_what_is_refused(rnn: msrnn.MultiStateRNN) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    with pytest.raises(UsageError, match="the prompt is empty"):
        engine.request([])
    with pytest.raises(UsageError, match="token 97: this model has ids 0 to 96"):
        engine.request([5, 97])
    with pytest.raises(UsageError, match="needs a tokenizer"):
        engine.request("text")
    with pytest.raises(UsageError, match="give the engine a tokenizer"):
        engine.request([5], msrnn.SamplingParams(stop=["x"]))
    with pytest.raises(UsageError, match="stop_token_ids: token -1: this model has ids"):
        engine.request([5], msrnn.SamplingParams(stop_token_ids=[-1]))
    with pytest.raises(UsageError, match="fixed size"):
        msrnn.Engine(msrnn.MultiStateRNN(build(llama(), "cpu"), "full", None), slots=2)
    learned = msrnn.MultiStateRNN(build(FAMILIES["gpt2"](), "cpu"), "tova", 9)
    with pytest.raises(UsageError, match="learned positions 0 to 511"):
        msrnn.Engine(learned, slots=2).request([5] * 500, msrnn.SamplingParams(max_tokens=20))


def test_arguments_of_a_wrong_type(rnn: msrnn.MultiStateRNN, tmp_path: Path) -> None:
    wrong: Any = rnn.model
    with pytest.raises(UsageError, match=r"rnn: is of type LlamaForCausalLM, .*; wrap a model: MultiStateRNN"):
        msrnn.Engine(wrong, 2)
    file = tmp_path / "file"
    file.touch()
    for name, path in (("prefix_folder", file), ("sessions", file), ("prefix_folder", file / "folder")):
        folder: Any = {name: path}
        with pytest.raises(UsageError, match=f"{name}='.*is a file; name a folder"):
            msrnn.Engine(rnn, 2, **folder)
    engine: Any = msrnn.Engine(rnn, slots=2)
    with pytest.raises(UsageError, match="for one prompt"):
        engine.generate([5, 6])
    with pytest.raises(UsageError, match="prompts: is of type Tensor"):
        engine.generate(torch.tensor([[5]]))
    with pytest.raises(UsageError, match="prompt: is of type Tensor"):
        engine.generate([torch.tensor([5])])
    with pytest.raises(UsageError, match="'max_tokens': 3}: must be SamplingParams"):
        engine.request([5], {"max_tokens": 3})
    with pytest.raises(UsageError, match="'max_tokens': 3}: must be SamplingParams"):
        engine.generate([[5]], {"max_tokens": 3})


def test_numbers_that_are_not_finite_end_the_answer_with_an_error() -> None:
    model = build(llama(), "cpu")
    engine = msrnn.Engine(msrnn.MultiStateRNN(model, "tova", 9), slots=2)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    (request,) = engine.generate([[5, 6]], GREEDY)
    assert request.answers[0].finish_reason == "error"
    assert "not finite" in str(request.answers[0].error)


def test_an_interrupted_step_ends_what_is_under_way(rnn: msrnn.MultiStateRNN, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = msrnn.Engine(rnn, slots=2)
    request, step = engine.request([5, 6], GREEDY), engine.executor.step
    engine.add(request)
    engine.step()

    def interrupted(samplers: Any) -> Any:
        step(samplers)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert request.answers[0].finish_reason == "error"
    assert engine.idle
    assert tokens(engine.generate([[5, 6]], GREEDY)) == [generated(rnn, [5, 6])]


def test_progress_counts_all_tokens(rnn: msrnn.MultiStateRNN) -> None:
    counted: list[int] = []
    found = msrnn.Engine(rnn, slots=3).generate(prompts(7), GREEDY, on_tokens=counted.append)
    assert sum(counted) == sum(map(len, prompts(7))) + sum(map(len, tokens(found)))


def test_streams(rnn: msrnn.MultiStateRNN) -> None:
    """Many at once, of which some stop early; their rows come back."""
    engine = msrnn.Engine(rnn, slots=4)
    expected = tokens(msrnn.Engine(rnn, slots=4).generate(prompts(20), GREEDY))

    async def consume(prompt: list[int], most: int) -> list[int]:
        found: list[int] = []
        stream: Any = engine.stream(prompt, GREEDY)
        async for event in stream:
            found += [event.token] if event.token is not None else []
            if len(found) == most:
                break
        await stream.aclose()
        return found

    async def consume_all() -> list[list[int]]:
        return await asyncio.gather(*(consume(p, 3 if i % 4 == 0 else 100) for i, p in enumerate(prompts(20))))

    found = asyncio.run(consume_all())
    assert found == [answer[:3] if i % 4 == 0 else answer for i, answer in enumerate(expected)]
    engine.close()
    assert engine.idle


def test_a_failed_step_reaches_those_who_wait(rnn: msrnn.MultiStateRNN, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = msrnn.Engine(rnn, slots=2)

    def failing(_: object) -> Any:
        raise RuntimeError("out of memory")

    async def consume() -> list[Event]:
        return [event async for event in engine.stream([5, 6], GREEDY)]

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "step", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            asyncio.run(consume())
    events = asyncio.run(consume())
    assert [event.token for event in events if event.token is not None] == generated(rnn, [5, 6])
    engine.close()


def test_a_prompt_that_cannot_begin_fails_alone(rnn: msrnn.MultiStateRNN, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has left the queue, so nothing else would ever end it."""
    engine = msrnn.Engine(rnn, slots=2)
    request = engine.request([5, 6], GREEDY)
    engine.add(request)

    def full(**_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(rnn, "state", full)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
    assert request.answers[0].finish_reason == "error"
    assert engine.idle
