"""Whether a model family works: a tiny random model of each, compared with the unmodified model and with itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as tf
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import msrnn
from tests.helpers.small_configs import small_config

WORKS, WRONG, FAILS = "works", "wrong: ", "fails: "
LENGTH, SIZE, PADDING, NEW = 9, 3, 3, 2
TOLERANCE = 3e-5  # of the largest logit; rounding in float32 is a tenth of it
CLASSES = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
NOT_TEXT = dict.fromkeys(("musicgen", "musicgen_melody"), "reads several codes of audio at once, not text")


class Family(NamedTuple):
    """A row of the table: for each way of use "works", or why not. Both are empty where the model was not tried."""

    name: str
    model: str
    rnn: str = ""
    cache: str = ""
    not_tried: str = ""

    @property
    def is_sound(self) -> bool:
        """Exact, refused or not tried: never accepted and wrong."""
        return not any(verdict.startswith((WRONG, FAILS)) for verdict in (self.rnn, self.cache))


class WrongAnswerError(AssertionError):
    """What differs; its argument says by how much."""


def family(name: str, on_difference: Callable[[str], object] = lambda _: None) -> Family:
    """Build and try one family; `on_difference` gets the size of each error of a model that was accepted."""
    if name in NOT_TEXT:
        return Family(name, CLASSES[name], not_tried=NOT_TEXT[name])
    try:
        expected = Expected(build(name))
    except Exception as error:  # whatever transformers raises when it builds or runs the model by itself
        return Family(name, CLASSES[name], not_tried=f"transformers by itself: {type(error).__name__}: {_line(error)}")
    rnn = _verdict(name, msrnn.MultiStateRNN, check_rnn, expected, on_difference)
    cache = _verdict(name, msrnn.MultiStateCache, check_cache, expected, on_difference)
    return Family(name, CLASSES[name], rnn, cache)


class Expected:
    """What the unmodified model answers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.ids = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        self.mask = torch.ones_like(self.ids)
        self.mask[1, :PADDING] = 0
        self.padded = self.ids * self.mask
        self.logits = logits(model, self.ids, use_cache=False)
        self.alone = logits(model, self.ids[1:, PADDING:], use_cache=False)
        self.generated = generated(model, self.padded, self.mask)


def _verdict(
    name: str,
    wrap: Callable[..., Any],
    check: Callable[[PreTrainedModel, Expected], None],
    expected: Expected,
    on_difference: Callable[[str], object],
) -> str:
    model = build(name)
    try:
        wrap(model, "tova", LENGTH)
    except ValueError as refusal:
        return _line(refusal, type(model).__name__)
    except Exception as error:
        return f"{FAILS}{type(error).__name__}: {_line(error)}"
    try:
        check(model, expected)
    except WrongAnswerError as wrong:
        on_difference(f"{name}, {wrap.__name__}: {wrong}")
        return f"{WRONG}{str(wrong).partition(':')[0]}"
    except Exception as error:
        return f"{FAILS}{type(error).__name__}: {_line(error)}"
    return WORKS


def _line(error: Exception, name: str = "") -> str:
    """The message on one line, without the class's name, numbers that depend on the weights, and what to do instead."""
    text = " ".join(str(error).split()).removeprefix(name).lstrip(": ")
    text = re.sub(r" in layers \[[^]]*\]| of layers \[[^]]*\]| \(?by [\d.]+ ?%\)?", "", text)
    return re.split(r": use |\. |\n", text)[0].replace("|", "\\|")


@torch.no_grad()
def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config, kind = small_config(name), getattr(tf, CLASSES[name])
    if not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)
    model = kind._from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **more: Any) -> Tensor:
    found: Tensor = model(input_ids=ids, **more).logits
    return found


def generated(model: PreTrainedModel, ids: Tensor, mask: Tensor, **more: Any) -> Tensor:
    """The logits that a greedy generation sees, [B, NEW, V]."""
    settings = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
    asked = {"return_dict_in_generate": True, "output_logits": True}
    return torch.stack(model.generate(ids, attention_mask=mask, **settings, **asked, **more).logits, dim=1)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest, as a share of the largest logit; models forbid some tokens by logits near -inf."""
    allowed = expected > -1e30
    return float((found - expected)[allowed].abs().max() / expected[allowed].abs().max())


def check_close(found: Tensor, expected: Tensor, what: str) -> None:
    off = difference(found, expected)
    if not off < TOLERANCE:  # NaN is wrong, too
        raise WrongAnswerError(f"{what}: off by {off:.2g} of the largest logit")


def check_forgets(bounded: Tensor, expected: Tensor) -> None:
    if difference(bounded, expected) < TOLERANCE:
        raise WrongAnswerError("bounded: nothing is forgotten")


def check_rnn(model: PreTrainedModel, expected: Expected) -> None:
    """With room for everything it is the unmodified model; with little, reading is stepping."""
    ids = expected.ids
    rnn = msrnn.MultiStateRNN(model, "tova", LENGTH)
    check_close(rnn.read(ids, rnn.state(2)), expected.logits, "read")
    check_close(stepped(rnn, ids, rnn.state(2)), expected.logits, "stepped")
    found = rnn.read(expected.padded, rnn.state(2), expected.mask)
    check_close(found[:1], expected.logits[:1], "beside a padded row")
    check_close(found[1:, PADDING:], expected.alone, "padded")
    bounded = msrnn.MultiStateRNN(model, "tova", SIZE, chunk=4)
    whole, parts = bounded.state(2), bounded.state(2)
    read = bounded.read(ids, whole)
    check_close(stepped(bounded, ids, parts), read, "bounded, stepped against read")
    check_forgets(read, expected.logits)
    for i, shape in enumerate(bounded.spec.shapes):
        if shape and not torch.equal(whole.positions(i).sort(-1).values, parts.positions(i).sort(-1).values):
            raise WrongAnswerError(f"bounded, tokens held after stepping: others than after reading in layer {i}")


def stepped(rnn: msrnn.MultiStateRNN, ids: Tensor, state: msrnn.MultiState) -> Tensor:
    return torch.cat([rnn.step(token, state) for token in ids.split(1, dim=1)], dim=1)


def check_cache(model: PreTrainedModel, expected: Expected) -> None:
    """The same under the model's own `forward` and `generate`."""
    ids = expected.ids

    def read(size: int, width: int) -> Tensor:
        cache = msrnn.MultiStateCache(model, "tova", size)
        parts = [logits(model, part, past_key_values=cache, use_cache=True) for part in ids.split(width, dim=1)]
        return torch.cat(parts, dim=1)

    check_close(read(LENGTH, LENGTH), expected.logits, "read")
    check_close(read(LENGTH, 1), expected.logits, "stepped")
    roomy = msrnn.MultiStateCache(model, "tova", 2 * LENGTH)
    found = generated(model, expected.padded, expected.mask, past_key_values=roomy)
    check_close(found, expected.generated, "generated beside a padded row")
    whole = read(SIZE, LENGTH)
    check_close(read(SIZE, 1), whole, "bounded, stepped against read")
    check_forgets(whole, expected.logits)
