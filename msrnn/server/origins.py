"""Which web pages may use the server: a browser lets any page send requests to this machine.

The browser sends the requests of a page of another site with `Origin` and `Sec-Fetch-Site`, which no page can
change. If the name of a page was made to resolve to this machine (DNS rebinding), the page is of the same site for
the browser, but that name is in `Host`. Programs that are not browsers send neither `Origin` nor `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from msrnn.errors import UsageError
from msrnn.server.errors import ApiError
from msrnn.server.keys import is_guarded

ANY = "*"
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+?)\.?)(?::\d*)?", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[\w.-]+)(?::\d+)?", re.ASCII)
_DEFAULT_PORT = re.compile(r"(http://.*):80|(https://.*):443")
_JSON = "application/json"
_PREFLIGHT_SECONDS = "600"


@dataclass(frozen=True)
class Origins:
    """The names of a server, and the origins of other pages that may use it.

    bound  the address that it is bound to, and the name that stands for it if there is one
    hosts  further names that requests may have in `Host`
    cors   origins such as `https://example.org`, or `*`
    """

    bound: Sequence[str] = ("127.0.0.1",)
    hosts: Sequence[str] = ()
    cors: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(_parse_host(host) for host in self.hosts))
        object.__setattr__(self, "cors", tuple(_parse_origin(origin) for origin in self.cors))

    def has_name(self, host: str) -> bool:
        """Whether a `Host` header names this server, with any port: a port may be forwarded, and is no one's name.

        On all addresses of a machine, each address is a name: an attacker's page is known by a name of its own.
        """
        name = _name(host)
        bound = {_name(_add_brackets(each.partition("%")[0])) for each in self.bound}
        addresses = [address for each in bound if (address := _address(each)) is not None]
        known = {"localhost", *bound, *self.hosts}
        if any(address.is_loopback for address in addresses):
            known |= LOCAL
        everywhere = any(address.is_unspecified for address in addresses)
        return name in known - {""} or (everywhere and _address(name) is not None)

    def allows(self, origin: str) -> bool:
        return ANY in self.cors or origin in self.cors


LOOPBACK = Origins()  # a server that only this machine can reach


class OriginCheck:
    """ASGI middleware: refuses pages of other sites, and lets those in that `origins` names.

    keyed  whether requests must have a key: `Host` is then not checked, since a page does not know the key
    """

    def __init__(self, app: ASGIApp, origins: Origins | None, keyed: bool) -> None:
        self._app, self._origins, self._keyed = app, origins, keyed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._origins is None:
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        error = self._refusal(self._origins, scope, headers)
        if error is not None:
            return await JSONResponse(error.body, error.status)(scope, receive, send)
        origin = headers.get("origin")
        if origin is None or not self._origins.allows(origin):
            return await self._app(scope, receive, send)
        shared = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": "Retry-After"}
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            return await Response(status_code=204, headers=shared | _preflight(headers))(scope, receive, send)

        async def send_shared(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(raw=[*message.get("headers", ())])
                sent.update(shared)
                sent.add_vary_header("Origin")
                message = {**message, "headers": sent.raw}
            await send(message)

        return await self._app(scope, receive, send_shared)

    def _refusal(self, origins: Origins, scope: Scope, headers: Headers) -> ApiError | None:
        hosts = headers.getlist("host")
        if not self._keyed and (len(hosts) != 1 or not origins.has_name(hosts[0])):
            return _host_error(", ".join(hosts))
        origin = headers.get("origin", "")
        allowed = origin != "" and origins.allows(origin)
        if allowed or not _is_foreign(headers) or _opens_a_page(scope, headers):
            return None
        sites = ", ".join(headers.getlist("sec-fetch-site"))
        return _foreign_origin(f"Origin {origin!r:.80}" if "origin" in headers else f"Sec-Fetch-Site: {sites:.80}")


def check_content_type(headers: Headers) -> None:
    """A page can send any text to any site, but not as JSON: for that, the browser asks the site first."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if ("origin" in headers or "sec-fetch-site" in headers) and kind != _JSON:
        message = f"Content-Type {kind!r:.80}: a browser must send {_JSON}"
        raise ApiError(415, message, code="unsupported_media_type")


def _is_foreign(headers: Headers) -> bool:
    """Whether a page of another origin sends this.

    Browsers leave `Sec-Fetch-Site` out on plain http to other machines. If it is there, it holds behind a proxy, too.
    """
    sites = {*headers.getlist("sec-fetch-site")}
    if sites:
        return not sites <= {"same-origin", "none"}
    host = headers.get("host", "").lower()
    return not {*headers.getlist("origin")} <= {f"http://{host}", f"https://{host}"}


def _opens_a_page(scope: Scope, headers: Headers) -> bool:
    """A link of another site, which that site cannot read."""
    return scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate" and not is_guarded(scope["path"])


def _preflight(headers: Headers) -> dict[str, str]:
    allowed = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": headers.get("access-control-request-headers", ""),
        "Access-Control-Max-Age": _PREFLIGHT_SECONDS,
        "Vary": "Origin, Access-Control-Request-Headers",
    }
    if "access-control-request-private-network" in headers:
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return allowed


def _host_error(host: str) -> ApiError:
    mend = "ask by its address, or start it with --allowed-host NAME or --api-key KEY"
    message = f"Host {host!r:.80}: not a name of this server; {mend}"
    return ApiError(403, message, kind="permission_error", code="host_not_allowed")


def _foreign_origin(header: str) -> ApiError:
    message = f"{header}: pages of other sites may not use this server; start it with --cors-origin ORIGIN"
    return ApiError(403, message, kind="permission_error", code="origin_not_allowed")


def _name(host: str) -> str:
    """A host in one spelling, without its port; empty if it is none."""
    match = _HOST.fullmatch(host.lower())
    if match is None:
        return ""
    address = _address(match[1] or match[2])
    return str(address) if address is not None else match[2] or ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _add_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _parse_host(host: str) -> str:
    name = _name(host if host.endswith("]") else _add_brackets(host))
    if not name:
        raise UsageError(
            "must be a name or an address, without http:// and without a port", name="allowed_host", value=host
        )
    return name


def _parse_origin(origin: str) -> str:
    found = origin.lower().removesuffix("/")
    if match := _DEFAULT_PORT.fullmatch(found):
        found = match[1] or match[2]
    if found != ANY and not _ORIGIN.fullmatch(found):
        raise UsageError("must be like https://example.org or http://localhost:3000", name="cors_origin", value=origin)
    return found
