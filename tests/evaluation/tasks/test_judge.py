from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from msrnn.evaluation.cells import Cell
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks.judge import Judgement
from msrnn.evaluation.tasks.judge_models import EndpointJudge, LocalJudge
from msrnn.evaluation.tasks.story_pairs import Pair, Pairs
from msrnn.evaluation.tasks.verdicts import TIE, UNREADABLE, WIN
from msrnn.hf.chat_template import opening
from tests.helpers import served
from tests.helpers.characters import character_tokenizer
from tests.helpers.served import SECRET, answering, asked
from tests.helpers.tiny import build, llama

pytestmark = pytest.mark.usefixtures("api_key")
SMALL = Cell("tova", 8)


def paired(*seeds: int, cell: Cell = SMALL) -> Pairs:
    found = [Pair(cell, seed, f"bounded {seed}", f"full {seed}") for seed in seeds]
    return Pairs(found, {cell: 3}, {"model": "tiny"})


@pytest.mark.parametrize("by_environment", [False, True])
def test_answers_of_another_address_are_not_reused(by_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(None)
    with served.served(answering("(A)"), answering("(B)")) as one, served.served(answering("(B)")) as other:
        assert Judgement(EndpointJudge("same", one.base_url), paired(1), store).judge_all()
        monkeypatch.setenv("OPENAI_BASE_URL", other.base_url)
        elsewhere = EndpointJudge("same") if by_environment else EndpointJudge("same", other.base_url)
        judgement = Judgement(elsewhere, paired(1), store)
        assert judgement.cost().requests == 2
        assert judgement.judge_all()
        assert (len(one.asked), len(other.asked)) == (2, 2)
        assert Judgement(EndpointJudge("same", one.base_url + "/"), paired(1), store).cost().requests == 0


def test_what_is_asked_again_replaces_the_answer(tmp_path: Path) -> None:
    """Even where the new one cannot be read; what was not asked again yet stays."""
    path, found = tmp_path / "judge.jsonl", paired(1, 2)
    sayings = ["(A)", "(B)", "(A)", "(B)", "Hm.", "Well.", "(B)"]
    with served.served(*(answering(text) for text in sayings)) as server:
        assert Judgement(asked(server.base_url, []), found, Store(path)).judge_all()
        before = path.read_text()
        again = Judgement(asked(server.base_url, []), found, Store(path, redo=True), most=3)
        assert again.cost().requests == 4
        assert not again.judge_all()
        later = Judgement(asked(server.base_url, []), found, Store(path))
        assert later.verdicts() == {SMALL: [UNREADABLE, WIN]}
        assert (later.cost().requests, len(server.asked)) == (0, 7)
    assert path.read_text().startswith(before)


def test_no_key_and_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    judge = EndpointJudge("gpt-4o")
    assert Judgement(judge, paired(1), Store(None)).cost().requests == 2
    with pytest.raises(ValueError, match="set OPENAI_API_KEY"):
        judge.ask("Which?")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'msrnn\[judge\]'"):
        judge.ask("Which?")


def better(word: str) -> Callable[[str], str]:
    """A judge that likes stories with a word."""

    def said(prompt: str) -> str:
        first, second = prompt.split("Response (A):")[1].split("Response (B):")
        return "(C)" if (word in first) == (word in second) else "(A)" if word in first else "(B)"

    return said


def test_every_answer_is_paid_once(tmp_path: Path) -> None:
    path, found = tmp_path / "judge.jsonl", paired(1, 2, 3)
    with served.served(answering(better("bounded"))) as server:
        first = Judgement(asked(server.base_url, []), found, Store(path), most=3)
        assert first.cost().requests == 6
        assert not first.judge_all()
        assert first.verdicts() == {SMALL: [WIN]}
        assert first.cost().requests == 3
        path.write_bytes(path.read_bytes() + b'{"judge": "a-judge", "answ')
        second = Judgement(asked(server.base_url, []), found, Store(path))
        assert second.judge_all()
        assert (second.requests, len(server.asked)) == (3, 6)
        assert second.verdicts() == {SMALL: [WIN] * 3}
        third = Judgement(asked(server.base_url, []), found, Store(path))
        assert third.judge_all()
        assert (third.requests, third.cost()) == (0, (0, 0, 0))
    assert SECRET not in path.read_text()
    assert server.base_url not in path.read_text()


def test_what_fails_for_good_keeps_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "judge.jsonl"
    monkeypatch.setattr("msrnn.evaluation.tasks.judge_models.RETRIES", 2)
    with served.served(answering("(A)"), answering("(B)"), served.failing) as server:
        judgement = Judgement(asked(server.base_url, []), paired(1, 2), Store(path))
        with pytest.raises(ValueError, match=r"failed 3 times .* answers so far are kept"):
            judgement.judge_all()
    assert judgement.verdicts() == {SMALL: [WIN]}
    assert len(Store(path).records) == 2


def test_retries_count_as_requests() -> None:
    with served.served(served.failing) as server:
        judgement = Judgement(asked(server.base_url, []), paired(1, 2), Store(None), most=3)
        assert not judgement.judge_all()
    assert (judgement.requests, len(server.asked)) == (3, 3)
    assert judgement.cost().requests == 4


def test_the_unreadable_is_asked_again_and_then_counted_apart() -> None:
    sayings = ["Hm.", "(A)", "(B)", "Hm.", "Well.", "(A)"]
    with served.served(*(answering(text) for text in sayings)) as server:
        judgement = Judgement(asked(server.base_url, []), paired(1, 2), Store(None))
        assert judgement.judge_all()
    assert len(server.asked) == 6
    assert judgement.verdicts() == {SMALL: [WIN, UNREADABLE]}


def test_stories_that_are_the_same_are_a_tie() -> None:
    found = Pairs([Pair(SMALL, 1, "same", "same")], {SMALL: 0}, {})
    with served.served(served.failing) as server:
        judgement = Judgement(asked(server.base_url, []), found, Store(None))
        assert judgement.judge_all()
    assert (server.asked, judgement.verdicts()) == ([], {SMALL: [TIE]})


def test_another_judge_is_asked_anew() -> None:
    store = Store(None)
    with served.served(answering("(C)")) as server:
        for name in ("one", "two", "one"):
            Judgement(EndpointJudge(name, server.base_url), paired(1), store).judge_all()
    assert [one["model"] for one in server.asked] == ["one", "one", "two", "two"]


def test_an_endpoint_of_a_local_judges_name_is_asked_anew() -> None:
    tokenizer, store = character_tokenizer(), Store(None)
    model = build(llama(vocab_size=len(tokenizer), max_position_embeddings=4096))
    assert Judgement(LocalJudge("tiny", model, tokenizer), paired(1), store).judge_all()
    with served.served(answering("(A)"), answering("(B)")) as server:
        judgement = Judgement(EndpointJudge("tiny", server.base_url), paired(1), store)
        assert judgement.judge_all()
    assert (len(server.asked), judgement.verdicts(), judgement.leanings()) == (2, {SMALL: [WIN]}, {SMALL: []})
    for judge in (EndpointJudge("tiny", server.base_url), LocalJudge("tiny", model, tokenizer)):
        assert Judgement(judge, paired(1), store).cost().requests == 0
    assert all("judge_fingerprint" not in row for row in store.records[2:])


def test_a_local_judge_takes_the_likeliest_option() -> None:
    tokenizer = character_tokenizer()
    model = build(llama(vocab_size=len(tokenizer), max_position_embeddings=4096))
    judge, store = LocalJudge("tiny", model, tokenizer), Store(None)
    judgement = Judgement(judge, paired(1), store)
    assert judgement.judge_all()
    assert len(store.records) == 2
    assert judgement.verdicts()[SMALL] != [UNREADABLE]
    row, prompt = store.records[0], opening(tokenizer, paired(1).pairs[0].prompt(False))
    model.set_attn_implementation("eager")
    for option, found in zip(("(A)", "(B)", "(C)"), row["log_likelihoods"], strict=True):
        ids = tokenizer(prompt + option, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            logs = model(input_ids=ids).logits[0, -4:-1].log_softmax(-1)
        assert found == pytest.approx(float(logs.gather(-1, ids[0, -3:, None]).sum()), rel=1e-4)
    (one,), (first, swapped) = judgement.leanings()[SMALL], (row["log_likelihoods"] for row in store.records)
    assert one == pytest.approx((first[0] - swapped[0]) - (first[1] - swapped[1]))
    assert row["answer"] == ("(A)", "(B)", "(C)")[max(range(3), key=lambda i: row["log_likelihoods"][i])]


def test_a_local_judge_tells_once_that_prompts_are_long() -> None:
    tokenizer, heard = character_tokenizer(), list[int]()
    model = build(llama(vocab_size=len(tokenizer), max_position_embeddings=64))
    assert Judgement(LocalJudge("tiny", model, tokenizer, heard.append), paired(1, 2), store := Store(None)).judge_all()
    assert heard == [store.records[0]["prompt_tokens"]]


def test_a_guess_of_the_cost() -> None:
    with served.served(served.failing) as server:
        cost = Judgement(asked(server.base_url, []), paired(1, 2), Store(None)).cost()
    assert cost.requests == 4
    assert cost.read == pytest.approx(
        sum(len(p.prompt(s)) for p in paired(1, 2).pairs for s in (False, True)) / 4, abs=1
    )
    assert (
        cost._replace(read=2_000_000, written=1000).summary((2.5, 10)).endswith("about 5.01 at 2.5 and 10 per million")
    )
