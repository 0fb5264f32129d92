"""A wheel with the layout of the one that has the small default model."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

from msrnn.hf import model_cache


def write_wheel(folder: Path, gguf: Path, name: str = model_cache.SMALL_FILE) -> None:
    distribution, _, version = model_cache.SMALL_WHEEL.partition("==")
    about = f"{model_cache.SMALL_PACKAGE}-{version}.dist-info"
    files = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nRequires-Dist: llm\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with ZipFile(folder / f"{model_cache.SMALL_PACKAGE}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, f"{model_cache.SMALL_PACKAGE}/{name}")
        for path, text in files.items():
            wheel.writestr(path, text)
