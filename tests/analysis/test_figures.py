from __future__ import annotations

from pathlib import Path

from msrnn.analysis.figures import draw_figures
from msrnn.analysis.study import Study
from tests.helpers.handmade import NAMES
from tests.helpers.handmade import made as made


def test_a_figure_for_each_table(made: Study, tmp_path: Path) -> None:
    """Retention has maps of each policy in its place."""
    draw_figures(made, tmp_path, "a title", str)
    maps = {f"retention-{kind}{policy}-2" for kind in ("", "layers-") for policy in ("tova", "h2o")}
    for kind in ("png", "svg"):
        assert {path.stem for path in tmp_path.glob(f"*.{kind}")} == NAMES - {"retention", "recent"} | maps
