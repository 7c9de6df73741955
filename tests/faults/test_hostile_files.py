"""No file that a user is handed can run code, or write where it should not."""

import ast
import io
import json
import pickle
import zipfile

import numpy as np
import pytest
from test_checkpoint import TARGET, fill
from test_layout import ROOT, SOURCES, module_name

from cssm import data
from cssm.checkpoint import Checkpoints, step_folder
from cssm.config import Config, UserError, parse_args, read_yaml

# Modules that make code of data, and calls that do; np.load and read_array do unless they are told not to.
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "torch", "code"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "unpack_archive", "extractall", "extract"}
TOLD = {"load", "read_array"}


def unsafe(module: str, tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or ""] + [alias.name for alias in node.names]
            found += [name for name in names if name.split(".")[0] in UNSAFE_MODULES]
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        name, told = function.rpartition(".")[2], {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in UNSAFE_CALLS and function not in ("re.compile",) and not function.endswith(").compile"):
            found.append(function)
        if function.startswith("np.") and name in TOLD and told.get("allow_pickle") != "False":
            found.append(function)
        if told.get("shell", "False") != "False" or (name == "YAML" and told.get("typ") != "'safe'"):
            found.append(function)
    return [f"{module}: {name}" for name in found]


def test_no_call_makes_code_of_data():
    """The peer of benchmarks needs PyTorch, which reads no file there."""
    trees = {module_name(path): ast.parse(path.read_text()) for path in SOURCES}
    found = [said for module, tree in trees.items() for said in unsafe(module, tree)]
    assert not [said for said in found if not said.startswith("cssm.peer: torch")]
    assert "load" not in {getattr(node, "attr", "") for node in ast.walk(trees["cssm.peer"])}


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from torch import load",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.lib.format.read_array(stream)",
        "eval(text)",
        "__import__(name)",
        "os.system(command)",
        "subprocess.run(command, shell=True)",
        "shutil.unpack_archive(path)",
        "archive.extractall(folder)",
        "YAML(typ='unsafe')",
    ],
)
def test_the_walk_finds(bad):
    assert unsafe("m", ast.parse(bad))
    assert not unsafe("m", ast.parse("np.load(path, allow_pickle=False)\nre.compile(text)\nsubprocess.run(command)"))


class Trap:
    """Pickled, it tells of itself when it is read."""

    def __reduce__(self):
        return pytest.fail, ("a file has run code",)


def test_arrays_of_objects_are_refused(tmp_path):
    """numpy writes them as pickles."""
    trap = np.array([Trap()], object)
    np.savez(tmp_path / "a.npz", images=trap, labels=np.zeros(1, np.int64))
    with pytest.raises(UserError):
        data.outline(Config(dataset="npz", data_dir=str(tmp_path / "a.npz")))
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:  # a header of numbers over a pickle
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, {"descr": "|O", "fortran_order": False, "shape": (1,)})
        archive.writestr("images.npy", buffer.getvalue() + pickle.dumps(trap))
        archive.writestr("labels.npy", pickle.dumps(Trap()))
    with pytest.raises(UserError):
        data.load(Config(dataset="npz", data_dir=str(tmp_path / "b.npz"), image_size=8), "train")


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.system ['touch {}']", "a: !!python/object/apply:os.system ['touch {}']"]
)
def test_yaml_makes_no_objects(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text.format(tmp_path / "touched"))
    with pytest.raises(UserError):
        read_yaml(tmp_path / "run.yaml")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["../out", "/out", "a/b", "..", ".", "a\\b", "a\0b"])
def test_names_of_runs_do_not_leave_their_directory(name, tmp_path):
    with pytest.raises(UserError, match="must be the name of one folder"):
        Config(run_name=name)
    (tmp_path / "run.yaml").write_text(f'run_name: "{name.encode("unicode_escape").decode()}"')
    with pytest.raises(UserError, match=r"must be the name of one folder|not YAML"):
        parse_args(["--config", str(tmp_path / "run.yaml")])


def test_names_of_arrays_and_links_do_not_leave_a_checkpoint(tmp_path):
    """They are compared with what the model asks for before they make a path."""
    fill(tmp_path / "c", [0.1])
    folder, outside = tmp_path / "c" / "1", tmp_path / "outside"
    outside.write_text("secret")
    for target in (outside, tmp_path):
        (folder / "state" / "link").symlink_to(target)
        with Checkpoints(tmp_path / "c") as checkpoints, pytest.raises(UserError, match="state/link is a link"):
            checkpoints.restore(TARGET)
        (folder / "state" / "link").unlink()
    path = folder / "record" / "metadata"
    path.write_text(path.read_text().replace('"params/w"', '"../../outside"'))
    (folder / step_folder.FILES).write_text(json.dumps(step_folder._file_digests(folder)))
    with Checkpoints(tmp_path / "c") as checkpoints, pytest.raises(UserError, match="of another model"):
        checkpoints.restore(TARGET)
    assert outside.read_text() == "secret" and ROOT not in outside.parents


@pytest.mark.parametrize("changed", [{"shape": [10**9, 10**9]}, {"chunks": [10**9, 10**9]}, {"shape": None}], ids=str)
def test_no_array_claims_more_memory_than_it_has_elements(changed, tmp_path):
    """TensorStore ended the program, with no word, where it could not have what a file claimed."""
    fill(tmp_path, [0.1])
    path = tmp_path / "1" / "state" / "params" / "w" / ".zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    (tmp_path / "1" / step_folder.FILES).write_text(json.dumps(step_folder._file_digests(tmp_path / "1")))
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match=r"params/w is not of shape \(4, 3\)"):
        checkpoints.restore(TARGET)
