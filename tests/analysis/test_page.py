from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from html.parser import HTMLParser

import numpy
import pytest

from msrnn.analysis.explorer import (
    MOST_TOKENS,
    PolicyTrace,
    check_recalled,
    embed_json,
    pack_trace,
    page,
    trace_policies,
    visible,
)
from msrnn.policy import Policy
from tests.helpers.handmade import LENGTH, SINK, WINDOW, traced
from tests.helpers.tiny import build, llama, tokens

HOSTILE = (
    *("<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "<!--", "]]>", "{{script}}"),
    *("&lt;b&gt;", "\u2028\u2029", "a\u202eb", "\x00", "\ud800", "\N{ROBOT FACE}", "שלום", "\\u003c", '"', "x" * 500),
)


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.parts, self.inside = list[str](), dict[str, str](), ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.inside = f"{tag}{self.tags.count(tag)}" if tag in ("script", "style") else ""
        named = dict(attrs)
        if tag == "meta" and named.get("http-equiv"):
            self.parts["security"] = named["content"] or ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.parts[self.inside] = self.parts.get(self.inside, "") + data

    def handle_endtag(self, _: str) -> None:
        self.inside = ""


def made(tokens: tuple[str, ...]) -> Parsed:
    times = numpy.full((1, 1, len(tokens)), len(tokens), dtype=numpy.int32)
    return Parsed(page("<b>", "a & b", tokens, [PolicyTrace("tova", 4, traced(times[0], size=4))]))


def test_text_is_data_and_nothing_else() -> None:
    plain, odd = made(("a",) * len(HOSTILE)), made(HOSTILE)
    assert odd.tags == plain.tags
    assert odd.tags.count("script") == 2
    assert re.fullmatch(r"[ -%'-;=?-~]*", odd.parts["script1"])  # ASCII, without < > &
    data = json.loads(odd.parts["script1"])
    assert data["tokens"] == [visible(token) for token in HOSTILE]
    assert data["tokens"][:5] == list(HOSTILE[:5])
    assert data["tokens"][6:10] == ["[U+2028][U+2029]", "a[U+202E]b", "␀", "�"]


def test_only_these_bytes_may_run() -> None:
    parsed = made(HOSTILE)
    for kind, part in (("style", "style1"), ("script", "script2")):
        digest = base64.b64encode(hashlib.sha256(parsed.parts[part].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in parsed.parts["security"]
    assert parsed.parts["security"].startswith("default-src 'none';")
    assert "unsafe" not in parsed.parts["security"]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|https?://", parsed.parts["script2"]
    )


def test_times_are_packed_in_two_planes() -> None:
    raw = zlib.decompress(base64.b64decode(pack_trace(traced(WINDOW, SINK))))
    low, high = numpy.frombuffer(raw, dtype=numpy.uint8).reshape(2, 2, LENGTH)
    assert (low + numpy.arange(LENGTH)).tolist() == [WINDOW, SINK]
    assert not high.any()


def test_json_that_stays_in_its_element() -> None:
    text = embed_json({"a": "</script>&<!--\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script>&<!--\u2028"}


def test_a_page_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        page("a", "b", [], [PolicyTrace("tova", 2, traced(WINDOW))])


def test_protected_tokens_are_traced_and_told() -> None:
    model, ids = build(llama()), tokens(1, 40)[0].tolist()
    policies = [Policy.parse("tova"), Policy.parse("window")]
    counted = list[int]()
    traces = trace_policies(model, ids, policies, 12, lambda _: counted.append, protect=7)
    assert sum(counted) == 2 * 40
    for one in traces:
        kept = one.trace.evicted_at == 40
        assert kept[..., :7].all()
        assert not kept[..., 7:20].all()
    plain = trace_policies(model, ids, policies, 12, lambda _: counted.append)
    assert not (plain[1].trace.evicted_at[..., :7] == 40).any()
    for protect, made_of in ((7, traces), (0, plain)):
        shown = Parsed(page("a", "b", ["x"] * 40, made_of, protect))
        assert json.loads(shown.parts["script1"])["protected"] == protect
    with pytest.raises(ValueError, match="12 tokens: 11 fit"):
        trace_policies(model, ids, policies, 12, lambda _: counted.append, protect=12)


def test_more_recalled_tokens_than_a_page_holds_are_refused() -> None:
    check_recalled(4096, 1, 30)
    check_recalled(MOST_TOKENS, 300, 32)
    with pytest.raises(ValueError, match="recall_every=16: a page of 65,535 tokens needs 256 at least"):
        check_recalled(MOST_TOKENS, 16, 32)
