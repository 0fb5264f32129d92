"""Errors that come from below the verbs: bad input is one line, and everything else keeps its traceback."""

from __future__ import annotations

import re
import shlex

import pytest
import torch

from msrnn.cli import _with_flag
from msrnn.errors import FileError, UsageError
from tests.helpers.command import Run


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 bytes.\nSee documentation"),
        MemoryError(),
    ],
    ids=["cpu", "cuda", "python"],
)
def test_out_of_memory_is_one_line(error: Exception, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(*_: object) -> None:
        raise error

    monkeypatch.setattr("msrnn.hf.rnn.MultiStateRNN.state", state)
    code, out, err = run("generate", "hi")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("msrnn: out of memory")
    assert "--size" in err
    assert "--batch" in err


def test_more_states_than_there_is_memory(run: Run) -> None:
    code, _, err = run("generate", "hi", "--size", 10**18, "--device", "cpu")
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(r"a state of size 10{18} for 1 sequence takes .* GB, and .* is free on cpu: size [\d,]+ fits", err)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TypeError, KeyError])
def test_other_errors_keep_their_traceback(kind: type[Exception], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `UsageError` is bad input; any other error, a ValueError too, is a defect."""

    def state(*_: object) -> None:
        raise kind("shapes do not match")

    monkeypatch.setattr("msrnn.hf.rnn.MultiStateRNN.state", state)
    with pytest.raises(kind, match="shapes"):
        run("generate", "hi")


@pytest.mark.parametrize(
    ("error", "words", "expected"),
    [
        (UsageError("too few", name="size", value=0), ["--size", "0"], "--size 0: too few"),
        (UsageError("unknown", name="state_dtype", value="x"), ["--state-dtype=x"], "--state-dtype x: unknown"),
        (UsageError("no name", name="policy", value="a b"), ["--policy", "a b"], "--policy a b: no name"),
        (UsageError("too few", name="size", value=0, advice="use more"), [], "size=0: too few; use more"),
        (FileError("size=0: too few", "a file"), ["--size", "0"], "a file: size=0: too few"),
    ],
)
def test_an_argument_is_named_by_the_flag_that_was_given(error: UsageError, words: list[str], expected: str) -> None:
    assert _with_flag(error, words) == expected


def test_a_device_that_torch_knows_and_msrnn_does_not(run: Run) -> None:
    code, out, err = run("generate", "hi", "--device", "mps")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--device mps: must be" in err


def test_a_backend_that_cannot_run_is_told_before_the_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msrnn.backends._has_triton", lambda: False)
    code, _, err = run("generate", "hi", "--backend", "triton", "--model", "/none/such", small=True)
    assert (code, err) == (
        2,
        "msrnn: --backend triton: the package triton is not installed: pip install 'msrnn[triton]'\n",
    )


UNREADABLE = {
    "generate hi --size x": "--size x: must be a whole number, or a mean and a budget, as in 512:upper",
    "generate hi --size ''": "--size '': must be a whole number, or a mean and a budget, as in 512:upper",
    "bench --size 8 --size 1.5": "--size 1.5: must be a whole number",
    "generate hi --temperature hot": "--temperature hot: must be a number",
    "judge --price 1 much": "--price much: must be a number",
    "eval retrieval --question middle": "--question middle: 'middle' is not one of 'both', 'first', 'last'",
    "generate hi --sise 3": "No such option: --sise (Possible options: --save, --seed, --size)",
    "read book.txt": "Missing option '--save'.",
}


@pytest.mark.parametrize("words", UNREADABLE)
def test_a_value_that_cannot_be_read_is_named(words: str, run: Run) -> None:
    code, out, err = run(*shlex.split(words), small=True)
    assert (code, out, err) == (2, "", f"msrnn: {UNREADABLE[words]}\n")
