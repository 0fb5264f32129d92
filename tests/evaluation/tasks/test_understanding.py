from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from msrnn.engine.engine import Engine
from msrnn.engine.offline import full_model_rnn
from msrnn.engine.requests import SamplingParams
from msrnn.evaluation.cells import TRUNCATED, Cell
from msrnn.evaluation.data.prompts import PromptBuilder
from msrnn.evaluation.data.questions import Question, Reference
from msrnn.evaluation.environment import model_key
from msrnn.evaluation.runner import Progress
from msrnn.evaluation.store import Store
from msrnn.evaluation.tasks.answers import Answers, Settings
from msrnn.evaluation.tasks.question_tasks import QASPER, SQUALITY
from msrnn.evaluation.tasks.understanding import answer_questions
from msrnn.hf.cache import MultiStateCache
from msrnn.hf.loading import Loaded
from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.characters import END, character_tokenizer
from tests.helpers.tiny import build, llama

TEMPLATE = "{document}\n\nQ: {question}\nA:"
LENGTH, ANSWER = 60, 6
FULL = Cell("full", None)
CELLS = [FULL, Cell("tova", 16), Cell("window+4", 16), Cell(TRUNCATED, 50), Cell("tova", 100)]
TOKENIZER = character_tokenizer()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(llama(vocab_size=len(TOKENIZER)))


def asked() -> list[Question]:
    """On documents of 30, 70 and 110 letters: the first fits, the others are cut."""
    letters = string.ascii_letters * 3
    return [
        Question(f"{i}/1", str(i), letters[i : i + 30 + 40 * i], f"why {i}?", [Reference("a b"), Reference("c")])
        for i in range(3)
    ]


def settings_of(model: PreTrainedModel, chat: bool = False, positions: str = "original") -> Settings:
    return Settings("squality", **model_key(model), chat=chat, length=LENGTH, positions=positions, answer=ANSWER)


def answered(
    model: PreTrainedModel,
    store: Store,
    cells: list[Cell],
    progress: Progress | None = None,
    batch: int = 2,
    settings: Settings | None = None,
    template: str = TEMPLATE,
) -> Answers:
    answers = Answers(store, settings or settings_of(model))
    task, loaded = SQUALITY._replace(prompt=template), Loaded(model, TOKENIZER)
    return answer_questions(loaded, task, asked(), answers, cells, {"model": "tiny"}, batch, progress)


@pytest.mark.parametrize("chat", [False, True])
def test_the_end_of_the_document_is_cut(chat: bool) -> None:
    builder = PromptBuilder(TOKENIZER, TEMPLATE, chat)
    long = asked()[2]
    whole = builder.build(long, 200)
    assert whole.cut == 0
    for length in (60, 61, 100):
        prompt = builder.build(long, length)
        assert len(prompt.ids) == length
        assert prompt.cut == len(whole.ids) - length
        kept = long.text[: len(long.text) - prompt.cut]
        assert f"{kept}\n\nQ: why 2?\nA:" in TOKENIZER.decode(prompt.ids)
    text = TOKENIZER.decode(builder.build(long, 60).ids)
    assert text.endswith("<model>" if chat else "A:")
    assert text.startswith("<s><system>be kind<end>\n<user>cdef" if chat else "<s>cdef")
    with pytest.raises(ValueError, match=r"size=12: question 2/1 alone takes \d+ tokens"):
        builder.build(long, 12, "size")


@torch.no_grad()
def stepped(model: PreTrainedModel, ids: list[int], cell: Cell) -> str:
    """The definition: token by token, with transformers' own calls, alone."""
    cache, said = MultiStateCache(model, cell.policy, cell.size), list[int]()
    feed = list(ids)
    while len(said) < ANSWER:
        for token in feed:
            logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
        feed = [int(logits.argmax())]
        if feed[0] == END:
            break
        said += feed
    return TOKENIZER.decode(said, skip_special_tokens=True).strip()


@pytest.mark.parametrize("chat", [False, True])
def test_answers_are_those_of_each_question_alone(model: PreTrainedModel, chat: bool) -> None:
    answers = answered(model, Store(None), CELLS, batch=3, settings=settings_of(model, chat))
    builder = PromptBuilder(TOKENIZER, TEMPLATE, chat)
    for question in asked():
        for cell in CELLS:
            stored = answers.questions[question.key]
            prompt = builder.build(question, 50 if cell.policy == TRUNCATED else LENGTH)
            assert prompt.key == answers.source(cell, stored)[1]
            row = answers.answer(cell, stored)
            assert row is not None
            assert row["prediction"] == stepped(model, prompt.ids, FULL if cell.policy == TRUNCATED else cell)
    tova, full = ([answers.answer(cell, one) for one in answers.questions.values()] for cell in CELLS[1::-1])
    assert [row and row["prediction"] for row in tova] != [row and row["prediction"] for row in full]


def test_answers_with_recall(model: PreTrainedModel) -> None:
    cell = Cell("tova + 4 recalled", 16)
    answers = answered(model, Store(None), [cell], batch=3)
    rnn, builder = MultiStateRNN(model, **cell.options), PromptBuilder(TOKENIZER, TEMPLATE, False)
    for question in asked():
        ids = torch.tensor([builder.build(question, LENGTH).ids])
        out = rnn.generate(ids, max_new_tokens=ANSWER, do_sample=False, eos_token_id=END)[0, ids.shape[1] :]
        row = answers.answer(cell, answers.questions[question.key])
        assert row is not None
        assert row["prediction"] == TOKENIZER.decode(out, skip_special_tokens=True).strip()


@pytest.mark.gpu
def test_answers_on_a_gpu_are_those_on_a_cpu(model: PreTrainedModel) -> None:
    """The unbounded model's too, which has room for everything there."""
    other = build(llama(vocab_size=len(TOKENIZER)), "cuda")
    found = [answered(one, Store(None), CELLS) for one in (model, other)]
    cpu, gpu = ([row["prediction"] for _, row in sorted(answers.records.items())] for answers in found)
    assert cpu == gpu


@pytest.mark.small_model
def test_on_words(small: Loaded) -> None:
    """Cut between tokens of the text, and answered as transformers' own generation does."""
    text = "Call me Ishmael. Some years ago, having little or no money in my purse, I thought I would sail about. " * 9
    question = Question("moby/1", "moby", text, "Who tells this story?", [Reference("Ishmael")])
    builder = PromptBuilder(small.tokenizer, QASPER.prompt, chat=True)
    prompt = builder.build(question, 180)
    assert 176 <= len(prompt.ids) <= 180
    written = small.tokenizer.decode(prompt.ids)
    beginning, _, rest = written.partition("\n\nAnswer the question as concisely")
    assert text.startswith(beginning.partition("<|im_start|>user\n")[2])
    assert rest.endswith("Who tells this story?\n\nAnswer:<|im_end|>\n<|im_start|>assistant\n")
    kept = small.tokenizer(beginning.partition("user\n")[2])["input_ids"]
    assert prompt.cut == len(small.tokenizer(text)["input_ids"]) - len(kept)
    engine = Engine.offline(full_model_rnn(small.model, 190), 1, small.tokenizer)
    (request,) = engine.generate([prompt.ids], SamplingParams(temperature=0, max_tokens=8))
    small.model.set_attn_implementation("eager")
    ids = torch.tensor([prompt.ids])
    out = small.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    assert request.answers[0].text == small.tokenizer.decode(out[0, len(prompt.ids) :], skip_special_tokens=True)


def test_what_is_the_same_is_answered_once(model: PreTrainedModel) -> None:
    """Where all fits the size nobody forgets, and a short document is not truncated."""
    store = Store(None)
    answers = answered(model, store, CELLS)
    rows = [row for row in store.records if "prediction" in row]
    assert len(rows) == 3 + 2 * 3 + 2  # full; two policies at 16; two of truncated
    first = answers.questions[asked()[0].key]
    assert answers.source(CELLS[4], first) == answers.source(FULL, first)
    assert len({(row["policy"], row["size"], row["prompt"]) for row in rows}) == len(rows)


@pytest.mark.parametrize(("stop", "cut_off"), [(0, False), (1, True), (4, False)])
def test_a_run_that_was_killed_goes_on(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int, cut_off: bool
) -> None:
    """While an answer is stored: those before it are kept, and it is generated again."""

    def texts(answers: Answers) -> list[object]:
        found = [answers.answer(cell, one) for cell in CELLS for one in answers.questions.values()]
        return [row and row["prediction"] for row in found]

    def predictions(store: Store) -> int:
        return len([row for row in store.records if "prediction" in row])

    path, append = tmp_path / "rows.jsonl", Store.append
    expected = texts(answered(model, Store(None), CELLS))

    def killed(self: Store, row: dict[str, object]) -> None:
        if "prediction" in row and predictions(self) == stop:
            raise KeyboardInterrupt
        append(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            answered(model, Store(path), CELLS)
    if cut_off:
        path.write_bytes(path.read_bytes() + b'{"policy": "tova", "predi')
    assert predictions(Store(path)) == stop
    total, read = list[int](), list[int]()
    again = answered(model, Store(path), CELLS, Progress(total.append, tokens=read.append))
    assert texts(again) == expected
    assert predictions(Store(path)) == 11
    assert sum(read) == total[0] > 0
    answered(model, Store(path), CELLS, Progress(total.append))
    assert total[1:] == [0]


def test_progress_counts_what_was_announced(model: PreTrainedModel) -> None:
    total, read = list[int](), list[int]()
    answered(model, Store(None), CELLS, Progress(total.append, tokens=read.append))
    assert sum(read) == total[0] > 0


def test_what_makes_another_answer(model: PreTrainedModel) -> None:
    store, cells = Store(None), [Cell("tova", 16)]

    def new(model: PreTrainedModel, **changed: Any) -> int:
        before = len([row for row in store.records if "prediction" in row])
        answered(model, store, cells, **changed)
        return len([row for row in store.records if "prediction" in row]) - before

    assert new(model) == 3
    assert new(model, batch=1) == 0
    assert new(model, template="{document} {question}") == 3
    assert new(model, settings=settings_of(model, chat=True)) == 3
    assert new(model, settings=settings_of(model, positions="compact")) == 3
    assert new(model, settings=settings_of(model)._replace(answer=5)) == 3
    assert new(build(llama(vocab_size=len(TOKENIZER)), seed=1)) == 3
    cells = [Cell("tova", 17)]
    assert new(model) == 3


def test_the_last_settings_are_the_ones_used_last(model: PreTrainedModel, tmp_path: Path) -> None:
    """Though its questions, and all of its answers, were there before."""
    path, one = tmp_path / "rows.jsonl", settings_of(model)
    other = one._replace(length=50)
    for settings, cell in ((one, "tova"), (other, "tova"), (one, "window"), (one, "tova"), (other, "tova")):
        answered(model, Store(path), [Cell(cell, 16)], settings=settings)
        assert Settings.last(Store(path), "squality") == settings
    before = path.read_bytes()
    answered(model, Store(path), [Cell("tova", 16)], settings=other)
    assert path.read_bytes() == before, "the same settings again add nothing"
    assert len([row for row in Store(path).records if "settings_used" in row]) == 2
    assert Settings.last(Store(path), "squality", length=LENGTH, answer=ANSWER) == one
    with pytest.raises(
        ValueError, match=r"^length=9, chat=False: no answers like this in .*; use length=60, positions="
    ):
        Settings.last(Store(path), "squality", length=9, chat=False)


def test_the_metadata_of_an_answer_is_not_what_the_settings_say(model: PreTrainedModel) -> None:
    """The first document fits both lengths, so that its answer is one row, which the first settings wrote."""
    store, one = Store(None), settings_of(model)
    answered(model, store, [FULL], settings=one)
    other = one._replace(length=LENGTH + 1, positions="compact")
    answers = answered(model, store, [FULL], settings=other)
    metadata = answers.metadata(FULL, asked()[0].key)
    assert metadata["model"] == "tiny"
    assert not metadata.keys() & other.key.keys()
