"""`Setup`: the settings of a server, checked, as a value from which every replica makes the same server.

This module imports neither torch nor the packages of the extra `serve`: bad settings are refused before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msrnn.checks import check_choice, check_count
from msrnn.core.notes import note
from msrnn.errors import UsageError
from msrnn.hf.model_options import AUTO, PROTECT, ModelOptions
from msrnn.server import checks
from msrnn.server.call_formats import PARSERS

if TYPE_CHECKING:
    from msrnn.server.limits import Limits


@dataclass(frozen=True)
class Setup:
    """The settings of a server; `msrnn.serve` describes them."""

    served_model_name: str
    model: ModelOptions | None = None  # what to load; None: a loaded model is given
    auto: bool = False  # whether requests that may pass the training length have other positions
    slots: int | None = None
    prompt_tokens: int | None = None
    guesses: int = 0
    draft: ModelOptions | None = None  # the model that guesses where the text does not
    api_key: tuple[str, ...] = ()
    allowed_host: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()
    sessions: Path | None = None
    session_bytes: int | None = None
    session_days: float | None = None
    prefix_states: Path | None = None
    prefix_disk_bytes: int = 2**34
    max_tokens: int = 512
    max_total_tokens: int = 1_000_000
    generation_config: str = AUTO
    chat_template: str | None = None  # the text of another one than the model's
    tool_call_parser: str = AUTO
    allow_special_tokens: bool = False
    protect: str = "none"
    queue: int = 256
    max_body_bytes: int = 8 * 2**20

    def __post_init__(self) -> None:
        names = ("slots", "prompt_tokens", "max_tokens", "max_total_tokens", "queue", "max_body_bytes")
        checks.check_counts({name: getattr(self, name) for name in (*names, "prefix_disk_bytes", "session_bytes")})
        check_count("guesses", self.guesses, least=0, of="tokens")
        if self.draft is not None and not self.guesses:
            reason, advice = "needs guesses, the most tokens guessed at once", "give guesses=8 (--guesses 8)"
            raise UsageError(reason, name="draft", value=self.draft.model, advice=advice)
        checks.check_days(self.session_days)
        checks.check_names(self.served_model_name, self.generation_config)
        checks.check_access(self.api_key, self.cors_origin)
        check_choice("protect", self.protect, PROTECT)
        check_choice("tool_call_parser", self.tool_call_parser, PARSERS)
        checks.check_tokens(self.max_tokens, self.max_total_tokens)
        checks.check_folders(self.sessions, self.prefix_states)

    def make_limits(self, bound: tuple[str, ...]) -> Limits:
        """The limits of requests to a server that is bound to this address; an address may have a name, too."""
        from msrnn.server.limits import Limits
        from msrnn.server.origins import Origins

        origins = Origins(bound, self.allowed_host, self.cors_origin)
        return Limits(self.queue, self.max_body_bytes, keys=self.api_key, origins=origins)

    def note_access(self, host: str) -> None:
        """Remark on a server that anyone may ask, and on folders that other users may read."""
        if not self.api_key and not checks.is_local(host):
            note(f"host {host}: anyone who can reach this machine can use the model; an API key (--api-key) guards it")
        for remark in checks.describe_open_folders({"sessions": self.sessions, "prefix_states": self.prefix_states}):
            note(remark)


@dataclass(frozen=True)
class Address:
    """Where a server listens, and how it stops and logs."""

    host: str = "127.0.0.1"
    port: int = 8000
    shutdown_timeout: int = 30  # seconds that running answers have after the signal to stop
    quiet: bool = False  # no line for each request
    ssl_certfile: Path | None = None  # for HTTPS: the certificate, and its key if that is in a file of its own
    ssl_keyfile: Path | None = None

    def __post_init__(self) -> None:
        checks.check_tls(self.ssl_certfile, self.ssl_keyfile)
        checks.check_address(self.port, self.shutdown_timeout)
