from __future__ import annotations

import subprocess
import sys

import pytest

from msrnn.errors import UsageError
from msrnn.hf.template_variables import find_variables


@pytest.mark.parametrize(
    ("template", "used"),
    [
        ("{{ mood }}", True),
        ("{% if not mood is defined %}{% set mood = 'glad' %}{% endif %}{{ mood }}", True),
        ("{% set mood = mood if mood is defined else 'glad' %}{{ mood }}", True),
        ("{% if mood is defined and mood is false %}a{% endif %}", True),
        ("{% for m in messages %}{% generation %}{{ mood }}{% endgeneration %}{% continue %}{% endfor %}", True),
        ("{% macro write(x) %}{{ x }}{{ mood }}{% endmacro %}{{ write(messages) }}", True),
        ("in a good mood {# mood #}", False),
        ("{% for mood in messages %}{{ mood }}{% endfor %}", False),
        ("{{ messages[0].mood }}{{ messages[0]['mood'] }}{% set mood = 1 %}{{ mood }}", False),
    ],
)
def test_the_variables_that_a_template_reads(template: str, used: bool) -> None:
    assert ("mood" in find_variables(template)) is used


def test_what_is_no_template() -> None:
    with pytest.raises(UsageError, match="the chat template cannot be read: "):
        find_variables("{% for m in messages %}")


def test_it_does_not_need_torch() -> None:
    code = "import sys, msrnn.hf.template_variables; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
