"""--positions auto: past the training length, read, generate and serve follow one rule, and say so once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from msrnn import MultiStateRNN
from msrnn.core.state_file import load_description
from msrnn.hf.chat_template import encode
from msrnn.hf.long_read import LongRead
from msrnn.hf.model_options import ModelOptions
from msrnn.size import resolve
from tests.helpers.command import TEXT, Run, same
from tests.helpers.tiny import build, llama

SIZE = ("--size", 16)
RULE = "--policy tova+1~64 --positions compressed"
TOLD = f"past the 200 tokens that this model was trained on, its state continues with {RULE}"


def made(path: Path) -> tuple[Any, Any]:
    description = load_description(path)
    return description["policy"], description["positions"]


def test_a_text_that_passes_the_length(run: Run, short: Path, tmp_path: Path) -> None:
    """From its beginning, as with the options that the remark names; what is saved goes on without a remark."""
    words = ("read", "-", *SIZE, "--model", short)
    code, _, err = run(*words, "--save", tmp_path / "auto", stdin=TEXT, small=True)
    assert (code, err.count("\n"), err.count(TOLD)) == (0, 1, 1)
    explicit = run(*words, *RULE.split(), "--save", tmp_path / "explicit", stdin=TEXT, small=True)
    assert (explicit.code, explicit.err) == (0, "")
    assert same(tmp_path / "auto", tmp_path / "explicit")
    assert made(tmp_path / "auto") == ("tova+1~64", "compressed:lnln")
    question = ("generate", "a", "--state", tmp_path / "auto", "--model", short, "--max-new-tokens", 4)
    for more in ((), SIZE, ("--policy", "tova")):
        asked = run(*question, *more, small=True)
        assert (asked.code, "past the" in asked.err) == (0, False)
    fits = run(*words, "--tokens", 200, "--save", tmp_path / "fits", stdin=TEXT, small=True)
    assert (fits.code, fits.err, made(tmp_path / "fits")) == (0, "", ("tova", "original"))


def test_a_saved_state_is_converted(run: Run, short: Path, tmp_path: Path) -> None:
    """By read and by generate, where the text that they add passes the length."""
    begun = tmp_path / "begun"
    assert run("read", "-", "--save", begun, *SIZE, "--model", short, stdin=TEXT[:150], small=True).code == 0
    read = run("read", "-", "--load", begun, "--save", tmp_path / "on", "--model", short, stdin="b" * 60, small=True)
    assert (read.code, read.err.count(TOLD)) == (0, 1)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(short), AutoTokenizer.from_pretrained(short)
    rnn = MultiStateRNN(model, "tova", 16)
    longer = MultiStateRNN(model, "tova+1~64", 16, positions="compressed")
    state = longer.convert_state(rnn.load_state(begun))
    ids = tokenizer("b" * 60, add_special_tokens=False, return_tensors="pt").input_ids
    longer.read(ids, state)
    state.save(tmp_path / "by hand")
    assert same(tmp_path / "on", tmp_path / "by hand")

    words = ("generate", "b" * 20, "--state", begun, "--model", short, "--save")
    fits = run(*words, tmp_path / "fits", "--max-new-tokens", 4, small=True)
    assert (fits.code, "past the" in fits.err, made(tmp_path / "fits")) == (0, False, ("tova", "original"))
    long = run(*words, tmp_path / "long", "--max-new-tokens", 60, small=True)
    assert (long.code, long.err.count(TOLD)) == (0, 1)
    assert made(tmp_path / "long") == ("tova+1~64", "compressed:lnln")
    state = longer.convert_state(rnn.load_state(begun))
    ids = tokenizer("b" * 20, add_special_tokens=False, return_tensors="pt").input_ids
    out = longer.generate(ids, state=state, max_new_tokens=60, do_sample=False)[0, 20:]
    assert long.out.strip() == tokenizer.decode(out, skip_special_tokens=True).strip()


def test_an_interrupted_read_goes_on_in_the_same_way(run: Run, short: Path, tmp_path: Path) -> None:
    """The checkpoint has the positions that the whole text needs."""
    longer = MultiStateRNN(AutoModelForCausalLM.from_pretrained(short), "tova+1~64", 16, positions="compressed")
    ids = encode(AutoTokenizer.from_pretrained(short), TEXT, add_special_tokens=True)
    state = longer.state()
    longer.read(ids[:, :100], state)
    state.save(tmp_path / "state.partial", LongRead(ids, tmp_path / "none").notes(100, longer))
    words = ("read", "-", *SIZE, "--model", short, "--save")
    code, _, err = run(*words, tmp_path / "state", stdin=TEXT, small=True)
    assert (code, err.count("continuing after 100 of")) == (0, 1)
    assert run(*words, tmp_path / "whole", stdin=TEXT, small=True).code == 0
    assert same(tmp_path / "state", tmp_path / "whole")


def test_a_state_that_has_passed_the_length_is_not_converted(run: Run, short: Path, tmp_path: Path) -> None:
    """By no verb: original positions were asked for, and a horizon would evict what they keep."""
    words = ("read", "-", *SIZE, "--model", short)
    read = run(*words, "--positions", "original", "--save", tmp_path / "long", stdin=TEXT, small=True)
    assert (read.code, made(tmp_path / "long")) == (0, ("tova", "original"))
    warned = (
        "the state has read 274 tokens with --positions original, past the 200 that this model was trained on: it "
        f"stays as it is, and answers may get worse; read the text from its beginning with {RULE}\n"
    )
    on, saved = ("--model", short, "--save", tmp_path / "on", "--force"), tmp_path / "long"
    short_answer = ("--max-new-tokens", 2)
    for more, stdin in (
        (("read", "-", "--load", saved), "b" * 20),
        (("generate", "b", "--state", saved, *short_answer), ""),
        (("chat", "--state", saved, *short_answer), "a\nb\nc\n"),
    ):
        ran = run(*more, *on, stdin=stdin, small=True)
        assert (ran.code, ran.err.count(warned), ran.err.count("past the")) == (0, 1, 1), ran.err
        assert made(tmp_path / "on") == ("tova", "original")

    rnn = MultiStateRNN(AutoModelForCausalLM.from_pretrained(short), "tova", 16)
    state = rnn.load_state(saved)
    run("read", "-", "--load", saved, *on, stdin="b" * 20, small=True)
    rnn.read(encode(AutoTokenizer.from_pretrained(short), "b" * 20, add_special_tokens=False), state)
    state.save(tmp_path / "by hand")
    assert same(tmp_path / "on", tmp_path / "by hand")


@pytest.mark.parametrize(("done", "kept"), [(200, False), (201, True)])
def test_a_checkpoint_with_original_positions(done: int, kept: bool, run: Run, short: Path, tmp_path: Path) -> None:
    """It is converted, unless it has passed the length."""
    rnn = MultiStateRNN(AutoModelForCausalLM.from_pretrained(short), "tova", 16)
    ids = encode(AutoTokenizer.from_pretrained(short), TEXT, add_special_tokens=True)
    state = rnn.state()
    rnn.read(ids[:, :done], state)
    state.save(tmp_path / "state.partial", LongRead(ids, tmp_path / "none").notes(done, rnn))
    code, _, err = run("read", "-", *SIZE, "--model", short, "--save", tmp_path / "state", stdin=TEXT, small=True)
    assert (code, err.count(f"continuing after {done} of")) == (0, 1)
    assert (err.count(f"the state has read {done} tokens with"), err.count(TOLD)) == (int(kept), int(not kept))
    assert made(tmp_path / "state") == (("tova", "original") if kept else ("tova+1~64", "compressed:lnln"))


def test_original_positions_that_were_asked_for(run: Run, short: Path, tmp_path: Path) -> None:
    """They stay, and the warning's advice is the rule."""
    words = ("read", "-", *SIZE, "--model", short, "--positions", "original")
    code, _, err = run(*words, "--save", tmp_path / "one", stdin=TEXT, small=True)
    warned = "--positions original: the text may reach token 274, past the 200 that this model was trained on"
    assert (code, err.count("\n"), err.count(warned)) == (0, 1, 1)
    assert f"read the text from its beginning with {RULE}" in err
    assert made(tmp_path / "one") == ("tova", "original")
    full = run(*words, "--policy", "full", "--save", tmp_path / "full", stdin=TEXT, small=True)
    assert "answers may get worse (policy 'full' keeps every token; use a bounded policy" in full.err


def test_a_text_that_cannot_follow_the_rule(run: Run, short: Path, tmp_path: Path) -> None:
    words = ("read", "-", "--model", short, "--size", 200, "--save", tmp_path / "state")
    code, _, err = run(*words, stdin=TEXT, small=True)
    assert (code, err.count("\n")) == (0, 1)
    assert "past the 200 tokens that this model was trained on, answers may get worse (size=200 is not below" in err
    assert made(tmp_path / "state") == ("tova", "original")


def test_under_a_budget_the_size_is_that_of_the_largest_layer(run: Run) -> None:
    """A horizon must be larger than the size of every layer."""
    options = ModelOptions(None, *resolve("echo:pyramid", 60))
    rnn = options.rnn(build(llama()))
    largest = max(rnn.spec.fingerprint["size"])
    found = options.extend(rnn, 800)
    assert largest > 60
    assert found.flags.startswith(f"--policy echo+1~{4 * largest}:pyramid ")
    assert found.rnn(rnn.model).spec.fingerprint["size"] == rnn.spec.fingerprint["size"]
    for verb in ("read", "serve"):
        shown = " ".join(run(verb, "--help", small=True).out.replace("│", " ").split())
        assert "4 times the size (under a budget, that of the largest layer)" in shown
