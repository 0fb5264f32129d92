"""Train learned row weights for a model: read texts, train networks, measure what they lose, write the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.core.atomic import target_of
from msrnn.core.device_memory import check_fits
from msrnn.core.weight_network import WeightNetwork
from msrnn.core.weights_file import save_weights
from msrnn.errors import UsageError
from msrnn.evaluation.api.common import Texts, model_name
from msrnn.evaluation.environment import environment, model_key
from msrnn.evaluation.report import Table
from msrnn.evaluation.runner import Progress
from msrnn.hf.learned_weights import head_shapes
from msrnn.hf.rnn import MultiStateRNN
from msrnn.training.chunks import Kind, cut_kinds
from msrnn.training.collect import Stack, collect_decisions, find_stacks
from msrnn.training.decisions import Decisions, join, load_decisions, save_decisions
from msrnn.training.fit import fit_networks
from msrnn.training.networks import Networks, make_empty_network, make_networks
from msrnn.training.plan import HORIZON, TrainingPlan
from msrnn.training.summary import Lost, describe, make_table, measure_lost
from msrnn.training.work import WorkFolder, digest_of

TOGETHER = 4  # chunks that are read at once
SHOWN = 100  # steps


class Trained(NamedTuple):
    """A written file, and what its weights lose on chunks that were not trained on."""

    path: Path
    lost: dict[str, dict[int, Lost]]  # by the kind of text, and the size
    table: Table


def train_weights(
    model: PreTrainedModel,
    texts: Mapping[str, Texts],
    out: str | Path,
    plan: TrainingPlan | None = None,
    *,
    tokenizer: Any = None,
    about: Mapping[str, Any] | None = None,
    restart: bool = False,
    progress: Progress | None = None,
) -> Trained:
    """Train networks of row weights for a frozen model, and write them to a file that a policy names.

    An interrupted call leaves a folder beside `out`, from which the same call continues.

    texts      kinds of text by name; each is a list of strings or token ids, or has them by name
    out        the file to write, which a policy names as in "echo@weights.safetensors"
    tokenizer  needed where texts are strings
    about      facts that are written into the file
    restart    remove what an interrupted call has left
    """
    plan, told = plan or TrainingPlan(), progress or Progress()
    out = target_of(Path(out))
    plan.name(str(out))
    kinds = cut_kinds(model, texts, tokenizer, plan)
    identity = {**model_key(model), **asdict(plan), "texts": {kind.name: _digest(kind) for kind in kinds}}
    work = WorkFolder(out, json.loads(json.dumps(identity)), restart)
    if work.resumes:
        told.note(f"continuing the work in {work.path}")
    training = _Training(model, kinds, plan, work, told)
    networks = training.run()
    lost = training.measure(networks)
    facts = {**asdict(plan), "texts": {kind.name: len(kind.train) for kind in kinds}, **environment(model.device)}
    facts |= {"model": model_name(model), **(about or {}), "lost": describe(lost)}
    spec = training.spec
    save_weights(out, training.all_networks(networks), spec.fingerprint, spec.architecture, facts)
    work.remove()
    return Trained(out, lost, make_table(lost, plan.policy))


def _digest(kind: Kind) -> str:
    return digest_of(kind.train.numpy().tobytes(), kind.held_out.numpy().tobytes())


@dataclass
class _Training:
    model: PreTrainedModel
    kinds: list[Kind]
    plan: TrainingPlan
    work: WorkFolder
    told: Progress
    _shown: str = ""

    def __post_init__(self) -> None:
        found = [find_stacks(MultiStateRNN(self.model, self.plan.policy, size).spec) for size in self.plan.sizes]
        self.spec = MultiStateRNN(self.model, self.plan.policy, self.plan.sizes[0]).spec.model
        # A layer whose sliding window fits into one of the sizes has nothing to choose there.
        common = set.intersection(*({i for stack in stacks for i in stack.layers} for stacks in found))
        stacks = (Stack(one.shape, tuple(i for i in one.layers if i in common)) for one in found[0])
        self.stacks = [stack for stack in stacks if stack.layers]
        if not self.stacks:
            raise UsageError(
                "has no layer in which the policy chooses at these sizes", name="model", value=model_name(self.model)
            )
        self.train = torch.stack([row for kind in self.kinds for row in kind.train])

    def run(self) -> list[Networks]:
        """All rounds -> the networks of the last one."""
        needed = sum(self._count_bytes(size) for size in self.plan.sizes) * self.plan.rounds
        self.work.check_space(needed)
        check_fits(2 * needed, self.model.device, "training", lambda _: "use fewer chunks or moments")
        self.told.total(self._count_tokens())
        policy, networks = self.plan.policy, list[Networks]()
        collected: dict[int, list[list[Decisions]]] = {size: [] for size in self.plan.sizes}
        for number in range(1, self.plan.rounds + 1):
            for size in self.plan.sizes:
                collected[size].append(self._collect(policy, size, self.train, f"round-{number}"))
            networks = self._fit(networks, {size: join(parts) for size, parts in collected.items()}, number)
            if number < self.plan.rounds:
                file = self.work.file(f"round-{number}.safetensors")
                save_weights(file, self.all_networks(networks), self.spec.fingerprint, self.spec.architecture)
                policy = self.plan.name(str(file))
        return networks

    def _fit(self, networks: list[Networks], decisions: Mapping[int, list[Decisions]], number: int) -> list[Networks]:
        plan, device = self.plan, self.model.device
        trained = []
        for i in range(len(self.stacks)):
            of_sizes = [stacks[i].to(device) for stacks in decisions.values()]
            own = networks[i] if networks else make_networks(of_sizes[0], plan.hidden, plan.seed + i)
            file = self.work.file(f"round-{number}-networks-{i}.pt")
            fit_networks(own, of_sizes, plan.steps, plan.seed + number, file, self._show_steps(number))
            trained.append(own)
        return trained

    def _show_steps(self, number: int) -> Callable[[int], None]:
        """A function that counts steps, and shows some of the counts."""
        done = 0

        def on_step(steps: int) -> None:
            nonlocal done
            done += steps
            if done % SHOWN == 0:
                self._show(f"round {number}, training, step {done:,} of {self.plan.steps:,}")

        return on_step

    def _show(self, label: str) -> None:
        if label != self._shown:
            self._shown = label
            self.told.cell(_Stage(label))

    def measure(self, networks: list[Networks]) -> dict[str, dict[int, Lost]]:
        """What is lost on held-out chunks, of each kind and at each size, where the policy without weights reads."""
        lost: dict[str, dict[int, Lost]] = {}
        for number, kind in enumerate(self.kinds):
            lost[kind.name] = {}
            for size in self.plan.sizes:
                stacks = self._collect(self.plan.policy, size, kind.held_out, f"held-out-{number}")
                lost[kind.name][size] = measure_lost(networks, [stack.to(self.model.device) for stack in stacks])
        return lost

    def all_networks(self, networks: list[Networks]) -> list[WeightNetwork | None]:
        """The networks of all layers of the model; None: a layer without KV rows."""
        made = [shape and make_empty_network(shape) for shape in head_shapes(self.spec)]
        for stack, own in zip(self.stacks, networks, strict=True):
            for i, layer in enumerate(stack.layers):
                made[layer] = own.layer(i)
        return made

    def _collect(self, policy: str, size: int, chunks: Tensor, name: str) -> list[Decisions]:
        """The decisions on all chunks, each part read once and then taken from its file."""
        rnn: MultiStateRNN | None = None
        parts = []
        for number, part in enumerate(chunks.split(TOGETHER)):
            file = self.work.file(f"{name}-{size}-{number}.safetensors")
            moments = self._draw_moments(size, number)
            found = load_decisions(file)
            if found is None:
                self._show(f"{name.replace('-', ' ')}, size {size:,}, reading")
                rnn = rnn or MultiStateRNN(self.model, policy, size)
                found = collect_decisions(rnn, self.stacks, part, moments, self.told.tokens)
                found = [stack.to(torch.device("cpu")) for stack in found]
                save_decisions(file, found)
            else:
                self.told.tokens(part.shape[0] * (moments[-1] + HORIZON))
            parts.append(found)
        return join(parts)

    def _draw_moments(self, size: int, number: int) -> list[int]:
        """The moments of the chunks that are read together."""
        possible = self.plan.moments_of(size)
        draw = torch.Generator().manual_seed((self.plan.seed << 20) + (number << 4))
        order = torch.randperm(len(possible), generator=draw)[: self.plan.moments]
        return sorted(possible[i] for i in order.tolist())

    def _count_tokens(self) -> int:
        """Tokens to read in all."""
        held_out = [kind.held_out for kind in self.kinds]
        texts = [self.train] * self.plan.rounds + held_out
        return sum(
            len(part) * (self._draw_moments(size, number)[-1] + HORIZON)
            for size in self.plan.sizes
            for chunks in texts
            for number, part in enumerate(chunks.split(TOGETHER))
        )

    def _count_bytes(self, size: int) -> int:
        """Bytes of the decisions of one round at a size, at most."""
        moments = len(self.train) * min(self.plan.moments, len(self.plan.moments_of(size)))
        inputs = sum(
            len(stack.layers) * stack.shape.kv_heads * (4 * (stack.shape.key_dim + stack.shape.value_dim) + 12)
            for stack in self.stacks
        )
        return moments * self.plan.count_candidates(size) * inputs


class _Stage(NamedTuple):
    """What is done now, as progress shows it."""

    label: str
