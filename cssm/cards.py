"""What accelerators can do at most: dense products of matrices, from their makers' data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one card. f32: in TF32 where the card has it, which is what XLA takes for products of float32."""

    bf16: float
    f32: float | None


# By a part of the name that JAX gives a device; the first that fits. NVIDIA's data sheets state figures with sparsity
# for the newer cards, of which these are half: A100 (2021), H100 (2023), H200 (2024), L4, L40S (2023), A10 (2021).
# TPUs: the system architecture pages of Google Cloud TPU, a chip; JAX shows a chip of v4 and newer as one device.
PEAKS = {
    "H100 PCIe": Peak(756e12, 378e12),
    "H100 NVL": Peak(835.5e12, 417.5e12),
    "H100": Peak(989.4e12, 494.7e12),
    "H200 NVL": Peak(835.5e12, 417.5e12),
    "H200": Peak(989.4e12, 494.7e12),
    "A100": Peak(312e12, 156e12),
    "L40S": Peak(362.05e12, 183e12),
    "L4": Peak(121e12, 60e12),
    "A10": Peak(125e12, 62.5e12),
    "TPU v4": Peak(275e12, None),
    "TPU v5 lite": Peak(197e12, None),
    "TPU v5": Peak(459e12, None),
    "TPU v6 lite": Peak(918e12, None),
}


def peak_flops(kind: str, dtype: str) -> float | None:
    """FLOP/s of a device of this kind (device_kind of JAX) with f32 or bf16; None where it is not known here."""
    words = f" {kind} ".replace("-", " ")
    found = next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)
    return None if found is None else getattr(found, dtype)
