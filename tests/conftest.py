"""Eight CPU devices, a seeded key, and no trace left in the user's own caches.

The environment is set when pytest loads this file, before any test module can import jax.
"""

import os
import platform
from pathlib import Path

import pytest

DEVICES = 8
ROOT = Path(__file__).resolve().parents[1]

os.environ["JAX_PLATFORMS"] = "cpu"
# Of a repeated flag XLA takes the last, so this one wins over the caller's own.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
# The tests compile far more than they run.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Output is buffered as it is for most users, so that its order is tested too.
os.environ.pop("PYTHONUNBUFFERED", None)
# Compiled programs are kept between runs of the tests, in a folder that git ignores.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "xla" / platform.node())
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory):
    """Generated data sets go to a folder of this session, also from child processes; returns that folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
def key():
    """A typed PRNG key, the same in every test."""
    import jax

    return jax.random.key(0)
