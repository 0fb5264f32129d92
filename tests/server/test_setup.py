from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from msrnn.errors import UsageError
from msrnn.hf.model_options import ModelOptions
from msrnn.server.setup import Address, Setup


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        *[({name: 0}, name) for name in ("slots", "prompt_tokens", "max_tokens", "queue", "max_body_bytes")],
        *[({name: 0}, name) for name in ("max_total_tokens", "prefix_disk_bytes", "session_bytes", "session_days")],
        ({"guesses": -1}, "guesses"),
        ({"draft": ModelOptions("small")}, "draft"),
        ({"served_model_name": ""}, "served_model_name"),
        ({"generation_config": "vllm"}, "generation_config"),
        ({"api_key": ("",)}, "api_key"),
        ({"cors_origin": ("*",)}, "cors_origin"),
        ({"max_tokens": 10, "max_total_tokens": 10}, "max_tokens"),
        ({"sessions": Path("a"), "prefix_states": Path("a")}, "prefix_states"),
    ],
)
def test_every_setting_is_checked(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError) as refused:
        Setup(**{"served_model_name": "tiny", **arguments})
    assert refused.value.name == name


@pytest.mark.parametrize(
    ("arguments", "name"), [({"port": -1}, "port"), ({"shutdown_timeout": -1}, "shutdown_timeout")]
)
def test_an_address_is_checked(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError) as refused:
        Address(**arguments)
    assert refused.value.name == name


def test_limits_are_those_of_the_setup() -> None:
    setup = Setup("tiny", api_key=("a",), allowed_host=("mybox",), cors_origin=("https://a.org",), queue=3)
    limits = setup.make_limits(("10.0.0.1",))
    assert (limits.queue, limits.body_bytes, limits.keys) == (3, 8 * 2**20, ("a",))
    assert limits.origins is not None
    assert (limits.origins.bound, limits.origins.hosts) == (("10.0.0.1",), ("mybox",))


def test_remarks_on_access(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o755)
    Setup("tiny").note_access("127.0.0.1")
    assert capsys.readouterr().err == ""
    Setup("tiny", sessions=tmp_path).note_access("0.0.0.0")
    said = capsys.readouterr().err
    assert "host 0.0.0.0: anyone who can reach this machine can use the model; an API key (--api-key) guards it" in said
    assert f"sessions {tmp_path}: other users have access" in said
    Setup("tiny", api_key=("a",)).note_access("0.0.0.0")
    assert capsys.readouterr().err == ""


def test_settings_are_checked_without_torch() -> None:
    code = "import sys, msrnn.server.setup; assert not {'torch', 'starlette', 'uvicorn'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
