from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import typer

import msrnn
from msrnn.cli import app
from msrnn.cli.serve_options import KEY_VARIABLE, ServeOptions
from msrnn.server.setup import Address, Setup


def test_the_options_of_serve_are_the_arguments_of_the_function() -> None:
    arguments = inspect.signature(msrnn.serve).parameters
    assert [field.name for field in fields(ServeOptions)] == [name for name in arguments if name != "tokenizer"]
    defaults = {field.name: field.default for field in fields(ServeOptions)}
    different = {name for name, value in defaults.items() if value != arguments[name].default}
    assert different == {"policy", "size"}  # with a loaded model, they must not be given


@pytest.mark.parametrize("kind", [Setup, Address])
def test_defaults_are_those_of_the_setup(kind: type[Setup] | type[Address]) -> None:
    given = {field.name: field.default for field in fields(ServeOptions)}
    for field in fields(kind):
        if field.name in given and field.name not in ("model", "served_model_name"):
            assert given[field.name] in (field.default, None) or field.default in ((), None), field.name


def test_the_key_may_be_in_the_environment() -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    (key,) = (parameter for parameter in serve.params if parameter.name == "api_key")
    assert KEY_VARIABLE in str(key.show_default)
    assert key.multiple
