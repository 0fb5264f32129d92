from __future__ import annotations

import base64
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import msrnn
from tests.helpers.command import Run

TEXT = "A text of some words, which is <b>long</b> enough.\nIt has two lines & more."


def data(path: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())
    assert found is not None
    return json.loads(found[1])


def times(policy: dict[str, Any], length: int) -> numpy.ndarray:
    raw = numpy.frombuffer(zlib.decompress(base64.b64decode(policy["after"])), dtype=numpy.uint8)
    low, high = raw.reshape(2, -1, policy["groups"], length).astype(int)
    return low + 256 * high + numpy.arange(length)


def test_a_page_of_a_file(run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def browse(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr("webbrowser.open", browse)
    monkeypatch.chdir(tmp_path)
    Path("letter.txt").write_text(TEXT)
    code, out, _ = run("explore", "letter.txt", "--size", 8)
    assert code == 0
    assert out.startswith("letter.html: ")
    assert opened == [(tmp_path / "letter.html").as_uri()]
    shown = data(Path("letter.html"))
    assert shown["tokens"] == ["<s>", *TEXT]
    named = [(policy["name"], policy["size"], policy["groups"]) for policy in shown["policies"]]
    assert named == [("tova", 8, 1), ("h2o", 8, 2)]
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    for policy in shown["policies"]:
        expected = msrnn.trace(msrnn.MultiStateRNN(model, policy["name"], 8), ids).evicted_at[0].numpy()
        assert (times(policy, ids.shape[1]) == expected).all()


def test_texts_and_standard_input(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ("--no-open", "--out", page, "--policy", "window+1")
    assert run("explore", TEXT, *words).code == 0
    assert data(page)["policies"][0]["size"] == len(data(page)["tokens"]) // 4
    refused = run("explore", TEXT, *words)
    assert refused.code == 2
    assert "--force" in refused.err
    assert run("explore", "-", *words, "--force", "--tokens", 30, stdin=TEXT * 3).code == 0
    assert len(data(page)["tokens"]) == 30
    assert run("explore", f"{TEXT} \udcff", *words, "--force").code == 0  # a byte that is no text
    assert data(page)["tokens"][-1] == "\N{REPLACEMENT CHARACTER}"
    assert run("explore", TEXT * 40, *words, "--force").code == 0  # longer than any file's name


def test_protected_tokens(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ("explore", TEXT, "--no-open", "--out", page, "--size", 16, "--policy", "tova")
    assert run(*words, "--protect", 10).code == 0
    shown = data(page)
    length = len(shown["tokens"])
    assert shown["protected"] == 10
    assert (times(shown["policies"][0], length)[..., :10] == length).all()
    refused = run(*words, "--force", "--protect", 16)
    assert (refused.code, "--protect 16: 16 tokens: 15 fit; of 16 KV rows" in refused.err) == (2, True)


def test_recalled_tokens(run: Run, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ("explore", TEXT, "--no-open", "--out", page, "--size", 8, "--policy", "tova", "--policy", "window")
    assert run(*words, "--recall", 3, "--recall-every", 4).code == 0
    shown = data(page)
    length, layers = len(shown["tokens"]), len(shown["layers"])
    assert shown["every"] == 4
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    for policy in shown["policies"]:
        bits = numpy.frombuffer(zlib.decompress(base64.b64decode(policy["recalled"])), dtype=numpy.uint8)
        found = numpy.unpackbits(bits, bitorder="little")[: -(-length // 4) * layers * length].reshape(
            -1, layers, length
        )
        expected = msrnn.trace(msrnn.MultiStateRNN(model, policy["name"], 8, recall=3), ids, recall_every=4)
        assert expected.recalled is not None
        assert (found == expected.recalled.numpy()).all()
        assert found.any()
        assert (times(policy, length) == expected.evicted_at[0].numpy()).all()
    assert run(*words, "--force").code == 0
    assert [policy["recalled"] for policy in data(page)["policies"]] == [None, None]


def test_no_browser_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    assert "no browser" in run("explore", TEXT, "--out", tmp_path / "page.html").err


BAD = {
    "no file": (["none.txt"], "none.txt: no such file"),
    "empty": ([" "], "TEXT|FILE: empty"),
    "empty file": (["empty.txt"], "empty.txt: empty"),
    "not UTF-8": (["latin.txt"], "latin.txt: not UTF-8"),
    "policies": ([TEXT, "--policy", "tova", "--policy", "h2o", "--policy", "window"], "--policy window"),
    "full": ([TEXT, "--policy", "full"], "--policy full"),
    "policy": ([TEXT, "--policy", "tovas"], "did you mean 'tova'?"),
    "size": ([TEXT, "--size", "0"], "--size 0: "),
    "tokens": ([TEXT, "--tokens", "1"], "--tokens 1: must be at least 3"),
    "no tokens": ([TEXT, "--tokens", "0"], "--tokens 0: must be at least 3"),
    "negative tokens": ([TEXT, "--tokens", "-5", "--size", "8"], "--tokens -5: must be at least 3"),
    "a folder": (["folder"], "folder: a folder; name a text file in it, such as folder/a.txt"),
    "a folder with a slash": (["folder/"], "such as folder/a.txt"),
    "a folder with a space": (["two words"], "two words: a folder; name a text file"),
    "a file's name with a space": (["my book.txt"], "my book.txt: no such file"),
    "protected tokens": ([TEXT, "--policy", "tova+600"], "--policy tova+600 at the default --size of at most 512"),
    "too many": ([TEXT, "--tokens", "70000"], "--tokens 70000: must be at most"),
    "protect": ([TEXT, "--protect", "-1"], "--protect -1: must be a whole number"),
    "recall": ([TEXT, "--recall", "-1"], "--recall -1: must be a whole number"),
    "recall every": ([TEXT, "--recall", "4", "--recall-every", "0"], "--recall-every 0: must be a whole number"),
    "recall of nothing": ([TEXT, "--recall-every", "4"], "--recall-every 4: nothing is archived"),
    "target": ([TEXT, "--out", "empty.txt"], "--force"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("latin.txt").write_bytes("déjà vu".encode("latin-1"))
    for name_ in ("folder", "two words"):
        Path(name_).mkdir()
    Path("folder/a.txt").write_text(TEXT)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("msrnn.hf.loading.AutoModelForCausalLM", None)  # refused before the slow part
    words, told = BAD[name]
    code, out, err = run("explore", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_size_that_shows_nothing(run: Run, tmp_path: Path) -> None:
    code, _, err = run("explore", TEXT, "--size", 500, "--out", tmp_path / "page.html")
    assert code == 2
    assert "--size 500: " in err


def test_a_text_too_short_for_the_default_size(run: Run, tmp_path: Path) -> None:
    """The user gave no --size: the message does not blame it."""
    code, _, err = run("explore", "a b", "--tokens", 3, "--out", tmp_path / "page.html")
    assert (code, err.splitlines()[-1]) == (
        2,
        "msrnn: 3 tokens: the default --size of 2 evicts none of them; give a longer text, more --tokens or --size 1",
    )
    code, _, err = run("explore", TEXT, "--policy", "tova+60", "--out", tmp_path / "page.html")
    assert code == 2
    assert "--policy tova+60 at the default --size of 19, a quarter of 76 tokens: " in err
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_read_like_a_file(run: Run, tmp_path: Path) -> None:
    """As `msrnn explore <(gzip -cd book.gz)` names one."""
    reader, writer = os.pipe()
    os.write(writer, TEXT.encode())
    os.close(writer)
    try:
        ran = run("explore", f"/dev/fd/{reader}", "--no-open", "--out", tmp_path / "page.html")
    finally:
        os.close(reader)
    assert ran.code == 0, ran.err
    assert data(tmp_path / "page.html")["tokens"] == ["<s>", *TEXT]


def test_ctrl_c_says_what_to_do(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    page = tmp_path / "page.html"
    page.write_text("old")
    words = ("explore", TEXT, "--no-open", "--out", page, "--force")
    for place in ("msrnn.hf.loading.load", "msrnn.hf.rnn.MultiStateRNN.read", "msrnn.core.atomic.write_atomically"):
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupted)
            code, out, err = run(*words)
        assert (code, out) == (130, "")
        assert f"stopped: {page} was not written; run the same command to start again" in err
        assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
        assert page.read_text() == "old"
    assert run(*words).code == 0


def test_progress_where_there_is_no_terminal(run: Run, folder: Path, tmp_path: Path) -> None:
    err = run("explore", TEXT, "--no-open", "--out", tmp_path / "page.html").err
    assert err.splitlines() == [f"loading {folder}", "reading 76 tokens under tova", "reading 76 tokens under h2o"]
