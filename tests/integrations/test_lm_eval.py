"""The harness's own model is the reference: an unbounded model must give the same answers."""

from __future__ import annotations

import json
import runpy
import string
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny import build, llama

pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'msrnn[lm-eval]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from msrnn.integrations import lm_eval as harness
from msrnn.integrations.lm_eval import BoundedLM

BEYOND = 500  # a size that no text here reaches
OPENED = "<s>opened"
CONTEXT = "the quick brown fox jumps over the lazy dog and then it"
PAIRS = [
    (CONTEXT, " sleeps"),
    (CONTEXT, " runs away"),
    (CONTEXT, " s"),
    (CONTEXT + " is late ", "again"),  # a space that the harness gives to the continuation
    ("once", " upon a time"),
    ("", "a beginning"),
    (OPENED, " already"),
    ("long " * 20, "and cut from the left"),
]
TEXTS = [CONTEXT, "short", CONTEXT * 4]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model and a tokenizer of characters, some pairs of them merged."""
    alphabet = ["<unk>", "<s>", "<end>", *string.ascii_lowercase, *" .,!?\n"]
    merges = [("t", "h"), ("a", "n"), ("e", "r"), ("i", "n")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s?\S+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path = tmp_path_factory.mktemp("model")
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    build(llama(vocab_size=len(vocabulary))).save_pretrained(path)
    return str(path)


def ours(folder: str, size: int, policy: str = "tova", **more: Any) -> BoundedLM:
    return BoundedLM(folder, policy, size, device="cpu", **more)


def asked(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=0) for pair in arguments]


def close(ours: list[Any], theirs: list[Any]) -> None:
    """To 1e-4, or to the last digits that a float32 sum over a long text has."""
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("policy", ["tova", "full"])
def test_unbounded_it_is_the_harness_own_model(folder: str, policy: str, batch_size: int) -> None:
    settings = {"batch_size": batch_size, "max_length": 64}
    mine = ours(folder, BEYOND, policy, **settings)
    mine.rnn.block = 7  # so that texts pass in several
    theirs = HFLM(folder, device="cpu", dtype="float32", **settings)

    pairs = asked("loglikelihood", *PAIRS)
    scores, expected = mine.loglikelihood(pairs), theirs.loglikelihood(pairs)
    close([score for score, _ in scores], [score for score, _ in expected])
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]

    texts = asked("loglikelihood_rolling", *((text,) for text in TEXTS))
    close(mine.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts))

    free = {"until": ["never said"], "max_gen_toks": 24}
    prompts = [context for context, _ in PAIRS if context and context != OPENED]
    spoken = theirs.generate_until(asked("generate_until", *((prompt, free) for prompt in prompts)))
    stop = {"until": [spoken[0][4:6]], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0}
    requests = asked("generate_until", *((prompt, kwargs) for prompt in prompts for kwargs in (free, stop)))
    continued = mine.generate_until(requests)
    assert continued == theirs.generate_until(requests)
    assert continued[::2] == spoken
    assert len(continued[1]) <= 4
    # alone, since there a batch is opened or not as its first text is
    opened = asked("generate_until", (OPENED, free))
    assert mine.generate_until(opened) == theirs.generate_until(opened)


def test_what_greedy_decoding_says_is_greedy(folder: str) -> None:
    lm = ours(folder, 6)
    (said,) = lm.generate_until(asked("generate_until", ("the fox", {"until": [], "max_gen_toks": 12})))
    ids = lm.tokenizer.encode(said, add_special_tokens=False)
    context = lm.tok_encode("the fox")
    (_, greedy), (_, other) = lm._loglikelihood_tokens([(None, context, ids), (None, context, [*ids[:-1], 0])], True)
    assert greedy
    assert not other


def test_a_stop_sequence_of_special_tokens(folder: str) -> None:
    """It ends the text where it is generated, though it is not in the text."""
    lm = ours(folder, 6)
    free = {"until": [], "max_gen_toks": 12, "do_sample": True, "top_k": 0, "temperature": 9.0}
    for seed in range(40):
        torch.manual_seed(seed)
        (said,) = lm.generate_until(asked("generate_until", ("the fox", free)))
        torch.manual_seed(seed)
        (cut,) = lm.generate_until(asked("generate_until", ("the fox", {**free, "until": ["<s>"]})))
        assert said.startswith(cut)
        if len(cut) < len(said):
            return
    pytest.fail("no text had the token <s>")


def test_samples_are_those_of_torchs_seed(folder: str) -> None:
    """Whatever the batch; two samples of one request differ."""
    sampled = {"until": ["\n"], "max_gen_toks": 16, "do_sample": True, "temperature": 1.5, "top_p": 0.9}
    requests, texts = asked("generate_until", *[(CONTEXT, sampled), ("once", sampled)] * 3), []
    for seed, batch_size in ((1, 1), (1, 4), (2, 4)):
        lm = ours(folder, 6, batch_size=batch_size)
        torch.manual_seed(seed)
        texts.append(lm.generate_until(requests))
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0][::2])) == 3
    greedy = {"until": ["\n"], "max_gen_toks": 16}
    likeliest = lm.generate_until(asked("generate_until", (CONTEXT, greedy)))
    for one in ({**sampled, "top_k": 1}, {**sampled, "temperature": 1e-9}, {**sampled, "top_p": 1e-9}):
        assert lm.generate_until(asked("generate_until", (CONTEXT, {"top_p": 1.0, **one}))) == likeliest


def test_the_models_own_settings_count_as_in_transformers(folder: str) -> None:
    lm, theirs = ours(folder, BEYOND), HFLM(folder, device="cpu", dtype="float32")
    requests = asked("generate_until", (CONTEXT, {"until": ["never said"], "max_gen_toks": 24}))
    plain = lm.generate_until(requests)
    for model in (lm.rnn.model, theirs.model):
        model.generation_config.repetition_penalty = 3.0
    assert lm.generate_until(requests) == theirs.generate_until(requests) != plain
    assert lm._sampling_params({"do_sample": True}).top_k == 50, "transformers' default"
    lm.rnn.model.generation_config.top_k = 7
    assert lm._sampling_params({"do_sample": True}).top_k == 7
    assert lm._sampling_params({"do_sample": True, "top_k": 3}).top_k == 3


def by_hand(lm: BoundedLM, context: list[int], continuation: list[int]) -> float:
    ids = torch.tensor([context + continuation])
    logprobs = lm.rnn.read(ids[:, :-1], lm.rnn.state()).log_softmax(-1)[0, len(context) - 1 :]
    return float(logprobs.gather(-1, torch.tensor(continuation)[:, None]).sum())


@pytest.mark.parametrize("policy", ["tova", "h2o", "window+2"])
def test_a_real_bound_is_what_reading_says(folder: str, policy: str) -> None:
    lm = ours(folder, 8, policy, batch_size=3)
    pairs = asked("loglikelihood", *PAIRS[:5])
    expected = [by_hand(lm, *lm._encode_pair(*pair)) for pair in PAIRS[:5]]
    scores = [score for score, _ in lm.loglikelihood(pairs)]
    close(scores, expected)
    unbounded = [score for score, _ in ours(folder, BEYOND).loglikelihood(pairs)]
    assert all(abs(a - b) > 1e-2 for a, b in zip(scores[:4], unbounded[:4], strict=True))

    texts = asked("loglikelihood_rolling", *((text,) for text in TEXTS))
    close(lm.loglikelihood_rolling(texts), [by_hand(lm, [lm.prefix_token_id], lm.tok_encode(text)) for text in TEXTS])


def test_a_context_is_read_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = ours(folder, 8, batch_size=4)
    widths: list[int] = []
    read = lm.rnn.read

    def counted(ids: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        widths.append(ids.numel())
        return read(ids, *arguments, **named)

    monkeypatch.setattr(lm.rnn, "read", counted)
    context, *answers = lm.tok_encode(CONTEXT), [3], [4], [5, 6, 7]
    lm._loglikelihood_tokens([(None, context, answer) for answer in answers], True)
    assert widths == [len(context), 3 * 2]


def local(folder: Path, name: str, rows: list[dict[str, Any]], **config: Any) -> None:
    """A task, in a file that the harness finds, over rows in another."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")}
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **config}
    (folder / f"{name}.yaml").write_text(json.dumps(task))


def pick(folder: Path) -> None:
    rows = [{"q": CONTEXT, "a": ["sleeps", "runs"], "label": i % 2} for i in range(3)]
    local(
        folder, "pick", rows, output_type="multiple_choice", doc_to_text="q", doc_to_choice="a", doc_to_target="label"
    )


def test_tasks_through_the_harness(folder: str, tmp_path: Path) -> None:
    lm = ours(folder, 8)
    (answer,) = lm.generate_until(asked("generate_until", (CONTEXT, {"until": ["\n"], "max_gen_toks": 8})))
    pick(tmp_path)
    local(
        tmp_path,
        "roll",
        [{"text": text} for text in TEXTS],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="text",
        metric_list=[{"metric": "byte_perplexity"}],
    )
    local(
        tmp_path,
        "say",
        [{"q": CONTEXT, "a": answer}, {"q": CONTEXT, "a": "something else"}],
        output_type="generate_until",
        doc_to_text="q",
        doc_to_target="a",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 8},
        metric_list=[{"metric": "exact_match"}],
    )
    arguments = {"pretrained": folder, "policy": "tova", "size": 8}
    ran = simple_evaluate(
        model="msrnn",
        model_args=arguments,
        tasks=["pick", "roll", "say"],
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    assert ran is not None
    results = ran["results"]
    likelier = lm.loglikelihood(asked("loglikelihood", (CONTEXT, " sleeps"), (CONTEXT, " runs")))
    assert results["pick"]["acc,none"] == pytest.approx(2 / 3 if likelier[0] > likelier[1] else 1 / 3)
    total = sum(lm.loglikelihood_rolling(asked("loglikelihood_rolling", *((text,) for text in TEXTS))))
    perplexity = torch.tensor(-total / len("".join(TEXTS))).exp()
    assert results["roll"]["byte_perplexity,none"] == pytest.approx(float(perplexity), rel=1e-4)
    assert results["say"]["exact_match,none"] == 0.5


def test_the_command_knows_the_model_and_finds_a_device(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness's own default is a GPU, whether there is one or not."""
    pick(tmp_path)
    arguments = f"pretrained={folder},policy=window+2,size=8"
    words = f"--model msrnn --model_args {arguments} --tasks pick --batch_size 2"
    places = ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words.split(), *places])
    own_tasks_only = partial(TaskManager, include_defaults=False)  # thousands more take twenty seconds to list
    monkeypatch.setattr("lm_eval.tasks.TaskManager", own_tasks_only)
    harness.main()
    (written,) = tmp_path.glob("out*.json")
    assert json.loads(written.read_text())["config"]["model"] == "msrnn"


def test_what_the_model_refuses_is_one_line(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pick(tmp_path)
    words = f"lm_eval --model msrnn --model_args pretrained={folder} --tasks pick --batch_size -1 --include_path"
    monkeypatch.setattr(sys, "argv", [*words.replace("size -1", "size=-1").split(), str(tmp_path)])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    with pytest.raises(SystemExit) as ended:
        harness.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("msrnn: batch_size=-1: must be")


def test_what_cannot_be(folder: str) -> None:
    for batch_size in ("auto", -1, 0, 10**12):
        with pytest.raises(
            ValueError, match=f"batch_size={batch_size}: must be a whole number of sequences, from 1 to"
        ):
            ours(folder, 8, batch_size=batch_size)
    lm = ours(folder, 8, max_length=16)
    with pytest.raises(ValueError, match="max_length=16"):
        lm.loglikelihood(asked("loglikelihood", ("a", " text of more than sixteen tokens")))
    with pytest.raises(ValueError, match="max_length=16"):
        lm.generate_until(asked("generate_until", ("a", {"until": [], "max_gen_toks": 16})))
    with pytest.raises(ValueError, match=r"generation kwargs num_beams, typical_p: not supported; use until, max_gen"):
        lm.generate_until(asked("generate_until", ("a", {"until": [], "typical_p": 0.5, "num_beams": 2})))
    lm.rnn.model.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(ValueError, match="the model's generation config has no_repeat_ngram_size, which is not supp"):
        lm.generate_until(asked("generate_until", ("a", {"until": [], "max_gen_toks": 4})))


def test_without_the_harness_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ImportError, match=r"pip install 'msrnn\[lm-eval\]'"):
        runpy.run_path(harness.__file__)
