"""Files of sessions and of cached prefixes hold the tokens of prompts: only their owner can read them."""

from __future__ import annotations

from pathlib import Path

import msrnn
from tests.helpers.tiny import build, llama, tokens


def test_sessions_and_cached_prefixes_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    rnn = msrnn.MultiStateRNN(build(llama()), "tova", 8)
    sessions, prefixes = tmp_path / "made" / "sessions", tmp_path / "made" / "prefixes"
    engine = msrnn.Engine(rnn, slots=2, prefix_bytes=0, prefix_host_bytes=0, sessions=sessions, prefix_folder=prefixes)
    greedy = msrnn.SamplingParams(temperature=0, max_tokens=3)
    engine.generate([tokens(1, 20)[0].tolist()], greedy)
    engine.add(engine.request(tokens(1, 20)[0].tolist(), greedy, "talk"))
    while not engine.idle:
        engine.step()
    engine.close()
    for folder in (sessions, prefixes):
        files = [path for path in folder.iterdir() if path.is_file()]
        assert files
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
