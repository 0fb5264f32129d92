"""Shared parts of the HTML pages: their look, and documents in which no other script can run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple


class Parts(NamedTuple):
    """The template, the style and the script of a page."""

    template: str
    style: str
    script: str

    def document(self, contents: Mapping[str, str]) -> str:
        """The template with style, script and then the contents in their places, such as {{style}}.

        Text from outside comes last, since it may contain the name of a place.
        """
        document = self.template
        for place, text in {"style": self.style, "script": self.script, **contents}.items():
            before, after = document.split(f"{{{{{place}}}}}")
            document = before + text + after
        return document

    def security_policy(self, *more: str) -> str:
        """A content security policy: nothing is loaded, and only these bytes run. `more` are further directives."""
        allowed = (
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in (self.style, self.script)
        )
        policy = "default-src 'none'; style-src {}; script-src {}; base-uri 'none'; form-action 'none'".format(*allowed)
        return "; ".join([policy, *more])


def page_parts(package: str, scripts: Sequence[str]) -> Parts:
    """The files page.html, page.css and page.NAME.js of a package, after the look that all pages share."""
    style = _text(__package__, "theme.css") + "\n" + _text(package, "page.css")
    script = "\n".join(["'use strict';", *(_text(package, f"page.{name}.js") for name in scripts)])
    return Parts(_text(package, "page.html"), style, script)


def _text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
