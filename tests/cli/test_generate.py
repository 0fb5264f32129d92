from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from msrnn import MultiStateRNN
from msrnn.hf.chat_template import opening
from msrnn.recall import Recall
from tests.helpers.characters import END
from tests.helpers.command import TEXT, Run, same

SIZE = ("--size", 16)
SHORT = ("--max-new-tokens", 12)


def expected(folder: Path, prompt: str, policy: str = "tova", size: int | None = 16, **recall: Any) -> str:
    """What the library generates greedily."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=not prompt.startswith("<s>"))["input_ids"]])
    out = MultiStateRNN(model, policy, size, **recall).generate(ids, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_generate_says_what_the_library_says(run: Run, folder: Path) -> None:
    prompt = "[bold]markup[/] is text: " + TEXT
    code, out, err = run("generate", prompt, *SIZE, *SHORT)
    assert (code, out) == (0, expected(folder, prompt) + "\n")
    assert err.count("\n") == 1


def test_policy_and_size_reach_the_model(run: Run, folder: Path) -> None:
    said = {
        policy: run("generate", TEXT, "--policy", policy, *SIZE, *SHORT).out for policy in ("full", "tova", "window+4")
    }
    assert said == {policy: expected(folder, TEXT, policy, None if policy == "full" else 16) + "\n" for policy in said}
    assert len(set(said.values())) > 1


def test_recall_reaches_the_model(run: Run, folder: Path, tmp_path: Path) -> None:
    """Each option of it changes the answer, but the place of the archive does not."""
    asked = ("generate", TEXT, *SIZE, *SHORT, "--recall", 8)
    changes: dict[tuple[object, ...], dict[str, Any]] = {
        (): {},
        ("--recall-every", 5): {"recall_every": 5},
        ("--recall-while-reading", 4): {"recall_while_reading": 4},
    }
    said = {more: run(*asked, *more).out for more in changes}
    assert said == {more: expected(folder, TEXT, recall=8, **how) + "\n" for more, how in changes.items()}
    assert len({*said.values(), run("generate", TEXT, *SIZE, *SHORT).out}) == 4
    assert run(*asked, "--archive", tmp_path / "archive").out == said[()]
    assert (tmp_path / "archive").is_dir()
    assert run(*asked, "--search", "exact").out == said[()]
    for more, name in ((("--search", "odd"), "--search odd"), (("--archive-bytes", 0), "--archive-bytes 0")):
        assert name in run(*asked, *more).err
        assert f"{name}: " in run("generate", TEXT, *more).err, "without --recall"


def test_search_reaches_the_model(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit keys choose almost always what exact ones do, so the answer does not show it."""
    made = list[Recall]()
    init = MultiStateRNN.__init__

    def seen(self: MultiStateRNN, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        assert self.spec.recall is not None
        made.append(self.spec.recall)

    monkeypatch.setattr(MultiStateRNN, "__init__", seen)
    options = ("--recall", 8, "--search", "int8", "--archive-bytes", 10**8)
    assert run("generate", TEXT, *SIZE, "--max-new-tokens", 1, *options).code == 0
    assert made == [Recall(8, search="int8", limit=10**8)]


def test_a_full_archive_drops_the_oldest_tokens_and_says_so(run: Run, tmp_path: Path) -> None:
    state, limit = tmp_path / "book", ("--archive-bytes", 2300 * 256)
    text = (TEXT * 9)[:2400]
    read = run("read", "-", "--save", state, *SIZE, "--recall", 8, *limit, stdin=text)
    assert read.code == 0, read.err
    told = "the archive no longer has the first 1,024 tokens: --archive-bytes had no room for them"
    assert told in read.err
    assert "an archive of 352.5 kB without the first 1,024 tokens" in read.out
    asked = ("generate", "And so", "--state", state, "--max-new-tokens", 2)
    assert told in run(*asked).err
    chat = run("chat", "--state", state, *limit, "--max-new-tokens", 2, stdin=f"{text[:1000]}\n")
    assert "without the first 1,024 tokens" in chat.err
    assert "the archive no longer has the first 2,048 tokens" in chat.err
    refused = run("read", "-", "--save", tmp_path / "small", "--recall", 8, "--archive-bytes", 1000, stdin=text)
    assert (refused.code, "2,048 tokens are the least" in refused.err) == (2, True)


def test_read_once_and_ask_many_times(run: Run, tmp_path: Path) -> None:
    """An archive is saved with its state, and each question finds it as it was."""
    state = tmp_path / "book"
    read = run("read", "-", "--save", state, *SIZE, "--recall", 8, stdin=TEXT)
    assert re.search(r"16 KV rows held in each layer, [\d.]+ kB, and an archive of [\d.]+ kB", read.out), read.out
    asked = ("generate", "And so", "--state", state, *SHORT)
    answers = [run(*asked, "--recall", 8), run(*asked), run(*asked, "--archive", tmp_path / "archive")]
    assert {answer.code for answer in answers} == {0}
    assert len({answer.out for answer in answers}) == 1
    assert run("read", "-", "--save", tmp_path / "bare", *SIZE, stdin=TEXT).code == 0
    assert run("generate", "And so", "--state", tmp_path / "bare", *SHORT).out != answers[0].out


def test_from_a_saved_state_is_in_one_go(run: Run, tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert run("read", "-", "--save", state, *SIZE, stdin=TEXT).code == 0
    saved = state.read_bytes()
    asked = run("generate", "-", "--state", state, *SIZE, *SHORT, stdin="And so\n")
    assert asked[:2] == run("generate", TEXT + "And so", *SIZE, *SHORT)[:2]
    assert asked.out.strip()
    assert asked.out != run("generate", "And so", *SIZE, *SHORT).out
    assert state.read_bytes() == saved


def test_save_covers_prompt_and_answer(run: Run, tmp_path: Path) -> None:
    said = run("generate", TEXT, "--save", tmp_path / "told", *SIZE, *SHORT).out.removesuffix("\n")
    assert run("read", "-", "--save", tmp_path / "read", *SIZE, stdin=TEXT + said).code == 0
    assert same(tmp_path / "told", tmp_path / "read")


def test_chat_renders_the_template(run: Run, folder: Path) -> None:
    prompt = opening(AutoTokenizer.from_pretrained(folder), "hello")
    assert prompt == "<s><system>be kind<end>\n<user>hello<end>\n<model>"
    assert run("generate", "hello", "--chat", *SIZE, *SHORT).out == expected(folder, prompt) + "\n"


def test_sampling_follows_the_seed(run: Run) -> None:
    def sampled(seed: int) -> str:
        return run("generate", "hello", *SIZE, *SHORT, "--temperature", 2, "--top-p", 0.9, "--seed", seed).out

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) > 1


@pytest.mark.slow
@pytest.mark.small_model
def test_small_model_knows_paris(run: Run) -> None:
    pytest.importorskip("gguf")
    from msrnn.hf.loading import small_model

    try:
        small_model()
    except ValueError as error:
        pytest.skip(str(error))
    prompt = "The capital of France is"
    code, out, _ = run("generate", prompt, "--size", 64, "--max-new-tokens", 8, small=True)
    assert code == 0
    assert "Paris" in out


def test_a_cut_answer_says_so(run: Run, folder: Path, tmp_path: Path) -> None:
    """With its speed, on standard error; one that ended by itself is not cut, even at the last token."""
    code, out, err = run("generate", "hello", *SIZE, *SHORT)
    assert code == 0
    assert re.fullmatch(r"12 tokens, [\d,.]+ tokens/s; cut at --max-new-tokens 12\n", err)
    assert re.fullmatch(r"1 token; cut at --max-new-tokens 1\n", run("generate", "hello", "--max-new-tokens", 1).err)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(out.removesuffix("\n"), add_special_tokens=False)["input_ids"]
    last = next(n for n in range(2, 12) if ids[n] not in ids[:n])
    ending = shutil.copytree(folder, tmp_path / "ending")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((ending / name).read_text())
        (ending / name).write_text(json.dumps({**settings, "eos_token_id": [END, ids[last]]}))
    for most in (last + 1, 64):
        ended = run("generate", "hello", *SIZE, "--max-new-tokens", most, "--model", ending, small=True)
        assert re.fullmatch(rf"{last + 1} tokens, [\d,.]+ tokens/s\n", ended.err)
