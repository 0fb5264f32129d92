"""The variables of a chat template, which is a Jinja template. This module does not import torch."""

from __future__ import annotations

from functools import lru_cache

from jinja2 import Environment, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser

from msrnn.errors import UsageError


class _Generation(Extension):
    """The block in which some templates write answers, for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def find_variables(template: str) -> frozenset[str]:
    """The variables that a template reads and does not set itself before. Raises a UsageError if it is no template."""
    environment = Environment(extensions=[_Generation, loopcontrols])
    try:
        return frozenset(find_undeclared_variables(environment.parse(template)))
    except TemplateError as error:
        raise UsageError(f"the chat template cannot be read: {error}") from error
