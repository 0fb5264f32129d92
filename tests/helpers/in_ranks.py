"""What every process of a tensor-parallel job checks, against the same model in one process; run by torchrun.

    torchrun --nproc-per-node 2 in_ranks.py FOLDER [PATTERN ...]

FOLDER has the models. Rank 0 writes what each check (of those that match a pattern) has found to FOLDER/N-ranks.json:
"" where it holds. Then the last rank is killed while all of them read and save. The launcher ends the others by SIGTERM
as soon as it sees that; they ignore it, and notice the loss themselves before its SIGKILL, 30 s later.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from fnmatch import fnmatch
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

import msrnn
from msrnn.core.recall_slots import RecallSlots
from msrnn.engine.local_executor import LocalState
from msrnn.engine.rank import follow
from msrnn.engine.tensor_parallel_executor import TensorParallelExecutor
from msrnn.errors import UsageError
from msrnn.policy import NAMES
from msrnn.recall import Recall
from tests.helpers import interpreted as interpreted
from tests.helpers.networks import write_random_weights
from tests.helpers.tiny import left_padded, tokens

POLICIES = ("full", *NAMES, "tova+4", "decay=0.9,value_norm=1")
SIZE = 9
SECONDS = 180
Check = Callable[[PreTrainedModel, PreTrainedModel, Path], None]


def rnns(shared: Any, alone: Any, policy: str, **options: Any) -> tuple[msrnn.MultiStateRNN, msrnn.MultiStateRNN]:
    size = None if policy == "full" else SIZE
    return msrnn.MultiStateRNN(shared, policy, size, **options), msrnn.MultiStateRNN(alone, policy, size, **options)


def same(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def same_states(mine: msrnn.MultiState, theirs: msrnn.MultiState) -> None:
    whole = mine.gather_heads()
    assert torch.equal(whole.seen, theirs.seen)
    for i in range(len(theirs.layers)):
        assert torch.equal(whole.positions(i).sort(-1).values, theirs.positions(i).sort(-1).values), f"layer {i}"
        if isinstance(theirs.layers[i], RecallSlots):
            same_archives(whole.layers[i], theirs.layers[i])


def same_archives(mine: RecallSlots, theirs: RecallSlots) -> None:
    assert torch.equal(mine.guest_position.sort(-1).values, theirs.guest_position.sort(-1).values)
    theirs.settle()
    for own, expected in zip(mine.archives, theirs.archives, strict=True):
        assert (own.begin, own.end) == (expected.begin, expected.end)
        for name, tensor in expected.tensors().items():
            if not expected.layout.code:
                same(own.tensors()[name], tensor)
            assert own.tensors()[name].shape == tensor.shape


def reads_and_steps(policy: str, tolerance: float = 1e-4, few: bool = False, **options: Any) -> Check:
    """Of quantized rows, a code is another one where sums that round differently are near its edge."""

    def check(shared: PreTrainedModel, alone: PreTrainedModel, _: Path) -> None:
        mine, theirs = rnns(shared, alone, policy, **options)
        assert mine.spec.fingerprint == theirs.spec.fingerprint
        ids, mask = left_padded(tokens(2, 14 if few else 40), [0, 3 if few else 7])
        one, other = mine.state(2), theirs.state(2)
        same(mine.read(ids, one, mask), theirs.read(ids, other, mask), tolerance)
        for token in tokens(2, 3 if few else 12, seed=3).split(1, dim=1):
            same(mine.step(token, one), theirs.step(token, other), tolerance)
        same_states(one, other)
        if policy != "full" and not few:
            found, expected = (msrnn.trace(rnn, ids, mask).evicted_at for rnn in (mine, theirs))
            assert torch.equal(found, expected)

    return check


def learned(check: Callable[[str], Check], policy: str = "echo") -> Check:
    """A check of a policy with a file of random row weights, which the first rank writes."""

    def run(shared: PreTrainedModel, alone: PreTrainedModel, folder: Path) -> None:
        file = folder / "weights.safetensors"
        if dist.get_rank() == 0:
            write_random_weights(file, alone)
        dist.barrier()
        check(f"{policy},weights={file}" if "=" in policy else f"{policy}@{file}")(shared, alone, folder)

    return run


def recalls(policy: str, tolerance: float = 1e-4, **options: Any) -> Check:
    """Every rank archives the rows of its own KV heads, and its query heads rank them."""

    def check(shared: PreTrainedModel, alone: PreTrainedModel, _: Path) -> None:
        mine, theirs = rnns(shared, alone, policy, recall=4, **options)
        ids, mask = left_padded(tokens(2, 40), [0, 3])
        asking, asks = left_padded(tokens(2, 20, seed=2), [2, 0])
        one, other = mine.state(2), theirs.state(2)
        same(mine.read(ids, one, mask), theirs.read(ids, other, mask), tolerance)
        for every in (1, 8):
            found, expected = (
                rnn.read(asking, state, asks, recall_every=every) for rnn, state in ((mine, one), (theirs, other))
            )
            same(found, expected, tolerance)
            same_states(one, other)
        one, other = one.fork(2), other.fork(2)
        for token in tokens(4, 6, seed=3).split(1, dim=1):
            same(mine.step(token, one), theirs.step(token, other), tolerance)
        same_states(one, other)
        assert bool((other.layers[-1].guest_position >= 0).all())
        shards = mine.spec.shapes[0].shards if mine.spec.shapes[0] else None
        assert other.archive_nbytes == one.archive_nbytes * (shards.count if shards else 1)

    return check


def recalls_by_kernels(policy: str) -> Check:
    """Kernels in the ranks, interpreted, which is slow, against plain torch that searches the same copies of keys."""

    def check(shared: PreTrainedModel, alone: PreTrainedModel, folder: Path) -> None:
        mine = msrnn.MultiStateRNN(shared, policy, SIZE, recall=Recall(4), backend="triton")
        theirs = msrnn.MultiStateRNN(alone, policy, SIZE, recall=Recall(4, search="int8"), backend="torch")
        assert mine.spec.paged
        one, other = mine.state(), theirs.state()
        path = folder / f"kernels-{dist.get_world_size()}.safetensors"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("msrnn.core.paged_slots.LEAST_SEGMENTS", 1)
            same(mine.read(tokens(1, 16), one), theirs.read(tokens(1, 16), other))
            one.save(path)
            dist.barrier()
            one = mine.load_state(path)
            for token in tokens(1, 2, seed=3).split(1, dim=1):
                same(mine.step(token, one), theirs.step(token, other))
        same_states(one, other)

    return check


def generates(policy: str, columns: int = 30, **options: Any) -> Check:
    def check(shared: PreTrainedModel, alone: PreTrainedModel, _: Path) -> None:
        mine, theirs = rnns(shared, alone, policy, **options)
        ids, mask = left_padded(tokens(2, columns), [0, 5])
        settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
        assert torch.equal(mine.generate(ids, **settings), theirs.generate(ids, **settings))

    return check


def caches(shared: PreTrainedModel, alone: PreTrainedModel, _: Path) -> None:
    found = []
    for model in (shared, alone):
        cache = msrnn.MultiStateCache(model, "tova", SIZE)
        found.append(model.generate(tokens(1, 30), past_key_values=cache, max_new_tokens=12, do_sample=False))
    assert torch.equal(*found)


def forks_selects_and_joins(shared: PreTrainedModel, alone: PreTrainedModel, _: Path) -> None:
    states = []
    for rnn in rnns(shared, alone, "tova-head"):
        state = rnn.state(2)
        rnn.read(tokens(2, 20), state)
        states.append(msrnn.MultiState.cat([state.fork(2), state.select([1])]))
        rnn.read(tokens(5, 12, seed=4), states[-1])
    same_states(*states)
    assert states[0].nbytes < states[1].nbytes
    assert states[0].nbytes_in_all >= states[1].nbytes


def saves(policy: str, name: str = "", **options: Any) -> Check:
    """Each number of processes goes on from the files of all others that have run before it, and of one process."""
    asking: Any = {"recall_every": 4} if options.get("recall") else {}
    name = name or (f"{policy}-recall" if asking else policy)

    def check(shared: PreTrainedModel, alone: PreTrainedModel, folder: Path) -> None:
        mine, theirs = rnns(shared, alone, policy, **options)
        expected = theirs.state(2)
        theirs.read(tokens(2, 30), expected)
        state = mine.state(2)
        mine.read(tokens(2, 30), state)
        for rnn, reading in ((theirs, expected), (mine, state)):
            rnn.read(tokens(2, 3, seed=6), reading, protect=True)
        state.save(folder / f"{name}-{dist.get_world_size()}.safetensors", {"by": "ranks"})
        if dist.get_rank() == 0:
            expected.save(folder / f"{name}-1.safetensors")
        dist.barrier()
        logits = theirs.read(tokens(2, 12, seed=5), expected, **asking)
        paths = sorted(folder.glob(f"{name}-[0-9].safetensors"))
        assert len(paths) >= 2
        for path in paths:
            loaded = mine.load_state(path)
            same(mine.read(tokens(2, 12, seed=5), loaded, **asking), logits, 0.05 if "state_dtype" in options else 1e-4)
            same_states(loaded, expected)
            assert loaded.protected == expected.protected

    return check


def refuses_a_broken_state(shared: PreTrainedModel, _: PreTrainedModel, folder: Path) -> None:
    """One process's numbers alone are broken: all of them refuse, and none waits for another."""
    rnn = msrnn.MultiStateRNN(shared, "tova", SIZE)
    state = rnn.state()
    rnn.read(tokens(1, 20), state)
    if dist.get_rank() == 1:
        state.layers[1].values.fill_(torch.nan)
    with pytest.raises(UsageError, match="not saved"):
        state.save(folder / "broken.safetensors")
    assert not (folder / "broken.safetensors").exists()


def refuses_other_tokens(shared: PreTrainedModel, _: PreTrainedModel, __: Path) -> None:
    rnn = msrnn.MultiStateRNN(shared, "tova", SIZE)
    state = rnn.state()
    with pytest.raises(UsageError, match="other tokens"):
        rnn.read(tokens(1, 20, seed=dist.get_rank()), state)
    recalling = msrnn.MultiStateRNN(shared, "h2o", SIZE, recall=4)
    with pytest.raises(UsageError, match="in other blocks"):
        recalling.read(tokens(1, 20), recalling.state(), recall_every=4 if dist.get_rank() else None)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(UsageError, match="manual_seed"):
        rnn.generate(tokens(1, 20), do_sample=True, max_new_tokens=5)
    torch.manual_seed(0)
    rnn.generate(tokens(1, 20), do_sample=True, max_new_tokens=5)


def compares_evictions(shared: PreTrainedModel, _: PreTrainedModel, __: Path) -> None:
    """As with MSRNN_CHECK_SHARDS=1: processes that have evicted other tokens are noticed by all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msrnn.layer.CHECKS", True)
        rnn = msrnn.MultiStateRNN(shared, "tova", SIZE)
        state = rnn.state()
        rnn.read(tokens(1, 20), state)
        rnn.step(tokens(1, 1), state)
        if dist.get_rank() == 1:
            state.layers[1].position[state.layers[1].position == 3] = 4
            state.layers[1].position[0, 0, 0] = 5
        with pytest.raises(UsageError, match="evicted other tokens"):
            rnn.step(tokens(1, 1), state)


def answers_prompts(shared: PreTrainedModel, alone: PreTrainedModel, _: Path) -> None:
    """An engine in every process, which all get the same prompts."""
    found = []
    for rnn in rnns(shared, alone, "tova"):
        prompts = [tokens(1, 5 + 7 * i, seed=i)[0].tolist() for i in range(6)]
        params = msrnn.SamplingParams(temperature=0.7, seed=3, max_tokens=8, ignore_eos=True)
        requests = msrnn.Engine(rnn, slots=3, prompt_tokens=7).generate(prompts, params, progress=False)
        found.append([request.answers[0].tokens for request in requests])
    assert found[0] == found[1]


def leads_and_follows(shared: PreTrainedModel, alone: PreTrainedModel, folder: Path) -> None:
    """One engine over all processes, with sessions in a folder, kept states, and a restart."""
    prompts = [tokens(1, 3 + 5 * i, seed=i)[0].tolist() for i in range(6)]
    compare_engines(*rnns(shared, alone, "tova"), prompts, folder / f"sessions-{dist.get_world_size()}")


def leads_and_recalls(shared: PreTrainedModel, alone: PreTrainedModel, folder: Path) -> None:
    """The same with archives, which sessions and kept states have. A prefix is kept after 64 tokens at least."""
    recall: Any = {"recall": 4, "recall_every": 3, "recall_while_reading": 16}
    prompts = [tokens(1, 140 if i == 1 else 20 + 7 * i, seed=i)[0].tolist() for i in range(4)]
    compare_engines(*rnns(shared, alone, "tova-head", **recall), prompts, folder / f"recalling-{dist.get_world_size()}")


def compare_engines(
    mine: msrnn.MultiStateRNN, theirs: msrnn.MultiStateRNN, prompts: list[list[int]], sessions: Path
) -> None:
    """An engine over all processes and one of this process alone give the same answers, also after a restart."""
    params = msrnn.SamplingParams(temperature=0.7, seed=3, max_tokens=6, ignore_eos=True)
    eager = msrnn.SamplingParams(max_tokens=6, min_tokens=3, seed=3, stop_token_ids=[5], logit_bias={5: 100})
    turns = [prompts[2], prompts[0], prompts[3]]
    found: dict[str, list[Any]] = {"mine": [], "theirs": []}
    for start in range(2):  # the second one begins after a restart
        if dist.get_rank():
            follow(mine)
            continue
        executor = TensorParallelExecutor(mine, 3)
        with pytest.raises(TypeError, match="not a state of this executor"):  # the other ranks would take one of theirs
            executor.copy(LocalState(theirs.state()), "host")
        engines = {"mine": msrnn.Engine(executor, prompt_tokens=7, sessions=sessions)}
        apart = sessions.with_name(f"alone-{sessions.name}")
        engines["theirs"] = msrnn.Engine(theirs, slots=3, prompt_tokens=7, sessions=apart)
        for name, engine in engines.items():
            requests = engine.generate(prompts + prompts[:2], params, progress=False)
            stopped = engine.generate(prompts[:2], eager, progress=False)
            assert [len(request.answers[0].tokens) for request in stopped] == [eager.min_tokens] * 2
            requests += stopped
            for turn in turns[2 * start : 2 * start + 2]:
                requests.append(engine.request(turn, params, "talk", protect=2))
                engine.add(requests[-1])
                while not engine.idle:
                    engine.step()
            assert engine.prefixes.hits
            found[name].append([request.answers[0].tokens for request in requests])
            engine.close()
    assert found["mine"] == found["theirs"]


CHECKS: dict[str, Check] = {
    **{f"{policy} reads and steps": reads_and_steps(policy) for policy in POLICIES},
    **{f"{policy} generates": generates(policy) for policy in ("full", "tova", "h2o", "echo")},
    "tova, compressed positions": reads_and_steps("tova", positions="compressed"),
    "h2o, compressed positions": reads_and_steps("h2o", positions="compressed"),
    "echo, int8": reads_and_steps("echo", tolerance=0.05, state_dtype="int8"),
    "tova, fp8": reads_and_steps("tova", tolerance=0.05, state_dtype="fp8"),
    "tova, plain torch": reads_and_steps("tova", backend="torch"),
    "echo, small chunks": reads_and_steps("echo", chunk=5, block=13),
    "echo, Triton kernels": reads_and_steps("echo", few=True, backend="triton"),  # interpreted, which is slow
    "learned weights, small chunks": learned(partial(reads_and_steps, chunk=5, block=13)),
    "learned weights, per head": learned(reads_and_steps, "decay=0.9,per=head,value_norm=1"),
    "learned weights, Triton kernels": learned(partial(reads_and_steps, few=True, backend="triton")),
    "learned weights are saved": learned(lambda policy: saves(policy, "learned")),
    "MultiStateCache": caches,
    "fork, select, cat": forks_selects_and_joins,
    "an engine": answers_prompts,
    "an engine on the leader rank": leads_and_follows,
    "an engine that recalls": leads_and_recalls,
    **{f"{policy} recalls": recalls(policy) for policy in ("tova", "h2o", "echo", "window+4")},
    "tova recalls, small blocks": recalls("tova", block=7, chunk=3),
    "tova recalls, compact positions": recalls("tova", positions="compact"),
    "h2o recalls, int8": recalls("h2o", tolerance=0.05, state_dtype="int8"),
    **{f"{policy} recalls, Triton kernels": recalls_by_kernels(policy) for policy in ("tova", "h2o")},
    "tova generates and recalls": generates("tova", columns=70, recall=4, recall_while_reading=16),
    **{f"{policy} is saved with its archive": saves(policy, recall=4) for policy in ("tova", "h2o")},
    "an archive in 8 bits is saved": saves("tova-head", recall=4, state_dtype="int8"),
    **{f"{policy} is saved": saves(policy) for policy in ("full", "tova", "h2o", "echo", "random")},
    "int8 is saved": saves("tova-head", state_dtype="int8"),
    "a broken state": refuses_a_broken_state,
    "other evictions": compares_evictions,
    "other tokens": refuses_other_tokens,
}
SOME = ("* reads and steps", "tova generates")
FAMILIES = {
    "llama": ("*",),
    "qwen3": SOME,
    "mixtral": SOME,
    # whose projections transformers gathers by itself
    "phi3": ("tova reads and steps", "tova is saved", "tova is saved with its archive"),
    "gpt_oss": ("tova reads and steps", "h2o reads and steps", "tova recalls"),
}


def names(patterns: Sequence[str]) -> list[str]:
    every = [
        f"{family}: {check}"
        for family, own in FAMILIES.items()
        for check in CHECKS
        if any(fnmatch(check, pattern) for pattern in own)
    ]
    return [name for name in every if any(fnmatch(name, pattern) for pattern in patterns or ["*"])]


def main(folder: Path, patterns: Sequence[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for family in {name.split(":")[0]: None for name in names(patterns)}:
        path, states = folder / family, folder / f"{family}-states"
        alone = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
        plan: Any = DistributedConfig(tp_plan="auto")
        shared = AutoModelForCausalLM.from_pretrained(path, dtype="float32", distributed_config=plan)
        states.mkdir(exist_ok=True)
        for name in [name for name in names(patterns) if name.startswith(f"{family}: ")]:
            try:
                CHECKS[name.removeprefix(f"{family}: ")](shared, alone, states)
                found[name] = ""
            except (Exception, pytest.fail.Exception):
                found[name] = f"rank {dist.get_rank()}: {traceback.format_exc()}"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if dist.get_rank() == 0:
        joined = {name: "\n".join(filter(None, (one[name] for one in everywhere))) for name in found}
        (folder / f"{dist.get_world_size()}-ranks.json").write_text(json.dumps(joined))
    lose_the_last_rank(msrnn.MultiStateRNN(shared, "tova", SIZE), folder / "last.safetensors")


def lose_the_last_rank(rnn: msrnn.MultiStateRNN, path: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    state = rnn.state()
    for saved in count():
        rnn.read(tokens(1, 8), state)
        state.save(path)
        if dist.get_rank() == dist.get_world_size() - 1 and saved == 10:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
