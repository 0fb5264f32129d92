"""Two ranks answer as one: each has half of the heads, and a policy per layer evicts by all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from msrnn.hf.rnn import MultiStateRNN
from tests.helpers.vllm_engines import draw_prompts, expect_answer, write_model

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'msrnn[vllm]'")

CORES = sorted(os.sched_getaffinity(0))
ANSWER, SIZE = 24, 20
PROGRAM = """
import json, sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, options, prompts, answer = map(json.loads, sys.argv[1:])
    llm = LLM(
        folder, tensor_parallel_size=2, dtype="float32", enforce_eager=True, max_model_len=640, max_num_seqs=8,
        max_num_batched_tokens=64, skip_tokenizer_init=True, kv_cache_memory_bytes=2**26,
        additional_config={"msrnn": options},
    )
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False)
    print("answers:" + json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


@pytest.mark.skipif(len(CORES) < 2, reason="vLLM binds each rank to a core of its own")
@pytest.mark.parametrize("policy", ["h2o", "tova", "echo"])
def test_two_ranks(tmp_path: Path, policy: str) -> None:
    folder, prompts = write_model("llama", tmp_path / "model"), draw_prompts(10, longest=200, seed=11)
    (tmp_path / "program.py").write_text(PROGRAM)
    given = [json.dumps(one) for one in (folder, {"policy": policy, "size": SIZE}, prompts, ANSWER)]
    binding = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    command = [sys.executable, str(tmp_path / "program.py"), *given]
    done = subprocess.run(command, env={**os.environ, **binding}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    [answers] = [json.loads(line[8:]) for line in done.stdout.splitlines() if line.startswith("answers:")]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rnn = MultiStateRNN(model.eval(), policy, SIZE)
    assert answers == [expect_answer(rnn, tokens, ANSWER).tokens for tokens in prompts]
