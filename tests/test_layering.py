"""Each module imports only from those above it: folders from earlier folders, and files of a folder from earlier files.

`ORDER` is the architecture in one list. A folder of the package is listed with its files in order; a folder that is not
listed with files may import freely inside itself, but without an import cycle.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import msrnn

ORDER = [
    "errors",
    "checks",
    "recall",
    "policy",
    "bound",
    "budget",
    "size",
    "scored",
    "web",
    "core",
    "reference",
    "backends",
    "layer",
    "recall_layer",
    "hf",
    "engine",
    "server",
    "integrations",
    "evaluation",
    "training",
    "analysis",
    "cli",
]
INSIDE = {
    "core": [
        "atomic",
        "segment_folder",
        "shared_sizes",
        "state_folder",
        "device_memory",
        "pinned_memory",
        "notes",
        "torchrun",
        "ray_cluster",
        "rope",
        "scores",
        "change",
        "quantization",
        "shards",
        "protection",
        "own_sizes",
        "row_weights",
        "weight_network",
        "weights_file",
        "buffers",
        "growing",
        "slots",
        "segments",
        "archive",
        "recall_slots",
        "paged_slots",
        "guests",
        "validation",
        "state_file",
        "segment_files",
        "layer_files",
        "fingerprint",
        "state_layers",
        "mark",
        "state",
    ],
    "backends": ["base", "decode_copies", "torch", "scored", "numba", "triton", "__init__"],
    "hf": [
        "cache_state",
        "cache_layers",
        "attention",
        "tensor_parallel",
        "fingerprint",
        "handover",
        "inspect_layers",
        "inspect",
        "learned_weights",
        "state_options",
        "extension",
        "recall_options",
        "state_spec",
        "specify",
        "state_conversion",
        "inputs",
        "learned_positions",
        "cache",
        "wavefront",
        "read_plan",
        "captured_graph",
        "draft",
        "graph_buffers",
        "cuda_graphs",
        "block_reader",
        "recalling_reader",
        "stop_tokens",
        "generation_settings",
        "sequence_ends",
        "generation",
        "rnn",
        "trace",
        "adapters",
        "model_cache",
        "download",
        "loading",
        "template_variables",
        "known_call",
        "messages",
        "model_options",
        "chat_template",
        "tool_template",
        "long_read",
    ],
    "engine": [
        "retention",
        "session_id",
        "constraint",
        "grammars",
        "requests",
        "arguments",
        "noise",
        "detokenizer",
        "executor",
        "prompt_groups",
        "guesses",
        "draft_model",
        "state_retention",
        "prompt_logprobs",
        "sampling",
        "decode_batch",
        "local_executor",
        "rank",
        "tensor_parallel_executor",
        "running_answer",
        "writer",
        "prefix_cache_files",
        "prefix_cache",
        "session_notes",
        "session_files",
        "sessions",
        "pending_saves",
        "batch",
        "prefill",
        "loop",
        "offline",
        "scheduler",
        "engine",
        "lanes",
    ],
}
ROOT = Path(msrnn.__file__).parent
PATHS = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]


def module_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


MODULES = {module_of(path): path for path in PATHS}


@cache
def imported(path: Path) -> frozenset[tuple[str, ...]]:
    """The modules of the package that a file imports, wherever in the file; names that only types need are left out."""
    found: set[tuple[str, ...]] = set()
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "msrnn":
            parts = tuple(node.module.split(".")[1:])
            names = {(*parts, alias.name) for alias in node.names} & MODULES.keys()
            found |= names or ({parts} if parts else set())
        elif isinstance(node, ast.Import):
            found |= {tuple(a.name.split(".")[1:]) for a in node.names if a.name.startswith("msrnn.")}
    return frozenset(found & MODULES.keys())


def test_a_folder_imports_only_from_those_above_it() -> None:
    assert {module[0] for module in MODULES} == set(ORDER)
    for module, path in MODULES.items():
        below = {other for other in imported(path) if ORDER.index(other[0]) > ORDER.index(module[0])}
        assert not below, f"{path} imports {below}"


def test_a_file_imports_only_from_those_above_it_in_its_folder() -> None:
    for folder, order in INSIDE.items():
        inside = {module: path for module, path in MODULES.items() if module[0] == folder and path.parent != ROOT}
        names = {module: module[1] if len(module) > 1 else "__init__" for module in inside}
        assert set(names.values()) | {"__init__"} == {*order, "__init__"}
        for module, path in inside.items():
            if names[module] == "__init__" and "__init__" not in order:
                assert not imported(path)
                continue
            for other in imported(path) & inside.keys():
                assert order.index(names[other]) <= order.index(names[module]), f"{path} imports {other}"


def test_the_drawn_graph_is_the_code() -> None:
    """The picture in docs/architecture.md; what all import is not drawn."""
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    drawn = {tuple(line.strip().split(" --> ")) for line in page.splitlines() if " --> " in line}
    everywhere = {"errors", "checks", "recall", "policy", "bound", "budget", "size", "scored"}
    found = {(module[0], other[0]) for module, path in MODULES.items() for other in imported(path)}
    assert drawn == {(one, other) for one, other in found if one != other and other not in everywhere}


def test_the_map_is_short() -> None:
    """A map is read in one sitting; decisions have pages of their own."""
    assert len((ROOT.parent / "docs" / "architecture.md").read_text().splitlines()) <= 120


def test_no_two_modules_import_each_other() -> None:
    """Directly or through others; raises CycleError, which names them."""
    graph = {module: imported(path) - {module} for module, path in MODULES.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_production_code_does_not_import_the_reference() -> None:
    assert [str(path) for path in PATHS if ("reference",) in imported(path)] == []


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import msrnn, sys; msrnn.Policy.parse('tova'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
