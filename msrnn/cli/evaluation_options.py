"""Options that evaluations share: the model, the texts, and what to do with the records of the folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from msrnn.cli.options import Cpus, Device, Dtype, Model, Ray
from msrnn.cli.results_folder import open_store
from msrnn.cli.terminal import note, quiet
from msrnn.core.ray_cluster import check_cpus
from msrnn.core.torchrun import is_torchrun
from msrnn.errors import UsageError
from msrnn.hf.model_options import SMALL

if TYPE_CHECKING:
    from msrnn.evaluation.ray_workers import RayWorkers
    from msrnn.evaluation.store import Check, Store
    from msrnn.hf.loading import Loaded as LoadedModel

Text = Annotated[
    Path | None,
    Option(
        help="A folder of .txt files, one .txt file, .jsonl lines with a text, or .npy files of token ids.",
        show_default="PG-19's test set",
    ),
]
Length = Annotated[
    int, Option(help="Tokens of a chunk, including the token that opens a text, if the tokenizer adds one.")
]
Books = Annotated[int | None, Option(help="Number of texts to take chunks from.", show_default="all")]
ChunksPerBook = Annotated[int, Option(help="Most chunks to take from each text.")]
Seed = Annotated[int, Option(help="Random seed that selects texts and chunks.")]
Batch = Annotated[int | None, Option(help="Chunks read at once.", show_default="1 on cpu, 64 or what fits on cuda")]
Against = Annotated[
    str | None, Option(help="The policy that the others are compared with.", show_default="tova, or the first")
]
Chat = Annotated[
    bool | None,
    Option("--chat/--no-chat", help="Use the chat template, or the bare text.", show_default="chat if there is one"),
]
Recompute = Annotated[
    bool,
    Option("--force", help="Compute these results again, even if the folder has them; its other records are kept."),
]
SkipDamaged = Annotated[
    bool, Option("--skip-damaged", help="Move damaged lines of the folder's .jsonl to another file, and continue.")
]


@dataclass(frozen=True)
class EvaluationOptions:
    """The group of options of every evaluation: its model, and what to do with the records of the folder."""

    model: Model = None
    device: Device = "auto"
    dtype: Dtype = None
    force: Recompute = False
    skip_damaged: SkipDamaged = False
    ray: Ray = None
    cpus: Cpus = None

    @property
    def model_name(self) -> str:
        return self.model or SMALL

    def check(self) -> None:
        """Refuse a bad device or dtype before anything is loaded; silence other libraries."""
        from msrnn.hf.loading import check_dtype, device_named

        check_cpus(self.ray, self.cpus)
        if self.ray is not None and is_torchrun():
            raise UsageError(
                "--ray: workers load whole models, which torchrun's processes share; leave one of them out"
            )
        if self.ray is None:
            device_named(self.device)
        check_dtype(self.dtype)
        quiet()

    @cached_property
    def workers(self) -> RayWorkers | None:
        """The cluster that computes; None: this process does."""
        if self.ray is None:
            return None
        from msrnn.core.ray_cluster import Cluster
        from msrnn.evaluation.ray_workers import RayWorkers

        cluster = Cluster(self.ray, self.device, self.cpus)
        note(cluster.summary())
        return RayWorkers(cluster, self.model, self.dtype)

    def load(self) -> LoadedModel:
        """The model and its tokenizer. If others compute, its weights are only identified here, on the CPU."""
        from msrnn.hf.loading import load

        if self.workers is None:
            return load(self.model, self.device, self.dtype, on_convert=note, shared=is_torchrun())
        return load(self.model, "cpu", self.workers.dtype, on_convert=note)

    def open_store(self, folder: Path, name: str, check: Check) -> Store:
        return open_store(folder, name, check, force=self.force, skip_damaged=self.skip_damaged)
