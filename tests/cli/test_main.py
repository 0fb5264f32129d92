"""Exit codes, and bad input as one line."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.markup import render
from safetensors.torch import save as to_bytes

from msrnn import __version__
from msrnn.cli import app
from msrnn.cli.options import SamplingOptions
from tests.helpers.command import Run

VERBS = [command.callback.__name__.replace("_", "-") for command in app.registered_commands if command.callback]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Path:
    """A working folder with a text, a saved state, and files that are not states."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words to read")
    assert run("read", "text.txt", "--save", "state", "--size", 8).code == 0
    whole = Path("state").read_bytes()
    Path("truncated").write_bytes(whole[: len(whole) // 2])
    Path("foreign").write_bytes(b"not a state at all")
    for name, described in (("list", "[]"), ("null", "null"), ("odd", '{"policy": ["tova"]}')):
        Path(name).write_bytes(to_bytes({"0.seen": torch.zeros(1)}, {"msrnn": described}))
    Path("empty.txt").write_text(" \n")
    Path("latin.txt").write_bytes("déjà".encode("latin-1"))
    return tmp_path


BAD = {
    "size 0": (["generate", "hi", "--size", "0"], "--size 0: "),
    "size no number": (["generate", "hi", "--size", "many"], "--size"),
    "protects too much": (["generate", "hi", "--policy", "window+8", "--size", "8"], "first=8"),
    "unknown policy": (["generate", "hi", "--policy", "tovas"], "did you mean 'tova'?"),
    "empty prompt": (["generate", "  "], "PROMPT"),
    "empty standard input": (["generate", "-"], "empty"),
    "temperature": (
        ["generate", "hi", "--temperature", "0"],
        "--temperature 0: must be a number, 1e-06 or more; use --greedy",
    ),
    "temperature below": (["chat", "--temperature", "1e-300"], "--temperature 1e-300: must be a number, 1e-06 or more"),
    "temperature inf": (["generate", "hi", "--temperature", "inf"], "--temperature inf: must be a number"),
    "temperature nan": (["chat", "--temperature", "nan"], "--temperature nan: must be a number"),
    "top-p nan": (["generate", "hi", "--top-p", "nan"], "--top-p nan"),
    "seed below 0": (["generate", "hi", "--seed", "-1"], "--seed -1: must be from 0 to"),
    "seed above": (["generate", "hi", "--seed", "9" * 30], "must be from 0 to 4294967295"),
    "seed beside a state": (["generate", "hi", "--state", "state", "--seed", "-1"], "msrnn: --seed -1: must be"),
    "no tokens": (
        ["read", "text.txt", "--save", "new", "--tokens", "0"],
        "--tokens 0: must be a whole number, 1 or more",
    ),
    "replaces its text": (["read", "text.txt", "--save", "text.txt", "--force"], "text.txt: is read by this command"),
    "list for a state": (
        ["generate", "hi", "--state", "list"],
        "list: not a state that msrnn saved, its description is []",
    ),
    "null for a state": (["chat", "--state", "null"], "null: not a state that msrnn saved, its description is None"),
    "state of no policy": (
        ["read", "text.txt", "--load", "odd", "--save", "new"],
        "odd: not a state that msrnn saved, its policy is ['tova']",
    ),
    "top-p": (["generate", "hi", "--top-p", "1.5"], "--top-p 1.5: must be a number from 1e-06 to 1"),
    "greedy at a temperature": (["generate", "hi", "--greedy", "--temperature", "3.0"], "and --temperature 3 is"),
    "greedy with top-p": (["chat", "--greedy", "--top-p", "0.9"], "and --top-p 0.9 is"),
    "max new tokens": (["chat", "--max-new-tokens", "0"], "--max-new-tokens (--max-tokens) 0: must be a whole number"),
    "max tokens": (
        ["generate", "hi", "--max-tokens", "0"],
        "--max-new-tokens (--max-tokens) 0: must be a whole number",
    ),
    "max tokens no number": (["chat", "--max-tokens", "few"], "--max-new-tokens (--max-tokens) few: "),
    "dtype": (["generate", "hi", "--dtype", "int3"], "--dtype int3: must be one of"),
    "device": (["generate", "hi", "--device", "abacus"], "--device abacus: must be"),
    "state dtype": (["read", "text.txt", "--save", "new", "--state-dtype", "int4"], "--state-dtype int4: must be int8"),
    "positions": (["chat", "--positions", "far"], "--positions far: "),
    "backend": (
        ["generate", "hi", "--backend", "cublas"],
        "--backend cublas: must be one of auto, torch, numba",
    ),
    "backend of the old name": (["read", "text.txt", "--save", "new", "--backend", "compiled"], "--backend compiled: "),
    "missing text": (["read", "none.txt", "--save", "new"], "none.txt"),
    "empty text": (["read", "empty.txt", "--save", "new"], "empty.txt"),
    "not UTF-8": (["read", "latin.txt", "--save", "new"], "latin.txt: not UTF-8"),
    "target exists": (["read", "text.txt", "--save", "state"], "--force"),
    "target without folder": (["read", "text.txt", "--save", "none/new"], "none does not exist"),
    "target is a folder": (["read", "text.txt", "--save", "."], "name a file"),
    "missing state": (["generate", "hi", "--state", "none", "--size", "8"], "none: no such file"),
    "truncated state": (["generate", "hi", "--state", "truncated", "--size", "8"], "truncated: truncated"),
    "foreign state": (["chat", "--state", "foreign", "--size", "8"], "foreign: "),
    "state of another size": (
        ["generate", "hi", "--state", "state", "--size", "9"],
        "--size 9: state was saved with",
    ),
    "state of another policy": (
        ["chat", "--state", "state", "--size", "8", "--policy", "h2o"],
        "was saved with --policy tova",
    ),
    "bounded state, full model": (
        ["chat", "--state", "state", "--policy", "full"],
        "was saved with --policy tova",
    ),
    "system in the middle": (["chat", "--state", "state", "--size", "8", "--system", "x"], "--system 'x'"),
    "demo of one token": (["demo", "--tokens", "1"], "--tokens 1"),
    "unknown option": (["generate", "hi", "--sise", "8"], "--size"),
    "unknown verb": (["converse"], "converse"),
    "missing argument": (["generate"], "prompt"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_code_2(name: str, files: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, names = BAD[name]
    monkeypatch.setattr("msrnn.hf.loading.AutoModelForCausalLM", None)  # refused before the slow part
    before = {path: path.read_bytes() for path in files.iterdir()}
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("msrnn: ")
    assert err.count("\n") == 1
    assert names in err
    assert {path: path.read_bytes() for path in files.iterdir()} == before


def test_greedy_unless_sampling_is_asked_for() -> None:
    wishes = {(None, None): False, (None, 3.0): True, (True, None): True, (True, 3.0): True, (False, None): False}
    assert {wish: SamplingOptions(*wish, None).settings(8)["do_sample"] for wish in wishes} == wishes


def test_prompt_with_bytes_that_are_no_utf8(run: Run) -> None:
    escaped = b"\xff hello".decode("utf-8", "surrogateescape")
    code, out, _ = run("generate", escaped, "--max-new-tokens", 4)
    assert code == 0
    assert out == run("generate", "\ufffd hello", "--max-new-tokens", 4).out


def test_missing_model(run: Run, tmp_path: Path) -> None:
    code, out, err = run("generate", "hi", "--model", tmp_path / "none", small=True)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "none': no such folder" in err


def test_model_without_a_tokenizer(run: Run, folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    for path in bare.glob("*token*"):
        path.unlink()
    code, out, err = run("generate", "hi", "--model", bare, small=True)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "bare': the folder has no tokenizer; save it there as well" in err


def test_state_of_another_model_is_refused(run: Run, tmp_path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = AutoModelForCausalLM.from_pretrained(folder)
    other.lm_head.weight.data += 1
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "other")
    (tmp_path / "text").write_text("abc")
    arguments = ("read", tmp_path / "text", "--save", tmp_path / "state", "--model", tmp_path / "other")
    assert run(*arguments, small=True).code == 0
    code, _, err = run("generate", "hi", "--state", tmp_path / "state")
    assert (code, err.count("\n")) == (2, 1)
    named = "was saved with the weights of other LlamaForCausalLM(layers 2"
    assert f"{tmp_path / 'state'}: {named}" in err
    assert f", and this model is {folder.name} LlamaForCausalLM(layers 2" in err


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_with_examples(verb: str, run: Run) -> None:
    code, out, _ = run(verb, "--help", small=True)
    assert code == 0
    examples = [line.strip() for line in out[out.index("Examples:") :].splitlines()[1:] if line.strip()]
    assert any(line.startswith(f"msrnn {verb}") for line in examples)
    assert all("msrnn " in line for line in examples)


def help_pages(command: Any, *names: str) -> Iterator[tuple[str, ...]]:
    yield names
    for name, inner in getattr(command, "commands", {}).items():
        yield from help_pages(inner, *names, name)


@pytest.mark.parametrize("words", list(help_pages(typer.main.get_command(app))), ids=" ".join)
def test_short_help(words: tuple[str, ...], run: Run) -> None:
    short, long = run(*words, "-h", small=True), run(*words, "--help", small=True)
    assert short == long
    assert (short.code, short.err) == (0, "")
    assert "Usage: msrnn" in short.out


def commands(command: Any) -> Iterator[Any]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from commands(inner)


def test_help_has_no_brackets_that_are_taken_for_markup() -> None:
    pages = list(commands(typer.main.get_command(app)))
    texts = [page.help for page in pages] + [getattr(each, "help", None) for page in pages for each in page.params]
    assert [text for text in texts if text and render(text).plain != text] == []


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, msrnn.cli; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version(run: Run) -> None:
    assert run("--version", small=True) == (0, f"msrnn {__version__}\n", "")


def test_ctrl_c_ends_with_130_and_other_packages_are_silent(folder: Path, tmp_path: Path) -> None:
    """Whichever are installed: standard error has our own line only."""
    endless = shutil.copytree(folder, tmp_path / "endless")
    changes = {"generation_config.json": {}, "config.json": {"max_position_embeddings": 10**7}}  # no remark about these
    for name, more in changes.items():  # no stop token
        settings = json.loads((endless / name).read_text())
        (endless / name).write_text(json.dumps({**settings, "eos_token_id": None, **more}))
    arguments = ["generate", "hello", "--model", str(endless), "--max-new-tokens", "1000000", "--size", "8"]
    program = [sys.executable, "-c", "import sys; from msrnn.cli import main; sys.exit(main())", *arguments]
    # Where tests run in the background, Ctrl-C is ignored, and a child would inherit that.
    heeding: dict[str, Any] = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **heeding) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    said = r"\n?msrnn: stopped after \d+ tokens?.*; the state is not saved, --save FILE saves it\n"
    assert re.fullmatch(said, err)
