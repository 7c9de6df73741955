"""Eight CPU devices, a seeded key, no trace left in the user's own caches, and few compiled programs at a time.

The environment is set when pytest loads this file, before any test module can import jax.
"""

import gc
import itertools
import os
import platform
from importlib.metadata import version
from pathlib import Path

import pytest

DEVICES = 8
# Compiled programs take thousands of memory maps, of which Linux allows a process 65,530; past them XLA crashes.
MAX_MAPS = 30_000
# Counting tens of thousands takes as long as a short test: 30 ms.
TESTS_BETWEEN = 8
TESTS = itertools.count()
ROOT = Path(__file__).resolve().parents[1]

os.environ["JAX_PLATFORMS"] = "cpu"
# The tests compile far more than they run. Of the two ways in which jaxlib 0.10 can write fusions they take the one
# that compiles in about half the time; later ones know one way alone, and abort at the flag.
flags = [f"--xla_force_host_platform_device_count={DEVICES}", "--xla_cpu_parallel_codegen_split_count=1"]
flags += ["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []
# Of a repeated flag XLA takes the last, so these win over the caller's own.
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Output is buffered as it is for most users, so that its order is tested too.
os.environ.pop("PYTHONUNBUFFERED", None)
# Programs that tests start find the bytecode of those before them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Compiled programs are kept between runs of the tests, in a folder that git ignores.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "xla" / platform.node())
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_collection_finish():
    """What the imports made stays to the end: the collector need not go through it after every few programs.

    Programs that tests start, which compile the same few dozen small things each, keep these too. This process, which
    compiles each once, has read its own limit when it imported jax.
    """
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory):
    """Generated data sets go to a folder of this session, also from child processes; returns that folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def few_programs():
    """Let go of the programs compiled so far once they take too many memory maps."""
    yield
    maps = Path("/proc/self/maps")
    if next(TESTS) % TESTS_BETWEEN == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture
def key():
    """A typed PRNG key, the same in every test."""
    import jax

    return jax.random.key(0)
