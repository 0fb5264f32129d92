"""The documentation is true: its snippets run, its tables are those of the code, and the files that it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

import msrnn
from msrnn.hf.loading import Loaded, small_model
from msrnn.policy import NAMES

ROOT = Path(__file__).parent.parent
README, CONCEPTS = ROOT / "README.md", ROOT / "docs" / "concepts.md"
HISTORY = (ROOT / "docs" / "log.md", ROOT / "CHANGELOG.md")  # may name what is gone
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {*HISTORY})
SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BOOK = "The captain opened the door and looked at the sea. It was a dark and stormy night, and nobody slept. " * 20
PRINTED = {  # something that the snippets of a page print
    "README.md": "The captain opened the door and",
    "docs/index.md": "The captain opened the door and",
    "docs/guides/batches-and-gpus.md": "The capital of France is",
    "docs/guides/endless-chat.md": "",
    "docs/guides/evaluating-a-policy.md": "perplexity against tova",
    "docs/guides/extending.md": "",
    "docs/guides/long-documents.md": "The next morning",
    "docs/guides/new-policy.md": "SnapKV: ",
    "docs/guides/quantized-weights.md": "The captain opened the door and",
    "docs/guides/which-tokens-stay.md": "torch.Size([1, 30, 1, ",
}

NEEDED = {"docs/guides/quantized-weights.md": ("torchao", "peft")}  # packages of the snippets of a page


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_the_pages_have_snippets() -> None:
    assert {name_of(page) for page in PAGES if snippets(page)} == PRINTED.keys()


def test_a_program_for_several_processes_is_one() -> None:
    """`tests/hf/test_tensor_parallel.py` runs such programs; here the names of msrnn in it are looked up."""
    page = (ROOT / "docs" / "scaling.md").read_text()
    (program,) = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    used = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Attribute)]
    names = {node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "msrnn"}
    assert names == {"MultiStateRNN"}
    state = {node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "state"}
    assert state == {"save", "nbytes", "nbytes_in_all"}
    assert all(hasattr(msrnn.MultiState, name) for name in state)


@pytest.fixture
def hub_is_local(small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snippets load SmolLM2 by its name on the hub; here it is the small default model, and no other name is known."""
    folder = small_model()
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        original = auto.from_pretrained

        def from_pretrained(name: str, original: Any = original) -> Any:
            assert name == SMALL
            return original(folder)

        monkeypatch.setattr(auto, "from_pretrained", from_pretrained)


def _marked(page: Path) -> Any:
    """Guides take long; the README and the quickstart always run."""
    return pytest.param(page, id=name_of(page), marks=pytest.mark.slow if page.parent.name == "guides" else ())


@pytest.mark.small_model
@pytest.mark.usefixtures("hub_is_local")
@pytest.mark.parametrize("page", [_marked(page) for page in PAGES if snippets(page)])
def test_snippets_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they stand, one after the other."""
    for package in NEEDED.get(name_of(page), ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(BOOK)
    names: dict[str, object] = {}
    for snippet in snippets(page):
        exec(compile(snippet, name_of(page), "exec"), names)
    written = {path.name for path in tmp_path.iterdir()} - {"book.txt"}
    assert written == set(re.findall(r'(?:save|Path)\("((?!book\.txt)[^"]+)"\)', "".join(snippets(page))))
    assert PRINTED[name_of(page)] in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/guides/long-documents.md"])
def test_what_a_bounded_state_cannot_do_has_its_number(page: str) -> None:
    """The number is that of the page that measures it, and no snippet asks a bounded state for a detail."""
    measured = (ROOT / "docs" / "results" / "retrieval.md").read_text()
    rows = re.findall(r"^\| `[\w+]+` \| (\d+)% \| [^|]+ \| (\d+)% \|", measured.partition("size 512")[2], re.MULTILINE)
    assert set(rows[:4]) == {("0", "0")}
    assert "of 28 wrong ones of 28 (0 to 75 %)" in measured.replace("\n", " ")
    text = " ".join((ROOT / page).read_text().split())
    assert re.search(r"28 of 28[;,] (and )?with 512 KV rows,? 0 of 28", text)
    assert "results/retrieval.md" in text
    assert not re.search(r'\?"', "".join(snippets(ROOT / page)))


def test_every_policy_has_its_row() -> None:
    text = CONCEPTS.read_text()
    for name, policy in NAMES.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        _, decay, per, first, recent, value, _ = [cell.strip() for cell in row.strip("|").split("|")]
        assert decay == ("none" if policy.decay is None else f"{policy.decay:g}")
        assert (per, int(first)) == (policy.per, policy.first)
        assert recent.replace("half", "0.5") == (f"{policy.recent:g} of size" if policy.recent else "0")
        assert value == ("yes" if policy.value_norm else "")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths of the repository in code spans, and targets of relative links; the site's builder checks anchors."""
    text = page.read_text()
    paths = [ROOT / path for path in re.findall(r"`((?:msrnn|tests|benchmarks|docs)/[\w/.-]+)`", text)]
    paths += [page.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
    assert [str(path) for path in paths if not path.exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in navigation] == []
