"""Train learned row weights for a model: read texts, train networks, measure what they lose, write the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
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
from msrnn.hf.inspect import inspect_model
from msrnn.hf.learned_weights import head_shapes
from msrnn.hf.rnn import MultiStateRNN
from msrnn.training.chunks import Kind, cut_kinds
from msrnn.training.collect import Stack, find_stacks
from msrnn.training.decisions import Decisions, join
from msrnn.training.fit import fit_networks
from msrnn.training.networks import Networks, make_empty_network, make_networks
from msrnn.training.plan import TrainingPlan
from msrnn.training.reader import DecisionReader, Stage
from msrnn.training.summary import Lost, describe, make_table, measure_lost
from msrnn.training.work import WorkFolder, digest_of

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
    save_weights(out, training.all_networks(networks), spec.rounded_fingerprint, spec.architecture, facts)
    work.remove()
    return Trained(out, lost, make_table(lost, plan.policy))


def _digest(kind: Kind) -> str:
    return digest_of(kind.train.numpy().tobytes(), kind.held_out.numpy().tobytes())


class _Training:
    """The layers that are trained, and the rounds."""

    def __init__(
        self, model: PreTrainedModel, kinds: list[Kind], plan: TrainingPlan, work: WorkFolder, told: Progress
    ) -> None:
        self.model, self.kinds, self.plan, self.work, self.told = model, kinds, plan, work, told
        found = [find_stacks(MultiStateRNN(model, plan.base, size).spec) for size in plan.sizes]
        self.spec = inspect_model(model)
        # A layer whose sliding window fits into one of the sizes has nothing to choose there.
        common = set.intersection(*({i for stack in stacks for i in stack.layers} for stacks in found))
        stacks = (Stack(one.shape, tuple(i for i in one.layers if i in common)) for one in found[0])
        self.stacks = [stack for stack in stacks if stack.layers]
        name = model_name(model)
        if self.spec.shards is not None:
            raise UsageError("is shared by processes", name="model", value=name, advice="use one process")
        if not self.stacks:
            raise UsageError("has no layer in which the policy chooses at these sizes", name="model", value=name)
        self.train = torch.stack([row for kind in kinds for row in kind.train])
        self.reader = DecisionReader(model, self.stacks, plan, work, told)

    def run(self) -> list[Networks]:
        """All rounds -> the networks of each stack after the last one."""
        plan, needed = self.plan, self.reader.count_bytes(self.train) * self.plan.rounds
        self.work.check_space(needed)
        check_fits(2 * needed, self.model.device, "training", lambda _: "use fewer chunks or moments")
        texts = [self.train] * plan.rounds + [kind.held_out for kind in self.kinds]
        self.told.total(sum(map(self.reader.count_tokens, texts)))
        policy, networks = plan.base, list[Networks]()
        collected: dict[int, list[list[Decisions]]] = {size: [] for size in plan.sizes}
        for number in range(1, plan.rounds + 1):
            name, label = f"round-{number}", f"round {number}"
            for size in plan.sizes:
                collected[size].append(self.reader.read(policy, size, self.train, name, label))
            networks = self._fit(networks, [join(parts) for parts in collected.values()], number)
            if number < plan.rounds:
                file = self.work.file(f"{name}.safetensors")
                spec = self.spec
                save_weights(file, self.all_networks(networks), spec.rounded_fingerprint, spec.architecture)
                policy = replace(plan.base, weights=str(file))
        return networks

    def _fit(self, before: list[Networks], decisions: list[list[Decisions]], number: int) -> list[Networks]:
        """Train the networks of each stack, from those of the round before; decisions of each size."""
        plan, trained = self.plan, list[Networks]()
        for i in range(len(self.stacks)):
            of_sizes = [stacks[i].to(self.model.device) for stacks in decisions]
            own = before[i] if before else make_networks(of_sizes[0], plan.hidden, plan.seed + i)
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
                self.told.cell(Stage(f"round {number}, training, step {done:,} of {self.plan.steps:,}"))

        return on_step

    def measure(self, networks: list[Networks]) -> dict[str, dict[int, Lost]]:
        """What is lost on held-out chunks, of each kind and at each size, where the policy without weights reads."""
        lost: dict[str, dict[int, Lost]] = {}
        for number, kind in enumerate(self.kinds):
            name, label, lost[kind.name] = f"held-out-{number}", f"held-out {kind.name}", {}
            for size in self.plan.sizes:
                stacks = self.reader.read(self.plan.base, size, kind.held_out, name, label)
                lost[kind.name][size] = measure_lost(networks, [stack.to(self.model.device) for stack in stacks])
        return lost

    def all_networks(self, networks: list[Networks]) -> list[WeightNetwork | None]:
        """The networks of all layers of the model; None: a layer without KV rows."""
        made = [shape and make_empty_network(shape) for shape in head_shapes(self.spec)]
        for stack, own in zip(self.stacks, networks, strict=True):
            for i, layer in enumerate(stack.layers):
                made[layer] = own.layer(i)
        return made
