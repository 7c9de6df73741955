"""The exported program gives the model's logits, for any batch, where this package is not."""

import subprocess
import sys

import numpy as np
import pytest
from trained import make_run

from cssm import load_trained
from cssm.config import UserError
from cssm.inference import stablehlo
from cssm.inference.stablehlo import PLATFORMS, write_program

ALONE = """
import sys
sys.path = [folder for folder in sys.path if folder not in ("", ROOT)]
sys.modules["cssm"] = sys.modules["parallel"] = sys.modules["flax"] = None
from pathlib import Path
import numpy as np
from jax import export
model = export.deserialize(bytearray(Path("model.stablehlo").read_bytes()))
for n in (1, 3, 8):
    np.save(f"{n}.npy", model.call(np.load("images.npy")[:n]))
assert not [name for name, module in sys.modules.items() if name.startswith(("cssm", "flax")) and module]
print(",".join(model.platforms))
"""
MODELS = {
    "simple": {"kernel_domain": "spectral", "norm_type": "batch"},
    "vit": {"arch": "vit", "cssm": "gdn", "stem_stride": 2, "delta_key_dim": 2},
    "shvit": {"arch": "shvit", "cssm": "gated", "dims": "4,8", "depths": "1,1", "embed_dim": None, "depth": None},
    "convnext": {"arch": "convnext", "dims": "4,8", "depths": "1,1", "embed_dim": None, "depth": None},
    "baseline": {"arch": "baseline", "num_heads": 2, "seq_len": None, "kernel_size": None, "stem_stride": 2},
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "simple"]


@pytest.mark.parametrize("name", ["simple", *SLOW])
def test_the_program_alone_gives_the_logits_of_the_model(name, tmp_path):
    trained = load_trained(make_run(tmp_path / "run", **MODELS[name]))
    images = np.random.default_rng(0).integers(0, 256, (8, *trained.image_shape), np.uint8)
    write_program(trained, tmp_path / "model.stablehlo")
    np.save(tmp_path / "images.npy", images)
    code = ALONE.replace("ROOT", repr(sys.path[0]))
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ",".join(PLATFORMS)
    want = trained.logits(images)
    assert np.ptp(want) > 1e-2
    for n in (1, 3, 8):
        np.testing.assert_allclose(np.load(tmp_path / f"{n}.npy"), want[:n], atol=1e-5 * max(1, np.abs(want).max()))


def test_it_is_made_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(stablehlo.jax, "default_backend", lambda: "gpu")
    with pytest.raises(UserError, match="set JAX_PLATFORMS=cpu"):
        write_program(load_trained(make_run(tmp_path / "run")), tmp_path / "x")
