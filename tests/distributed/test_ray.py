"""Evaluations and replicas on a Ray cluster of this machine: real processes, of which some are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import msrnn
from msrnn.cli import main
from msrnn.core.ray_cluster import Cluster
from msrnn.errors import UsageError
from msrnn.evaluation import ray_workers
from msrnn.evaluation.runner import Computed
from msrnn.evaluation.store import Row, read_rows
from tests.helpers.characters import character_model, character_tokenizer
from tests.helpers.serving import serving

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'msrnn[ray]'")
SESSIONS, TOKENS = 200, 3
WORKER = "ray::_computed_by_worker"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    character_model().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for name in ("one", "two"):
        (tmp_path / "texts" / f"{name}.txt").write_text("".join(f"{name} has {i} words. " for i in range(40)))
    return tmp_path / "texts"


def processes(name: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", name], capture_output=True, text=True, check=False)
    return [int(number) for number in found.stdout.split()]


def identified(rows: list[Row]) -> dict[Any, Any]:
    """Results by what identifies them; none twice."""
    found: dict[Any, Any] = {}
    for row in rows:
        for chunk, nll in zip(row["chunks"], row["nll"], strict=True):
            key = (row["policy"], row["size"], row.get("positions"), row.get("start"), chunk, row["dtype"])
            assert key not in found
            found[key] = nll
    return found


def test_a_sweep(
    cluster: str, model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def run(out: str, *more: str) -> int:
        words = ["eval", "perplexity", "--model", str(model), "--text", str(texts), "--length", "64"]
        sizes = ["--policy", "tova", "--policy", "window", "--policy", "full", "--size", "8", "--size", "16"]
        return main([*words, *sizes, "--batch", "2", "--out", str(tmp_path / out), *more])

    assert run("alone") == 0
    expected = identified(read_rows(tmp_path / "alone" / "perplexity.jsonl"))

    # A worker dies after its first row.
    killed: list[int] = []
    begun = ray_workers._Tasks.next

    def kills(tasks: Any) -> Iterator[Computed]:
        for computed in begun(tasks):
            yield computed
            if computed.row is not None and not killed:
                killed.extend(processes(WORKER))
                for number in killed:
                    os.kill(number, signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(ray_workers._Tasks, "next", kills)
        assert run("killed", "--ray", "--device", "cpu") == 0
    assert killed
    rows = read_rows(tmp_path / "killed" / "perplexity.jsonl")
    assert identified(rows) == pytest.approx(expected, abs=1e-3)
    assert {row["machine"].split(", ")[-1] for row in rows} == {"1 threads"}  # what the worker has, not this process

    # Ctrl-C keeps what was computed, ends the workers, and the same command goes on.
    def interrupts(tasks: Any) -> Iterator[Computed]:
        for computed in begun(tasks):
            yield computed
            if computed.row is not None:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ray_workers._Tasks, "next", interrupts)
        assert run("stopped", "--ray", cluster, "--cpus", "1") == 130
    kept = len(read_rows(tmp_path / "stopped" / "perplexity.jsonl"))
    assert 0 < kept < len(rows)
    until = time.monotonic() + 120
    while processes(WORKER):
        assert time.monotonic() < until, "workers go on after Ctrl-C"
        time.sleep(0.1)
    capsys.readouterr()
    assert run("stopped", "--ray", "--cpus", "1") == 0
    assert f"{2 * kept} of {len(expected)} chunks already done" in capsys.readouterr().err
    assert identified(read_rows(tmp_path / "stopped" / "perplexity.jsonl")) == pytest.approx(expected, abs=1e-3)


def test_other_evaluations(cluster: str, model: Path, texts: Path, tmp_path: Path) -> None:
    """Stories begin with those of the full model; long texts are read in legs, with files between them."""
    about = ["--model", str(model), "--batch", "2", "--size", "16"]
    for out, more in (("alone", []), ("ray", ["--ray", "--device", "cpu"])):
        to = ["--out", str(tmp_path / out), *more]
        assert main(["eval", "story", "--stories", "3", "--max-new-tokens", "40", "--no-chat", *about, *to]) == 0
        reads = ["--text", str(texts), "--tokens", "300", "--window", "50", "--leg", "100", "--row", "tova@original"]
        assert main(["eval", "extrapolation", *reads, *about, *to]) == 0
    stories = [
        {(row["policy"], row["seed"]): row["ids"] for row in read_rows(tmp_path / out / "story.jsonl")}
        for out in ("alone", "ray")
    ]
    assert stories[0] == stories[1]
    read = [identified(read_rows(tmp_path / out / "extrapolation.jsonl")) for out in ("alone", "ray")]
    assert read[0].keys() == read[1].keys()
    assert all(read[0][key] == pytest.approx(read[1][key], abs=1e-3) for key in read[0])
    assert not (tmp_path / "ray" / "extrapolation.states").exists()


def test_bad_clusters(cluster: str, model: Path, capsys: Any) -> None:
    for words, message in (
        (["eval", "story", "--cpus", "2"], "--cpus 2: is for workers of a Ray cluster; add --ray"),
        (["eval", "story", "--ray", "--cpus", "64"], "--cpus 64: no machine of this Ray cluster has more than 2"),
        (["eval", "story", "--ray", "--device", "cuda"], "--device cuda: this Ray cluster has no GPU"),
        (["serve", "--replicas", "2"], "--replicas 2: they are processes of a Ray cluster; add --ray"),
        (["serve", "--replicas", "3", "--ray"], "--replicas 3: this Ray cluster has room for 2"),
    ):
        assert main([*words, "--model", str(model)]) == 2
        assert f"msrnn: {message}" in capsys.readouterr().err


def test_a_connection_of_the_caller_stays_open(cluster: str) -> None:
    _, port = cluster.rsplit(":", 1)
    for address in ("auto", cluster, f"127.0.0.1:{port}"):
        Cluster(address).close()
        assert ray.is_initialized()
    with pytest.raises(UsageError, match="no machine of this Ray cluster"):
        Cluster(cpus=64)
    # Ray itself would go on with the cluster that it is connected to, without a word.
    with pytest.raises(
        UsageError, match=f"--ray 127.0.0.1:1: this process is connected to the Ray cluster at {cluster}"
    ):
        Cluster("127.0.0.1:1")
    assert ray.get(ray.put("still here")) == "still here"


async def talk(address: str, turns: int) -> list[list[str | None]]:
    """So many turns of each session, half of them streamed, while a replica is killed. None: the turn is finished, but
    its answer was lost with the replica.
    """
    answers: list[list[str | None]] = [[] for _ in range(SESSIONS)]
    counted: Counter[str] = Counter()
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=40)) as client:

        async def ask(session: int) -> None:
            turn, streamed = len(answers[session]), session % 2 == 0
            body = {"prompt": f"{session} says {turn}. ", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            asked = {**body, "session_id": f"s{session}", "session_turns": turn, "stream": streamed}
            found = await client.post(f"{address}/v1/completions", json=asked)
            if found.status_code == 409:
                assert f"has {turn + 1} finished turns" in found.text
                answers[session].append(None)
                return
            assert found.status_code == 200, found.text  # an answer that had not begun is not lost
            if not streamed:
                answers[session].append(found.json()["choices"][0]["text"])
                return
            events = [json.loads(line[6:]) for line in found.text.split("\n\n") if line.startswith("data: {")]
            if "error" in events[-1]:
                assert len(events) > 1, "the answer had not begun"
            else:
                answers[session].append("".join(event["choices"][0]["text"] for event in events))

        async def go_on(session: int) -> None:
            while len(answers[session]) < turns:
                await ask(session)
                counted["asked"] += 1
                if counted["asked"] == SESSIONS:
                    (number,) = processes("ServeReplica:msrnn-.*-1:server")
                    os.kill(number, signal.SIGKILL)

        await asyncio.gather(*map(go_on, range(SESSIONS)))
    return answers


def test_replicas(cluster: str, model: Path, tmp_path: Path) -> None:
    options = ("--model", model, "--size", 16, "--rows", 8, "--device", "cpu", "--sessions", tmp_path / "sessions")
    with serving(*options, "--replicas", 2, "--ray", cluster) as (server, address):
        answers = asyncio.run(talk(address, turns=2))
        listed = httpx.get(f"{address}/v1/sessions?limit={SESSIONS}", timeout=60).json()["data"]
        assert Counter(found["turns"] for found in listed) == {2: SESSIONS}
        assert httpx.get(f"{address}/health").json()["replicas_up"] == 2
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    assert not processes("ServeReplica:msrnn-")

    rnn, tokenizer = msrnn.MultiStateRNN(character_model(), "tova", 16), character_tokenizer()
    engine = msrnn.Engine(rnn, 8, tokenizer=tokenizer)
    params = msrnn.SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    for turn in range(2):
        asked = [
            engine.request(f"{session} says {turn}. ", params, session=f"s{session}") for session in range(SESSIONS)
        ]
        for request in asked:
            engine.add(request)
        while not engine.idle:
            engine.step()
        pairs = [(request.answers[0].text, session[turn]) for request, session in zip(asked, answers, strict=True)]
        assert all(answer in (expected, None) for expected, answer in pairs)
        assert sum(answer is None for _, answer in pairs) < SESSIONS // 10
