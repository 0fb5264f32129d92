"""Options that are not given come from the saved state; those that contradict it are refused."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import msrnn
from msrnn.cli.model_options import GivenOptions
from msrnn.core.state_file import load_description
from msrnn.errors import UsageError
from msrnn.policy import Policy
from msrnn.size import Size
from tests.helpers.command import TEXT, Run, same
from tests.helpers.networks import write_random_weights
from tests.helpers.tiny import build, llama

README = Path(__file__).parents[2] / "README.md"
SHORT = ("--max-new-tokens", 8)
MADE: dict[str, tuple[tuple[object, ...], dict[str, Any]]] = {
    "size": (("--size", 24), {"size": 24}),
    "policy": (("--size", 16, "--policy", "window+4"), {"policy": "window+4"}),
    "numbers": (
        ("--size", 16, "--policy", "decay=0.9,recent=0.25"),
        {"policy": "decay=0.9,per=layer,first=0,recent=0.25"},
    ),
    "positions": (("--size", 16, "--positions", "compressed"), {"positions": "compressed:lnln"}),
    "fitted": (("--size", 16, "--positions", "fitted"), {"positions": "fitted"}),
    "int8": (("--size", 16, "--state-dtype", "int8"), {"dtype": "int8"}),
    "bfloat16": (("--size", 16, "--dtype", "bfloat16"), {"dtype": "bfloat16"}),
    "both": (
        ("--size", 16, "--dtype", "bfloat16", "--state-dtype", "fp8"),
        {"dtype": "fp8", "model_dtype": "bfloat16"},
    ),
    "full": (("--policy", "full"), {"policy": "full", "size": None}),
    "recall": (("--size", 16, "--recall", 8), {"recall": "8"}),
}
FURTHER = ("size", "numbers", "bfloat16")  # others differ in the same way, and in more


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in FURTHER else ()) for name in MADE]
)
def test_all_that_goes_on_goes_on_alike(name: str, run: Run, tmp_path: Path) -> None:
    how, says = MADE[name]
    state = tmp_path / "state"
    assert run("read", "-", "--save", state, *how, stdin=TEXT).code == 0
    assert says.items() <= load_description(state).items()
    bare, given = (run("generate", "abc", "--state", state, *SHORT, *more) for more in ((), how))
    assert bare.code == given.code == 0, bare.err
    assert bare.out == given.out
    for path, more in ((tmp_path / "bare", ()), (tmp_path / "given", how)):
        assert run("read", "-", "--load", state, "--save", path, *more, stdin="on").code == 0
        assert says.items() <= load_description(path).items()
    assert name == "both" or same(tmp_path / "bare", tmp_path / "given")  # 8-bit floats cannot be compared
    talk = run("chat", "--state", state, "--save", tmp_path / "talk", *SHORT, stdin="hello\n")
    assert talk.code == 0, talk.err
    assert says.items() <= load_description(tmp_path / "talk").items()


DISAGREE = [
    ("--size", 9, 16),
    ("--policy", "h2o", "tova"),
    ("--policy", "full", "tova"),
    ("--positions", "compact", "original"),
    ("--dtype", "bfloat16", "float32"),
    ("--recall", 4, 8),
    ("--recall", 0, 8),
]


@pytest.mark.parametrize(
    "words", [("generate", "hi", "--state"), ("read", "-", "--save", "new", "--load"), ("chat", "--state")]
)
@pytest.mark.parametrize(("option", "given", "saved"), DISAGREE)
def test_both_values_are_named(
    words: tuple[str, ...], option: str, given: object, saved: object, run: Run, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("read", "-", "--save", "state", "--size", 16, "--recall", 8, stdin=TEXT).code == 0
    monkeypatch.setattr("msrnn.hf.loading.AutoModelForCausalLM", None)  # refused before the slow part
    code, out, err = run(*words, "state", option, given, stdin="hi")
    assert (code, out) == (2, "")
    assert err == f"msrnn: {option} {given}: state was saved with {option} {saved}; leave {option} out\n"


def test_recall_needs_an_archive(run: Run, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    import msrnn
    from msrnn.recall import Recall

    state = tmp_path / "state"
    assert run("read", "-", "--save", state, "--size", 16, stdin=TEXT).code == 0
    code, _, err = run("generate", "hi", "--state", state, "--recall", 8)
    assert (code, err) == (2, f"msrnn: --recall 8: {state} was saved without --recall; leave --recall out\n")
    code, _, err = run("generate", "hi", "--state", state, "--recall-every", 2)
    assert (code, "--recall-every 2: nothing is archived" in err) == (2, True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    msrnn.MultiStateRNN(model, "tova", 16, recall=Recall(8, state_dtype="int8")).state().save(state)
    code, _, err = run("generate", "hi", "--state", state)
    assert (code, "its options cannot be given on the command line (recall '8:int8')" in err) == (2, True)


def test_a_full_state_has_no_size_to_disagree_with(run: Run, tmp_path: Path) -> None:
    assert run("read", "-", "--save", tmp_path / "state", "--policy", "full", stdin=TEXT).code == 0
    assert run("generate", "hi", "--state", tmp_path / "state", "--size", 16, *SHORT).code == 0


def test_auto_is_whatever_the_checkpoint_is(run: Run, tmp_path: Path) -> None:
    assert run("read", "-", "--save", tmp_path / "state", stdin=TEXT).code == 0
    assert run("generate", "hi", "--state", tmp_path / "state", "--dtype", "auto", *SHORT).code == 0


def test_positions_by_a_function_cannot_be_named(run: Run, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    import msrnn

    model = AutoModelForCausalLM.from_pretrained(folder)
    msrnn.MultiStateRNN(model, "tova", 16, positions=lambda gap: gap / 2).state().save(tmp_path / "state")
    code, _, err = run("generate", "hi", "--state", tmp_path / "state")
    assert code == 2
    assert err.splitlines()[-1].startswith(
        f"msrnn: {tmp_path / 'state'}: its options cannot be given on the command line"
    )


def test_the_pair_of_commands_in_the_readme(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are written, and once more with another size for `read`."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(TEXT)
    lines = README.read_text().splitlines()
    pair = [
        shlex.split(re.split(r" +#", line)[0])[1:]
        for line in lines
        if "book.state" in line and line.startswith("msrnn")
    ]
    assert [words[0] for words in pair] == ["read", "generate"] * 2
    for read, ask in zip(pair[::2], pair[1::2], strict=True):
        for more in ((), ("--size", 24)):
            reading, asking = run(*read, *more, "--force"), run(*ask, *SHORT)
            assert (reading.code, asking.code) == (0, 0), reading.err + asking.err
            assert asking.out.strip()
    assert load_description(Path("book.state"))["size"] == 24


def test_row_weights_are_named_again(tmp_path: Path) -> None:
    """A state knows the content of their file, and not its name."""
    model = build(llama())
    file = write_random_weights(tmp_path / "weights.safetensors", model)
    states = {}
    for name, policy in (("plain", "echo+1"), ("learned", f"echo+1@{file}")):
        states[name] = tmp_path / name
        msrnn.MultiStateRNN(model, policy, 8).state().save(states[name])
    options = GivenOptions(policy=f"echo+1@{file}").complete(states["learned"])
    assert (options.policy, options.size) == (Policy.parse(f"echo+1@{file}"), Size(8))
    extended = GivenOptions(policy=f"echo@{file}", positions="auto").complete(states["learned"])
    assert extended.policy == Policy.parse(f"echo+1@{file}")
    assert options.rnn(model).load_state(states["learned"]).batch_size == 1
    for given in (None, "echo+1"):
        with pytest.raises(UsageError, match=r"learned: was saved with learned row weights.*--policy echo\+1@FILE"):
            GivenOptions(policy=given).complete(states["learned"])
    with pytest.raises(UsageError, match="plain was saved without row weights; leave @FILE out"):
        GivenOptions(policy=f"echo+1@{file}").complete(states["plain"])
    with pytest.raises(UsageError, match=r"was saved with --policy echo\+1; leave --policy out"):
        GivenOptions(policy=f"decay=0.5,value_norm=1,weights={file}").complete(states["learned"])
    write_random_weights(file, model, seed=5)
    with pytest.raises(UsageError, match="row_weights"):
        options.rnn(model).load_state(states["learned"])
