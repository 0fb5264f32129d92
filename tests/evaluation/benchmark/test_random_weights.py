from __future__ import annotations

import pytest

from msrnn.evaluation.benchmark.random_weights import SHAPES, check_shape, random_model


def test_random_weights() -> None:
    model = random_model("tiny", "cpu")
    assert str(model.dtype) == "torch.float32"
    assert str(random_model("tiny", "cpu", "bfloat16").dtype) == "torch.bfloat16"
    assert model.config.vocab_size == SHAPES["tiny"]["vocab_size"]
    with pytest.raises(ValueError, match="did you mean 'llama-2-7b'"):
        check_shape("llama-2-7")
    with pytest.raises(ValueError, match="dtype='int3'"):
        random_model("tiny", "cpu", "int3")
