from __future__ import annotations

import torch

from msrnn.engine.noise import mix, uniform


def test_noise_is_uniform_and_depends_on_both_numbers() -> None:
    values = torch.tensor([uniform(seed, number) for seed in range(64) for number in range(64)])
    assert len(values.unique()) > 4090
    assert abs(float(values.mean()) - 0.5) < 0.02
    assert 0 <= float(values.min()) < 0.01
    assert 0.99 < float(values.max()) < 1
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def test_mix_is_splitmix64() -> None:
    """The first numbers of its generator with seed 0, as published."""
    step = 0x9E3779B97F4A7C15
    assert [mix(number * step) for number in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_noise_fits_a_float32() -> None:
    values = [uniform(7, number) for number in range(100)]
    assert torch.tensor(values, dtype=torch.float32).tolist() == values
