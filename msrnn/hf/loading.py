"""Load a model and its tokenizer: from the hub, a folder or a GGUF file, or the small default model."""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed.configuration_utils import DistributedConfig

from msrnn.errors import FileError, UsageError
from msrnn.hf import model_cache
from msrnn.hf.adapters import check_adapter, merge_adapter
from msrnn.hf.fingerprint import non_finite_weights
from msrnn.hf.stop_tokens import complete_stop_tokens

DTYPES = ("auto", "bfloat16", "float16", "float32")
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_BAD_CHECKPOINT = (  # what transformers raises for a damaged or unknown checkpoint, or a missing package
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RecursionError,
    SafetensorError,
    StrictDataclassError,
)
_SOURCES = "give a folder, a .gguf file, or a name on the hub"


class Loaded(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(
    name: str | None = None,
    device: str = "auto",
    dtype: str | None = None,
    on_convert: Callable[[str], None] | None = None,
    shared: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    lora: str | os.PathLike[str] | None = None,
) -> Loaded:
    """Load a model and its tokenizer from a folder, a .gguf file or the hub; without a name, the small default model.

    device      "auto" is CUDA if there is a CUDA device
    dtype       None is float32 on the CPU, and elsewhere "auto": the checkpoint's own
    on_convert  called with a message before a GGUF file is converted, which happens once and takes a while
    shared      whether the processes that torchrun has started share the model
    revision    a branch, tag or commit of a model on the hub
    trust_remote_code   run the model's own code, if transformers does not have its family
    lora        the folder of a LoRA adapter, which is merged into the weights
    """
    where = device_named(device)
    check_dtype(dtype)
    if lora is not None:
        if shared:
            reason = "is not merged into weights that processes share"
            raise UsageError(reason, name="lora", value=str(lora), advice="save the merged model first")
        check_adapter(Path(lora))
    kind = _kind(name, revision, trust_remote_code)
    source = find_pretrained(name, on_convert)
    try:
        with _quiet(bars=not isinstance(source, Path)):
            model = _weights(source, dtype=dtype or _default_dtype(where), **kind, **_plan(shared))
    except _BAD_CHECKPOINT as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            advice = "read it, and give trust_remote_code (msrnn serve --trust-remote-code) to run it"
            raise UsageError(f"model {name!r}: needs its own code, which can do anything", advice=advice) from error
        raise UsageError(f"model {name!r} cannot be loaded: {_first_line(error)} ({_SOURCES})") from error
    tokenizer = _tokenizer(source, name, kind)
    complete_stop_tokens(model, tokenizer)
    if not shared:  # else transformers has placed it, a GPU for each process
        model = model.to(where)
    if lora is not None:
        model = merge_adapter(model, Path(lora))
    if broken := non_finite_weights(model):
        raise UsageError(f"model {name!r}: {broken}; download its weights again")
    return Loaded(model, tokenizer)


def _plan(shared: bool) -> dict[str, Any]:
    """The argument by which transformers splits a model among processes."""
    return {"distributed_config": DistributedConfig(tp_plan="auto")} if shared else {}


def _kind(name: str | None, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """The arguments by which transformers chooses files and code. Refuses a revision of what has none."""
    if revision is None:
        return {"trust_remote_code": trust_remote_code}
    if name is None or Path(os.path.expanduser(name)).exists():
        raise UsageError("only models on the hub have one", name="revision", value=revision, advice="leave it out")
    return {"trust_remote_code": trust_remote_code, "revision": revision}


def _tokenizer(source: str | Path, name: str | None, kind: dict[str, Any]) -> Any:
    try:
        with _quiet(bars=not isinstance(source, Path)):
            return AutoTokenizer.from_pretrained(source, **kind)
    except Exception as error:  # errors of tokenizers have no common kind, and messages of transformers are pages long
        if isinstance(source, Path) and not any(source.glob("*token*")):
            raise UsageError(
                f"model {name!r}: the folder has no tokenizer; save it there as well, "
                f"with AutoTokenizer.from_pretrained(…).save_pretrained({str(source)!r})"
            ) from error
        raise UsageError(
            f"model {name!r}: its tokenizer cannot be loaded, download it again ({_sentence(error)})"
        ) from error


def _weights(source: str | Path, **kwargs: Any) -> Any:
    """Load the model. Refuses missing weights, which transformers would fill with random numbers."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **kwargs)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise UsageError("the shapes of its weights are not those in its config.json") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise UsageError(f"{len(missing)} of the model's weights are missing, the first is {missing[0]}")
    return model


def check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"must be one of {', '.join(DTYPES)}", name="dtype", value=dtype)


def device_named(device: str) -> torch.device:
    """Check a device's name; `auto` is CUDA if there is a CUDA device."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    unknown = UsageError("must be 'auto', 'cpu' or 'cuda'", name="device", value=device)
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise unknown from error
    if where.type not in ("cpu", "cuda"):
        raise unknown
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch finds no CUDA device", name="device", value=device, advice="use 'cpu' or 'auto'")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"must be at most 'cuda:{torch.cuda.device_count() - 1}', the last CUDA device", name="device", value=device
        )
    return where


def _default_dtype(device: torch.device) -> str:
    return "float32" if device.type == "cpu" else "auto"


def find_pretrained(name: str | None, on_convert: Callable[[str], None] | None = None) -> str | Path:
    """Find the argument of `from_pretrained`: a folder that exists, or a name on the hub; a GGUF file is converted."""
    if name is None:
        return small_model(on_convert)
    path = Path(os.path.expanduser(name))  # unlike Path.expanduser, leaves an unknown user's home as it is
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise UsageError(f"model {name!r}: not a .gguf file; {_SOURCES}")
        return convert_gguf(path, on_convert)
    if path.suffix == ".gguf" or not _HUB_NAME.fullmatch(name):
        raise UsageError(f"model {name!r}: no such folder or file; {_SOURCES}")
    return name


def small_model(on_convert: Callable[[str], None] | None = None) -> Path:
    """The folder of the small default model, converted if its wheel is installed."""
    folder = model_cache.small_folder()
    if folder.is_dir():
        return folder
    file = model_cache.find_installed_file()
    if file is None or model_cache.missing_gguf_packages():
        raise model_cache.missing_model()
    return convert_gguf(file, on_convert)


def convert_gguf(file: Path, on_convert: Callable[[str], None] | None = None) -> Path:
    """Convert a GGUF file to a folder in the cache, once; the folder's name contains a digest of the file.

    The folder appears whole or not at all: of two processes the first to finish wins, and an interrupted conversion
    leaves nothing.
    """
    folder = model_cache.folder_of(file, model_cache.sha256(file))
    if folder.is_dir():
        return folder
    if model_cache.missing_gguf_packages():
        needed = " and ".join(model_cache.GGUF_PACKAGES)
        raise UsageError(f"{file.name}: reading GGUF needs the packages {needed}: pip install 'msrnn[gguf]'")
    if on_convert:
        on_convert(f"converting {file.name} once, about half a minute")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        whole = Path(temporary) / "model"
        _convert(file, whole)
        model_cache.move_into_place(whole, folder)
    return folder


def _convert(file: Path, folder: Path) -> None:
    """Write the dequantized weights of a GGUF file as float32 safetensors."""
    try:
        with _quiet(bars=False), redirect_stderr(io.StringIO()):  # one progress bar has no other switch
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            read = _weights(file.parent, gguf_file=file.name, dtype=torch.float32)
    except Exception as error:
        raise FileError(f"not a GGUF file that transformers can read ({_first_line(error)})", file) from error
    auto: Any = AutoModelForCausalLM
    config = read.config
    del config.quantization_config  # with it, the model refuses to be saved
    with _quiet(bars=False):
        plain = auto.from_config(config, dtype=torch.float32)
        plain.load_state_dict(read.state_dict())
        plain.generation_config = read.generation_config
        complete_stop_tokens(plain, tokenizer)
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _quiet(bars: bool) -> Iterator[None]:
    """Silence transformers' remarks, and its progress bars unless `bars` (for a download)."""
    loggers: tuple[Any, Any] = transformers.logging, huggingface_hub.logging
    levels = [logger.get_verbosity() for logger in loggers]
    bars_enabled = loggers[0].is_progress_bar_enabled()
    try:
        for logger in loggers:
            logger.set_verbosity_error()
        if not bars:
            loggers[0].disable_progress_bar()
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.set_verbosity(level)
        if bars_enabled:
            loggers[0].enable_progress_bar()


def _sentence(error: Exception) -> str:
    """The error's message in one line, shortened between words."""
    return shorten(str(error).strip().rstrip(".:") or type(error).__name__, 300, placeholder=" …")


def _first_line(error: Exception) -> str:
    """The first line of the error's message, or the first two if it ends with a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    if isinstance(error, KeyError):  # its message is only the key
        return f"unknown value {lines[0]}"
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
