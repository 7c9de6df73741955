"""What cards can do: found by the names that JAX gives devices."""

import pytest

from cssm.cards import PEAKS, peak_flops


@pytest.mark.parametrize(
    "kind,bf16,f32",
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 494.7e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12),
        ("NVIDIA H200", 989.4e12, 494.7e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 156e12),
        ("NVIDIA L4", 121e12, 60e12),
        ("NVIDIA L40S", 362.05e12, 183e12),
        ("TPU v5 lite", 197e12, None),
        ("TPU v5", 459e12, None),
    ],
)
def test_a_card_is_known_by_its_name(kind, bf16, f32):
    assert (peak_flops(kind, "bf16"), peak_flops(kind, "f32")) == (bf16, f32)


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA GH200 480GB", "NVIDIA L40", "NVIDIA A1000", "TPU v5x", ""])
def test_what_is_not_known_is_not_guessed(kind):
    assert peak_flops(kind, "bf16") is None


def test_tensor_cores_do_twice_as_much_in_bf16():
    """So that a figure with sparsity, which is twice as high, would be noticed in one of the two."""
    ratios = {name: peak.bf16 / peak.f32 for name, peak in PEAKS.items() if peak.f32}
    assert all(1.95 < ratio < 2.05 for ratio in ratios.values()), ratios
