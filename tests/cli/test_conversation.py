from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from msrnn import MultiState, MultiStateRNN
from msrnn.cli import conversation
from msrnn.cli.answer_streamer import AnswerStreamer
from msrnn.cli.conversation import Conversation, Turn, recover_state
from tests.helpers.characters import END, character_model, character_tokenizer

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
STOPPING = {**GREEDY, "forced_eos_token_id": END}  # answers that end with the stop token, not at the limit


@pytest.fixture
def rnn() -> MultiStateRNN:
    return MultiStateRNN(character_model(), "tova", 16)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return character_tokenizer()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of every answer."""
    found: list[list[int]] = []

    class Recorded(AnswerStreamer):
        def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
            super().__init__(tokenizer)
            found.append(self.ids)

    monkeypatch.setattr(conversation, "AnswerStreamer", Recorded)
    return found


def after(rnn: MultiStateRNN, tokenizer: PreTrainedTokenizerBase, messages: list[tuple[str, str]]) -> MultiState:
    """The state of a model that reads the conversation as one text, by its template."""
    roles = [{"role": role, "content": content} for role, content in messages]
    text = tokenizer.apply_chat_template(roles, tokenize=False)
    state = rnn.state()
    rnn.read(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]]), state)
    return state


def assert_same(one: MultiState, other: MultiState) -> None:
    assert one.seen.tolist() == other.seen.tolist()
    for a, b in zip(one.layers, other.layers, strict=True):
        order, other_order = a.position[0, 0].argsort(), b.position[0, 0].argsort()
        assert a.position[0, 0, order].tolist() == b.position[0, 0, other_order].tolist()
        torch.testing.assert_close(a.keys[0, :, order[1:]], b.keys[0, :, other_order[1:]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("settings", [GREEDY, STOPPING], ids=["cut", "stop token"])
@pytest.mark.parametrize("system", [None, "be brief"])
def test_state_is_that_of_the_whole_conversation(
    rnn: MultiStateRNN,
    tokenizer: PreTrainedTokenizerBase,
    answers: list[list[int]],
    settings: dict[str, Any],
    system: str | None,
) -> None:
    talk = Conversation(rnn, tokenizer, rnn.state(), settings, system)
    messages = ["hello", "how are you?", "(an earlier answer)"]
    for message in messages:
        assert talk.turn(message) == Turn(interrupted=False, cut=settings is GREEDY)
    assert all((ids[-1] == END) == (settings is STOPPING) for ids in answers)
    texts = [tokenizer.decode(ids).removesuffix("<end>") for ids in answers]
    turns = [pair for q, a in zip(messages, texts, strict=True) for pair in (("user", q), ("assistant", a))]
    assert_same(talk.state, after(rnn, tokenizer, [*([("system", system)] if system else []), *turns]))


@pytest.mark.parametrize("inside_a_forward_pass", [False, True])
def test_an_interrupted_answer_stays_in_the_state(
    rnn: MultiStateRNN,
    tokenizer: PreTrainedTokenizerBase,
    answers: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    inside_a_forward_pass: bool,
) -> None:
    talk = Conversation(rnn, tokenizer, rnn.state(), GREEDY)
    talk.turn("hello")
    put = AnswerStreamer.put
    hooks: list[Any] = []

    def interrupt(*_: Any) -> None:
        for hook in hooks:
            hook.remove()
        raise KeyboardInterrupt

    def interrupted(self: AnswerStreamer, value: torch.Tensor) -> None:
        put(self, value)
        if len(self.ids) == 3:
            if not inside_a_forward_pass:
                interrupt()
            hooks.append(rnn.model.model.layers[-1].register_forward_pre_hook(interrupt))

    monkeypatch.setattr(AnswerStreamer, "put", interrupted)
    assert talk.turn("again") == Turn(interrupted=True, cut=False)
    assert [len(ids) for ids in answers] == [12, 3]
    first, second = (tokenizer.decode(ids) for ids in answers)
    messages = [("user", "hello"), ("assistant", first), ("user", "again"), ("assistant", second)]
    assert_same(talk.state, after(rnn, tokenizer, messages))


def test_extend_is_called_once_before_the_turn_that_may_pass_the_training_length(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    model = character_model()
    model.config.max_position_embeddings = 200
    rnn = MultiStateRNN(model, "tova", 16)
    extended = MultiStateRNN(model, "tova+1~200", 16, positions="compressed")
    calls: list[int] = []
    seen: list[int] = []

    def extend(length: int) -> MultiStateRNN:
        calls.append(length)
        seen.append(int(talk.state.seen[0]))
        return extended

    talk = Conversation(rnn, tokenizer, rnn.state(), GREEDY, extend=extend)
    plain = Conversation(rnn, tokenizer, rnn.state(), GREEDY)
    switched = 0
    for i in range(6):
        message = f"message {i}, which is not short"
        ids = plain.encode(message)
        if not switched and int(plain.state.seen[0]) + len(ids) + 12 + len(plain.closing) > 200:
            switched = int(plain.state.seen[0])
            plain.rnn, plain.state = extended, extended.convert_state(plain.state)
        plain.turn(message)
        talk.turn(message)
    assert (calls, seen) == ([200], [switched])
    assert switched > 100
    assert_same(talk.state, plain.state)


LONG = "many words that fill the state and more"


def test_the_system_message_stays(tokenizer: PreTrainedTokenizerBase) -> None:
    rnn = MultiStateRNN(character_model(), "window", 40)
    chat = Conversation(rnn, tokenizer, rnn.state(), GREEDY, system="short", protect="system")
    for _ in range(3):
        chat.turn(LONG)
    [[(begin, end)]] = chat.state.protected
    assert (begin, "short" in tokenizer.decode(chat.encode("x"))) == (0, False)
    assert set(range(end)) <= set(chat.state.positions(0)[0, 0].tolist())
    plain = Conversation(rnn, tokenizer, rnn.state(), GREEDY, system="short")
    plain.turn(LONG)
    assert plain.state.protected == [[]]


def test_a_message_stays_until_the_next(tokenizer: PreTrainedTokenizerBase) -> None:
    rnn = MultiStateRNN(character_model(), "window", 64)
    chat = Conversation(rnn, tokenizer, rnn.state(), {**GREEDY, "max_new_tokens": 60}, protect="prompt")
    chat.turn("one")
    first = chat.state.protected
    assert set(range(*first[0][0])) <= set(chat.state.positions(0)[0, 0].tolist())
    chat.turn("two")
    [[(begin, end)]] = chat.state.protected
    assert begin > first[0][0][1]
    assert set(range(begin, end)) <= set(chat.state.positions(0)[0, 0].tolist())


@pytest.mark.parametrize("protect", ["system", "prompt"])
def test_an_interrupted_turn_protects_the_same(
    protect: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C inside a forward pass: the turn is read again, with the same protected tokens."""
    rnn = MultiStateRNN(character_model(), "window", 48)
    whole = Conversation(rnn, tokenizer, rnn.state(), GREEDY, system="short", protect=protect)
    whole.turn("hello")
    chat = Conversation(rnn, tokenizer, rnn.state(), GREEDY, system="short", protect=protect)
    step, calls = rnn.step, iter(range(100))

    def interrupt(ids: torch.Tensor, state: MultiState, *rest: Any) -> torch.Tensor:
        if next(calls) == 4:
            state.whole = False
            raise KeyboardInterrupt
        return step(ids, state, *rest)

    monkeypatch.setattr(rnn, "step", interrupt)
    assert chat.turn("hello").interrupted
    assert chat.state.protected == whole.state.protected != [[]]


@pytest.mark.parametrize("protect", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["inside a forward pass", "between two"])
def test_a_recovered_state_has_recalled_as_the_answer_did(
    whole: bool, protect: bool, tokenizer: PreTrainedTokenizerBase
) -> None:
    rnn = MultiStateRNN(character_model(), "tova", 40, recall=6, recall_every=4, recall_while_reading=16)
    begun, ids = rnn.state(), torch.tensor([tokenizer("why?", add_special_tokens=False)["input_ids"]])
    rnn.read(torch.tensor([tokenizer(LONG * 2)["input_ids"]]), begun)
    expected, stopped, before = (begun.fork(1) for _ in range(3))
    kept: Any = {"protect": "prompt" if protect else "none"}
    answer = rnn.generate(ids, expected, **GREEDY, **kept)[0, ids.shape[1] :].tolist()
    rnn.generate(ids, stopped, **{**GREEDY, "max_new_tokens": 5}, **kept)
    stopped.whole = whole
    found = recover_state(rnn, stopped, before, ids, answer, protect)
    assert_same(found, expected)
    assert found.protected == expected.protected
    for one, other in zip(found.layers, expected.layers, strict=True):
        for name, rows in one.archives[0].tensors().items():
            torch.testing.assert_close(rows, other.archives[0].tensors()[name], atol=1e-4, rtol=1e-4)
