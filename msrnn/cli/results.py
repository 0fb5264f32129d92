"""The folder that an evaluation writes to, checked before anything is computed."""

from __future__ import annotations

from pathlib import Path


def rows_file(folder: Path, name: str, force: bool, figure: bool = True) -> Path:
    """NAME.jsonl in a folder that exists from now on; `force` empties it."""
    from msrnn.evaluate.figures import check_matplotlib
    from msrnn.evaluate.store import read_rows

    if figure:
        check_matplotlib()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder}: a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / f"{name}.jsonl"
    if force:
        rows.unlink(missing_ok=True)
    elif rows.exists():
        read_rows(rows)
    return rows
