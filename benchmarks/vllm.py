"""How many tokens per second does vLLM generate, with and without msrnn's plug-in, and how many msrnn's own engine?

    python -m benchmarks.vllm --out vllm.jsonl

vllm        vLLM as it is
vllm-fp8    with a KV cache of 8-bit floats
vllm-msrnn  with the plug-in
msrnn       msrnn's own engine
msrnn-compiled  the same, compiled by torch between its kernels, as vLLM is
msrnn-fp8   compiled, with KV rows of 8-bit floats and twice the batch slots

Each runs in a process of its own, on three loads: long answers (prompts of 256 tokens, answers of 3,840), mixed
(answers of 512, one prompt in five of 2,048 tokens, the others 256), both with a full engine, and arrivals: mixed
requests that come at random, eight per second. Weights are random. One that fails is reported as failed, and the others
go on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.vllm_loads import LOADS, measure

CASES = ("vllm", "vllm-fp8", "vllm-msrnn", "msrnn", "msrnn-compiled", "msrnn-fp8")
FIELDS = ("tokens_per_second", "ms_per_step", "tokens_per_step", "first_token_p50_ms", "first_token_p99_ms")


def open_driver(case: str, shape: str, size: int) -> Any:
    from benchmarks.vllm_drivers import VLLM, Msrnn

    if case.startswith("msrnn"):
        return Msrnn(shape, size, compiles=case != "msrnn", state_dtype="fp8" if case == "msrnn-fp8" else None)
    return VLLM(shape, size if case == "vllm-msrnn" else None, "fp8" if case == "vllm-fp8" else "auto")


def run_case(case: str, args: argparse.Namespace) -> None:
    """Measure one engine; records go to the file one by one, so that a load that fails loses no other."""
    began = time.perf_counter()
    driver = open_driver(case, args.shape, args.size)
    loaded = round(time.perf_counter() - began, 1)
    print(f"{case}: loaded in {loaded} s", flush=True)
    for name in args.loads:
        found = measure(driver, LOADS[name], args.seconds, args.fill)
        record({"case": case, "load": name, **found, "load_seconds": loaded}, args)
    sys.stdout.flush()
    os._exit(0)  # processes of an engine that is thrown away need not end in order


def record(found: dict[str, Any], args: argparse.Namespace) -> None:
    from msrnn.evaluation.environment import environment

    try:
        vllm = version("vllm")
    except PackageNotFoundError:
        vllm = ""
    facts = {"shape": args.shape, "size": args.size, "vllm": vllm, **environment("cuda")}
    with args.out.open("a") as file:
        file.write(json.dumps({**found, **facts}) + "\n")
    print(json.dumps(found), flush=True)


def run_all(args: argparse.Namespace) -> None:
    for case in args.cases:
        words = [sys.executable, "-m", "benchmarks.vllm", "--one", case, "--out", str(args.out)]
        words += ["--shape", args.shape, "--size", str(args.size), "--seconds", str(args.seconds)]
        words += ["--fill", str(args.fill), "--loads", *args.loads]
        # vLLM as it is does not even load the plug-in. What its graphs need is not measured before it allocates: that
        # takes long, and MEMORY leaves enough.
        chosen = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if case == "vllm-msrnn" else {"VLLM_PLUGINS": ""}
        chosen |= {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        print(f"{case}: at most {args.limit:.0f} s", flush=True)
        log = args.out.with_suffix(f".{case}.log")
        began = time.perf_counter()
        with log.open("w") as file:
            process = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **chosen}, start_new_session=True
            )
            try:
                failed = process.wait(args.limit) and f"exit code {process.returncode}"
            except subprocess.TimeoutExpired:
                failed = f"not done after {args.limit:.0f} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the engine's own processes
                process.wait()
        took = time.perf_counter() - began
        print(f"{case}: {failed or 'done'}, {took:.0f} s", flush=True)
        if failed:
            tail = log.read_text(errors="replace").splitlines()[-15:]
            print("\n".join(tail), flush=True)
            record({"case": case, "load": "", "error": f"{failed}: {tail[-1] if tail else ''}"}, args)


def show(path: Path, cases: list[str]) -> str:
    """The last record of each case and load, as a table."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found[row["case"], row["load"]] = row
    lines = [f"| engine | load | {' | '.join(FIELDS).replace('_', ' ')} |", "|---|---" + "|---" * len(FIELDS) + "|"]
    for case in cases:
        for (name, load), row in found.items():
            if name == case:
                figures = [f"{row[field]:,}" if field in row else "" for field in FIELDS]
                cells = [row["error"], *figures[1:]] if "error" in row else figures
                lines.append(f"| {case} | {load} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*CASES], help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("vllm.jsonl"), help="records, and beside it a log of each")
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--size", type=int, default=512, help="KV rows per layer of bounded engines")
    parser.add_argument("--seconds", type=float, default=10, help="of each window that is measured")
    parser.add_argument("--fill", type=float, default=40, help="seconds at most until all requests run")
    parser.add_argument("--limit", type=float, default=150, help="seconds at most of each engine, with loading")
    parser.add_argument("--loads", nargs="+", default=[*LOADS], choices=[*LOADS])
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := {*args.cases} - {*CASES}:
        parser.error(f"{', '.join(unknown)}: no such engine; there are {', '.join(CASES)}")
    if args.one:
        try:
            run_case(args.one, args)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    run_all(args)
    print(show(args.out, args.cases))


if __name__ == "__main__":
    main()
