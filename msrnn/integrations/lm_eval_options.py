"""Additions to the options of lm-evaluation-harness's command: a device, and the tokenizer for RULER's tasks."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from lm_eval._cli.utils import MergeDictAction
from lm_eval.utils import simple_parse_args_string

from msrnn.hf.loading import find_pretrained

MODEL = "msrnn"


def with_device(words: list[str]) -> list[str]:
    """Add `--device auto` for this model if no device is given: the harness's default is cuda:0."""
    options = _options(words)
    return [*words, "--device", "auto"] if options.get("model") == MODEL and not options.get("device") else words


def with_tokenizer(words: list[str]) -> list[str]:
    """Add the folder of this model's tokenizer, or its name on the hub, to `--metadata`.

    RULER's tasks measure their prompts by it. Of `pretrained` the harness knows only folders and names on the hub.
    """
    options = _options(words)
    metadata = _dict(options.get("metadata"))
    if options.get("model") != MODEL or "tokenizer" in metadata:
        return words
    source = find_pretrained(_dict(options.get("model_args")).get("pretrained"))
    return [*words, "--metadata", json.dumps({**metadata, "tokenizer": str(source)})]  # whole: it replaces a file's


def _options(words: list[str]) -> dict[str, Any]:
    """The options that count here, from the command line or else from its YAML file."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--model", "-M")
    parser.add_argument("--device")
    parser.add_argument("--model_args", "-a", nargs="+", action=MergeDictAction)
    parser.add_argument("--metadata", nargs="+", action=MergeDictAction)
    parser.add_argument("--config", "-C", type=Path)
    given, _ = parser.parse_known_args(words)
    file = _config(given.config) if given.config else {}
    return {**file, **{name: value for name, value in vars(given).items() if value}}


def _dict(option: Any) -> dict[str, Any]:
    """An option that is a mapping, or `name=value` pairs in a string."""
    options: dict[str, Any] = simple_parse_args_string(option) if isinstance(option, str) else option or {}
    return options


def _config(path: Path) -> dict[str, Any]:
    """The options in a YAML file; empty for a bad file, which the harness itself reports."""
    import yaml  # type: ignore[import-untyped]

    try:
        options = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return options if isinstance(options, dict) else {}
