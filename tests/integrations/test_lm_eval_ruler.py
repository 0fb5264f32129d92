"""The RULER tasks that need no download, by the documented command, on a tiny random model in place of the default."""

from __future__ import annotations

import json
import re
import shlex
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny import build, llama

pytest.importorskip("lm_eval", reason="the harness is not installed: pip install 'msrnn[lm-eval]'")
pytest.importorskip("nltk", reason="RULER needs nltk: pip install 'msrnn[lm-eval]'")
pytest.importorskip("scipy", reason="RULER needs scipy: pip install 'msrnn[lm-eval]'")
pytest.importorskip("wonderwords", reason="RULER needs wonderwords: pip install 'msrnn[lm-eval]'")

import lm_eval.tasks
import wonderwords
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from msrnn.integrations import lm_eval as harness
from msrnn.integrations import lm_eval_options
from msrnn.integrations.lm_eval import BoundedLM

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "evaluating-a-policy.md"
COMMAND = "python -m msrnn.integrations.lm_eval "
RULER = Path(lm_eval.tasks.__file__).parent / "ruler"
LENGTH, LIMIT = 1024, 2
BEYOND = 2 * LENGTH  # a size that no prompt reaches
# The least share of the asked length that a prompt has: prompts grow in steps, and leave room for the answer.
SHARE = {
    "niah_single_1": 0.7,
    "niah_multikey_2": 0.6,
    "niah_multikey_3": 0.4,
    "ruler_vt": 0.5,
    "ruler_cwe": 0.3,
    "ruler_fwe": 0.7,
}
FEW = ["niah_single_1", "ruler_vt"]
# The words of the tasks, from which the tokenizer is trained: characters alone would make every prompt too long.
WORDS = """
A special magic number uuid is hidden within the following text. Make sure to memorize it. I will quiz you about the
number afterwards. What is the special magic number for the key mentioned in the provided text? One of the special magic
numbers uuids for the key is: The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
Memorize and track the chain(s) of variable assignment hidden in the following text. Question: Find all variables that
are assigned the value in the text above. Answer: According to the chain(s) of variable assignment in the text above, 5
variables are assgined the value, they are: VAR = VAR
"""
NUMBERS = " ".join(f"{number}." for number in range(1, 400))  # of a list


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that reads long prompts, and a tokenizer of bytes and whole words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<end>"}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, special_tokens=[*special.values()], initial_alphabet=alphabet)
    listed = wonderwords.RandomWord()._categories  # as the tasks take them
    texts = [WORDS * 20, *(" ".join(words) for words in listed.values()), NUMBERS * 4]
    tokenizer.train_from_iterator(texts, trainer)
    path = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    config = llama(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=2 * LENGTH)
    build(config).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError("a test must not use the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def default_is_tiny(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small default model is this one."""
    monkeypatch.setattr("msrnn.hf.loading.small_model", lambda *_: folder)


def documented() -> list[str]:
    """The words of the guide's command."""
    text = GUIDE.read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"^{re.escape(COMMAND)}(.*ruler.*)$", text, flags=re.MULTILINE)
    return shlex.split(line)


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_guide_names_the_tasks() -> None:
    words = documented()
    assert words[words.index("--tasks") + 1].split(",") == [*SHARE]
    assert json.loads(words[words.index("--metadata") + 1]) == {"max_seq_lengths": [LENGTH]}


@pytest.mark.usefixtures("default_is_tiny")
@pytest.mark.slow
@pytest.mark.parametrize("tasks", [FEW, [task for task in SHARE if task not in FEW]], ids=["few", "rest"])
def test_the_documented_command_runs_offline(
    tasks: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer questions, shorter answers, and a size at which they must be those of the harness's own model."""
    words = documented()
    words[words.index("--tasks") + 1] = ",".join(tasks)
    words += ["--limit", str(LIMIT), "--gen_kwargs", "max_gen_toks=24", "--model_args", f"size={BEYOND}"]
    words += ["--device", "cpu", "--include_path", str(RULER), "--output_path", str(tmp_path), "--log_samples"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    only_ruler = partial(TaskManager, include_defaults=False)  # thousands more take twenty seconds to list
    monkeypatch.setattr("lm_eval.tasks.TaskManager", only_ruler)
    harness.main()

    (written,) = tmp_path.rglob("results_*.json")
    results = json.loads(written.read_text())["results"]
    assert results.keys() == {*tasks}
    theirs = HFLM(str(folder), device="cpu", dtype="float32")
    requests, answers = [], []
    for task in tasks:
        assert 0 <= results[task][f"{LENGTH},none"] <= 1
        rows = samples(tmp_path, task)
        assert len(rows) == LIMIT
        for row in rows:
            prompt, settings = row["arguments"]["gen_args_0"].values()
            requests.append(Instance("generate_until", {}, (prompt, settings), 0))
            answers.append(row["resps"][0][0])
            assert row["doc"]["max_length"] == LENGTH
            assert row["doc"]["input"] in prompt
            assert SHARE[task] * LENGTH < len(theirs.tok_encode(prompt)) <= LENGTH, task

    assert answers == theirs.generate_until(requests)
    forgetful = BoundedLM(str(folder), "tova", 64, device="cpu").generate_until(requests)
    assert all(one != other for one, other in zip(answers, forgetful, strict=True))


@pytest.mark.usefixtures("default_is_tiny")
@pytest.mark.parametrize(
    ("words", "metadata"),
    [
        ("--model msrnn --tasks x", {"tokenizer": "FOLDER"}),
        ("run -M msrnn -a policy=tova,size=8", {"tokenizer": "FOLDER"}),
        ("--model msrnn --model_args pretrained=org/name size=8", {"tokenizer": "org/name"}),
        ('--model msrnn --metadata {"max_seq_lengths":[64]}', {"max_seq_lengths": [64], "tokenizer": "FOLDER"}),
        ("--model msrnn --metadata max_seq_lengths=[64]", {"max_seq_lengths": [64], "tokenizer": "FOLDER"}),
        ("--config PAIRS", {"seed": 64, "tokenizer": "org/name"}),
        ("--config MAPPING", {"max_seq_lengths": [64], "tokenizer": "FOLDER"}),
        ("--config MAPPING --model hf", None),
        ("--model hf --model_args pretrained=org/name", None),
        ("--model msrnn --metadata tokenizer=org/other", None),
        ("ls tasks", None),
    ],
)
def test_tasks_learn_where_the_tokenizer_is(
    words: str, metadata: dict[str, Any] | None, folder: Path, tmp_path: Path
) -> None:
    files = {
        "PAIRS": "model: msrnn\nmodel_args: pretrained=org/name\nmetadata: seed=64",
        "MAPPING": "model: msrnn\nmodel_args: {size: 8}\nmetadata: {max_seq_lengths: [64]}",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        words = words.replace(name, str(tmp_path / name))
    given = words.split()
    added = lm_eval_options.with_tokenizer(given)[len(given) :]
    if metadata is None:
        assert added == []
    else:
        option, value = added
        assert option == "--metadata"
        assert json.loads(value) == {**metadata, "tokenizer": metadata["tokenizer"].replace("FOLDER", str(folder))}
