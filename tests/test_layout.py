"""The rules of the house: who imports whom, where things live, and what must never be written."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("main.py"), *ROOT.glob("cssm/**/*.py"), *ROOT.glob("parallel/**/*.py")])
TESTS = sorted(ROOT.glob("tests/**/*.py"))

# Part of the project -> the parts that it may import. A part is main, parallel, cssm (its __init__), or the
# name that follows `cssm.`.
MAY_IMPORT = {
    "main": "cli",
    "cssm": "config inference training",
    "inference": "cells checkpoint config data fused models report rules runs settings step parallel",
    "cli": "bench cssm compare config memory prepare report training hardware inference parallel",
    "prepare": "config data report settings",
    "bench": "config data input_rate peer apart ledger measure report runs setup stages parallel",
    "input_rate": "config data watchdog",
    "measure": "augment cards config engine flops hardware jaxprs memory meter report runs setup step tracing watchdog "
    "parallel",
    "peer": "apart config",
    "apart": "config parallel",
    "ledger": "cssm config markdown report waiting",
    "markdown": "",
    "cards": "",
    "training": "batch_size checkpoint config dry_run find_lr loop meter report runs setup signals tracing parallel",
    "loop": "checkpoint config data engine evaluation meter nonfinite report resume setup signals step tracing "
    "waiting watchdog parallel",
    "evaluation": "data engine report step parallel",
    "nonfinite": "augment data rules setup step parallel",
    "watchdog": "",
    "batch_size": "config data engine memory meter report runs setup parallel",
    "find_lr": "config engine meter recipes report setup step",
    "engine": "data meter setup step parallel",
    "tracing": "config",
    "hardware": "config advice agreement memory report parallel",
    "agreement": "config data engine report runs setup step parallel",
    "memory": "config rules parallel",
    "compare": "config markdown report waiting",
    "waiting": "knobs settings",
    "advice": "",
    "step": "augment config models parts parallel",
    "augment": "config rand_augment",
    "rand_augment": "",
    "optimizers": "config parts",
    "parts": "config stages",
    "initial": "checkpoint config inference",
    "setup": "cssm augment config fused initial parts recipes data report runs optimizers step models flops jaxprs "
    "liveness remat size parallel",
    "remat": "cells config spectral parallel",
    "dry_run": "config checkpoint report setup parallel",
    "size": "config data models recipes stages",
    "meter": "",
    "signals": "config",
    "runs": "cssm config checkpoint lock resume",
    "lock": "",
    "resume": "config",
    "checkpoint": "cssm config",
    "report": "cssm config",
    "models": "activations config cells depthwise fused_rows scan spectral positions stages",
    "activations": "",
    "cells": "activations depthwise fused fused_rows rows scan spectral positions",
    "scan": "fused goom spectral",
    "depthwise": "fused fused_rows spectral",
    "fused_rows": "fused",
    "rows": "",
    "fused": "fused_kernel spectral",
    "fused_kernel": "spectral",
    "goom": "spectral",
    "spectral": "",
    "positions": "",
    "flops": "jaxprs",
    "liveness": "flops jaxprs",
    "jaxprs": "",
    "data": "config lock",
    "config": "cssm knobs flags recipes rules settings",
    "reference": "config flags knobs settings",
    "settings": "knobs recipes",
    "flags": "knobs settings",
    "rules": "knobs recipes settings stages",
    "stages": "",
    "recipes": "",
    "knobs": "",
    "parallel": "",
}
TOP_LEVEL = set(".ci .gitignore CITATION.cff LICENSE Makefile README.md configs cssm docs main.py parallel".split())
TOP_LEVEL |= {"pyproject.toml", "requirements", "tests"}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}
NO_JAX = set("resume reference compare prepare config settings flags rules recipes stages knobs data".split())
NO_JAX |= {"cli", "memory", "advice", "apart", "cards", "lock", "markdown", "peer", "waiting", "input_rate"}
# What the parent of a job needs, which must be small and quick: all that the command line may import of parallel.
PARENT = {"parallel.choice", "parallel.find", "parallel.job", "parallel.launch", "parallel.places"}
# Training on generated or bundled images must run where these are not installed.
OPTIONAL = "array_record flatbuffers grain ruamel safetensors tensorboardX tensorflow tensorflow_datasets wandb".split()
ABSOLUTE = re.compile(r"(?<![\w.])/(?:home|mnt|opt|root|tmp|Users|work)/")
REGISTRY = re.compile(
    r"pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|conda\.(?:io|org)|--(?:extra-)?index-url", re.IGNORECASE
)


def module_name(path: Path) -> str:
    """cssm/cells/gated.py -> cssm.cells.gated; a package is named by its folder."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part(module: str) -> str:
    return module.split(".")[1] if module.startswith("cssm.") else module.split(".")[0]


def imports(tree: ast.AST, top_only: bool = False) -> Iterator[str]:
    """Every module that is imported: `from a import b` gives a.b, since b may be a module.

    A relative import starts with a dot. What only a type checker runs is left out, and with top_only what
    is imported inside a function.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imports(ast.Module(node.orelse, []), top_only)
        elif not (top_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from imports(node, top_only)


def belongs(name: str, modules: set[str]) -> bool:
    """Whether an imported name is one of the modules, or something in one."""
    return name in modules or name.rpartition(".")[0] in modules


# Each guard takes (module, tree) and yields one sentence for each violation.


def import_order(module: str, tree: ast.AST) -> Iterator[str]:
    here = part(module)
    if here not in MAY_IMPORT:
        yield f"{here} has no row in MAY_IMPORT"
        return
    for name in imports(tree):
        if name.startswith("."):
            yield f"relative import {name}"
        elif name.split(".")[0] in ("main", "cssm", "parallel", "tests"):
            # `from cssm import Config` names no part: it imports the package itself.
            there = part(name) if part(name) in MAY_IMPORT or not name.startswith("cssm.") else "cssm"
            if there != here and there not in MAY_IMPORT[here].split():
                yield f"{here} imports {name}"
            elif (here == "cli" or module in PARENT) and there == "parallel" and not belongs(name, PARENT):
                yield f"{module} imports {name}, which is not for a parent"


def one_pmap(module: str, tree: ast.AST) -> Iterator[str]:
    fields = ("attr", "id", "name")
    uses = sum("pmap" in [getattr(node, field, None) for field in fields] for node in ast.walk(tree))
    if uses != (1 if module == "parallel.devices" else 0):
        yield f"pmap is used {uses} times"


def narrow_except(module: str, tree: ast.AST) -> Iterator[str]:
    """A handler of everything must raise again; only the command line, the last resort, may end there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and module != "cssm.cli":
            kinds = ast.walk(node.type) if node.type else [ast.Name("Exception")]
            caught = {kind.id for kind in kinds if isinstance(kind, ast.Name)} & {
                "Exception",
                "BaseException",
            }
            if caught and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
                yield f"line {node.lineno} catches everything"


def public_docstrings(module: str, tree: ast.Module) -> Iterator[str]:
    if ast.get_docstring(tree) is None:
        yield "the module has no docstring"
    for node in tree.body:
        is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
        if is_public and ast.get_docstring(node) is None:
            yield f"{node.name} has no docstring"


def no_jax(module: str, tree: ast.AST) -> Iterator[str]:
    if part(module) in NO_JAX or module in PARENT:
        late = module in ("cssm.cli", "parallel.job")  # a worker's side, which runs where jax may be loaded
        found = {name.split(".")[0] for name in imports(tree, top_only=late)} & JAX
        yield from (f"imports {name}" for name in sorted(found))


def public_parts(module: str, tree: ast.AST) -> Iterator[str]:
    """What libraries keep to themselves, or are about to drop, goes with an upgrade; job.py says what has no door."""
    found = [name for name in imports(tree) if "_src" in name.split(".") or name.startswith("flax.jax_utils")]
    yield from (f"imports {name}" for name in found if module != "parallel.job")


GUARDS = [import_order, one_pmap, narrow_except, public_docstrings, no_jax, public_parts]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_sources_keep_the_rules(guard):
    found = {module_name(path): list(guard(module_name(path), ast.parse(path.read_text()))) for path in SOURCES}
    assert not {module: sentences for module, sentences in found.items() if sentences}


@pytest.mark.parametrize(
    "guard,module,good,bad",
    [
        (import_order, "cssm.setup", "from cssm import step, __version__", "from cssm import cli"),
        (import_order, "cssm.models.vit", "from cssm.models.blocks import Mlp", "import parallel.sync"),
        (
            import_order,
            "cssm.step",
            "from parallel.devices import AXIS",
            "def f(): import cssm.training",
        ),
        (import_order, "cssm.config", "import json", "from .data import load"),
        (import_order, "parallel.devices", "import parallel.sync", "from cssm.config import UserError"),
        (import_order, "cssm.scan", "import jax", "from tests.oracle import scan"),
        (import_order, "cssm.cells", "import cssm.cells.gated", "from cssm.config import Config"),
        (import_order, "cssm.knobs", "", "import cssm"),
        (import_order, "cssm.rules", "if TYPE_CHECKING: import cssm.config", "if x: import cssm.config"),
        (import_order, "cssm.scan", "", "import parallel"),
        (import_order, "cssm.cli", "from parallel.job import join", "def f(): from parallel.devices import spmd"),
        (import_order, "parallel.launch", "import parallel.job", "from parallel import sync"),
        (import_order, "cssm.config", "import cssm.config", "import cssm.cells.gated as cells"),
        (one_pmap, "parallel.devices", "jax.pmap(f)", "jax.pmap(f)\njax.pmap(g)"),
        (one_pmap, "cssm.step", "jax.jit(f)", "from jax import pmap as parallel_map"),
        (one_pmap, "cssm.step", "jax.lax.pmean(x, 'devices')", "jax.pmap(f)"),
        (narrow_except, "cssm.training", "try: f()\nexcept ValueError: g()", "try: f()\nexcept: g()"),
        (
            narrow_except,
            "cssm.training",
            "try: f()\nexcept Exception: raise",
            "try: f()\nexcept (OSError, BaseException): g()",
        ),
        (public_docstrings, "cssm.scan", '"""M."""\ndef f():\n    """D."""', '"""M."""\ndef f(): return 1'),
        (public_docstrings, "cssm.scan", '"""M."""\ndef _f(): return 1', "x = 1"),
        (
            public_docstrings,
            "cssm.scan",
            '"""M."""',
            '"""M."""\nclass A: pass',
        ),
        (no_jax, "cssm.config", "import numpy", "def f():\n    import jax.numpy as jnp"),
        (no_jax, "cssm.data.images", "import numpy", "from flax import linen"),
        (no_jax, "cssm.cli", "def f():\n    import jax", "if x:\n    import jax"),
        (no_jax, "parallel.job", "def f():\n    import jax", "import jax"),
        (no_jax, "parallel.launch", "import json", "def f():\n    import jax"),
        (public_parts, "cssm.step", "from jax import core", "from jax._src import core"),
        (public_parts, "cssm.step", "import flax.linen", "from flax import jax_utils"),
    ],
)
def test_guards_catch(guard, module, good, bad):
    assert not list(guard(module, ast.parse(good)))
    assert list(guard(module, ast.parse(bad)))


def test_every_source_file_has_a_test_file():
    tested = {path.stem for path in TESTS}
    whole = {"settings"}  # packages of declarations, tested as one
    stems = {
        (path.parent if path.stem == "__init__" or path.parent.name in whole else path).stem: path
        for path in SOURCES
        if lines(path) > 40
    }
    assert not [str(path) for stem, path in stems.items() if f"test_{stem}" not in tested]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_stay_short_and_named_for_one_job():
    files = SOURCES + TESTS
    assert not {path.name: lines(path) for path in files if lines(path) >= 350}
    assert not {path.stem for path in files} & {"utils", "util", "helpers", "common", "misc"}
    stems = [path.stem for path in SOURCES if path.stem != "__init__"]
    assert len(stems) == len(set(stems)), "two files of one name would share one test file"


def imported(modules: list[str], missing: list[str]) -> set[str]:
    """Top-level names that a fresh interpreter holds after importing modules, with others not installed."""
    code = f"import sys\nsys.modules.update(dict.fromkeys({missing}))\nimport {', '.join(modules)}\n"
    code += "print(*{name.split('.')[0] for name, module in sys.modules.items() if module})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_the_command_line_config_and_data_load_no_jax():
    modules = [name for name in map(module_name, SOURCES) if part(name) in NO_JAX | {"cssm"} or name in PARENT]
    assert not imported(modules, []) & (JAX | {"matplotlib", "sklearn", *OPTIONAL})


def test_training_needs_no_optional_library():
    assert "jax" in imported(["cssm.training", "cssm.cli", "cssm.data"], OPTIONAL)


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Paths under version control, relative to the root."""
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for path in result.stdout.split("\0") if (ROOT / path).is_file()]


def test_top_level_is_fixed(tracked):
    assert {path.split("/")[0] for path in tracked} <= TOP_LEVEL


def test_no_machine_or_registry_is_named(tracked):
    found = []
    for path in tracked:
        text = (ROOT / path).read_text(errors="ignore")
        found += [f"{path}: {match[0]}" for pattern in (ABSOLUTE, REGISTRY) for match in pattern.finditer(text)]
    assert not found


@pytest.mark.parametrize(
    "bad", ["/" + "home/me/data", "see '/" + "tmp/x'", "--index" + "-url x", "https://pypi" + ".org/simple"]
)
def test_machines_and_registries_are_recognised(bad):
    assert ABSOLUTE.search(bad) or REGISTRY.search(bad)
    assert not ABSOLUTE.search("runs/home/x ../root/y https://example.com/home/ /dev/null")


def test_source_folders_are_not_ignored(tracked):
    """An unanchored `data/` once cost a project its data package."""
    ignore = (ROOT / ".gitignore").read_text().splitlines()
    patterns = [line for line in ignore if line and not line.startswith("#")]
    assert all(line.startswith("/") or line == "__pycache__/" for line in patterns)
    on_disk = {str(path.relative_to(ROOT)) for path in SOURCES + TESTS}
    command = ["git", "-c", f"safe.directory={ROOT}", "check-ignore", *sorted(on_disk)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == ""
