from __future__ import annotations

from pathlib import Path

from msrnn.evaluation.report import Formatted, Share, Table, code, document, plot_estimates, save_figure
from msrnn.evaluation.statistics import Estimate


def test_backticks_in_markdown() -> None:
    assert [code(text) for text in ("NN", "``", "a`b")] == ["`NN`", "``` `` ```", "``a`b``"]


def test_values_of_a_table() -> None:
    table = Table("x", "X", "y", ["a", "b"], [["p|q", Share(0.1234)], ["r", 1234.5], ["s", None], ["t", 7]])
    assert table.strings() == [["p|q", "12.3%"], ["r", "1,234"], ["s", "—"], ["t", "7"]]
    assert "| p\\|q | 12.3% |" in table.markdown()
    assert table.csv() == "a,b\np|q,0.1234\nr,1234.5\ns,\nt,7\n"


def test_an_estimate_and_its_interval() -> None:
    estimates = [Estimate(0.5, 0.25, 1.0), Estimate(0.5)]
    table = Table("x", "X", "", ["a", "b"], [["p", Formatted(estimate, "{:.0%}".format)] for estimate in estimates])
    assert table.strings() == [["p", "50%\n25% to 100%"], ["p", "50%"]]
    assert table.markdown() == "| a | b |\n| --- | ---: |\n| p | 50% · 25% to 100% |\n| p | 50% |\n"
    assert Formatted(estimates[0], "{:.1f}".format, "-").text(" ") == "0.5 0.2-1.0"


def test_a_csv_may_have_lines_of_its_own() -> None:
    table = Table("x", "X", "", ["a"], [["p"]], [["a", "low"], ["p", 0.1], ["q", None], ["r", float("nan")]])
    assert table.csv() == "a,low\np,0.1\nq,\nr,\n"


def test_a_document() -> None:
    table = Table("x", "A title", "A note.", ["a"], [["p"]])
    rows = "| a |\n| --- |\n| p |\n"
    facts = {"torch": "2", "commit": "", "seed": 0}
    assert document("H", "About.", [table], facts) == f"# H\n\nAbout.\n\nA note.\n\n{rows}\n- torch: 2\n- seed: 0\n"
    titled = document("H", "About.", [table, table._replace(note="")], {}, titles=True)
    assert titled == f"# H\n\nAbout.\n\n## A title\n\nA note.\n\n{rows}\n## A title\n\n{rows}\n"


def test_a_figure_has_the_same_bytes_again(tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        with save_figure(tmp_path, "lines", 1, 4) as (_, (axes,)):
            plot_estimates(axes, [1, 2], [Estimate(1, 0, 2), Estimate(2, 1, 3)], label="x")
        made.append([(tmp_path / f"lines.{kind}").read_bytes() for kind in ("png", "svg")])
    assert made[0] == made[1]
