"""--init_from: what fits is taken bit for bit, what does not is told, and a run that goes on is left alone."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_training import TINY, arrays, go_on, start

from cssm import models
from cssm.cli import main
from cssm.config import Config, UserError
from cssm.initial import Initial, read_initial


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run with a moving average, whose best checkpoint may not be the newest."""
    root = tmp_path_factory.mktemp("source")
    start(root, "run")
    return root / "run"


def variables_of(num_classes=10, **settings):
    config = Config(**{**TINY, **settings})
    shape = (1, 8, 8, 1)
    found = jax.eval_shape(models.build(config, num_classes).init, jax.random.key(0), jnp.zeros(shape))
    return {"batch_stats": {}, **found}


def best_of(run):
    records = {p.name: json.loads((p / "record" / "metadata").read_text()) for p in (run / "checkpoints").iterdir()}
    return max((record["metric"], int(step)) for step, record in records.items())[1]


def test_all_of_the_same_model_is_taken_averaged_from_the_best_checkpoint(source):
    initial = read_initial(str(source), variables_of())
    kept = arrays(source, best_of(source))
    wanted = {n.replace("ema_", "") for n in kept if n.startswith(("ema_params/", "batch_stats/"))}
    assert set(initial.values) == wanted
    for name, value in initial.values.items():
        np.testing.assert_array_equal(value, kept[name.replace("params/", "ema_params/")])
    count = len(initial.values)
    assert initial.report == (
        f"--init_from {source} (step {best_of(source)}, averaged): {count} of {count} arrays match",
    )


def test_a_checkpoint_is_the_one_that_is_named(source):
    initial = read_initial(str(source / "checkpoints" / "3"), variables_of())
    np.testing.assert_array_equal(initial.values["params/head/kernel"], arrays(source, 3)["ema_params/head/kernel"])


def test_what_has_another_shape_is_missing_or_left_over_is_told(source):
    initial = read_initial(str(source), variables_of(num_classes=3, pos_embed="learnable"))
    report = "\n".join(initial.report)
    assert "of another shape, so fresh: head/bias 10 there, 3 here, head/kernel 4x10 there, 4x3 here" in report
    assert "missing there, so fresh: positions/pos_embed" in report
    other = read_initial(str(source), variables_of(cssm="hgru_bi"))
    assert "there and not used: cell_0/" in other.report[-1] and "more" in other.report[-1]
    assert not any(name.startswith("params/cell_0/input_proj") for name in other.values)


def test_what_holds_nothing_that_fits_is_refused(source, tmp_path):
    for path, why in ((tmp_path, "there is no checkpoint in it"), (tmp_path / "gone", "there is no such path")):
        with pytest.raises(UserError, match=rf"--init_from {path}: {why}; type the folder of a run"):
            read_initial(str(path), variables_of())
    with pytest.raises(UserError, match=r"none of its \d+ arrays fits this model, which begins with params/"):
        read_initial(str(source), {"params": {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, "batch_stats": {}})
    shutil.copytree(source, tmp_path / "torn")
    for file in (tmp_path / "torn").rglob("files.json"):
        file.write_text("{}")
    with pytest.raises(UserError, match="is damaged") as error:
        read_initial(str(tmp_path / "torn"), variables_of())
    assert error.value.exit_code == 6


def test_an_exported_folder_gives_its_arrays_complex_ones_too(tmp_path, capsys):
    start(tmp_path, "spectral", kernel_domain="spectral")
    folder = tmp_path / "exported"
    assert main(["export", "--checkpoint", str(tmp_path / "spectral"), "--output", str(folder)]) == 0
    wanted = variables_of(kernel_domain="spectral")
    initial, run = (read_initial(str(path), wanted) for path in (folder, tmp_path / "spectral"))
    assert any(np.iscomplexobj(value) for value in initial.values.values())
    jax.tree.map(np.testing.assert_array_equal, initial.values, run.values)
    assert initial.report == (f"--init_from {folder}: {len(run.values)} of {len(run.values)} arrays match",)
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match=r"model.safetensors is not what was exported") as error:
        read_initial(str(folder), wanted)
    assert error.value.exit_code == 6


def test_the_average_begins_where_the_parameters_do():
    state = {"params": {"w": np.zeros(2)}, "ema_params": {"w": np.zeros(2)}, "batch_stats": {}, "step": np.int32(0)}
    put = Initial({"params/w": np.ones(2)}, ()).put(state)
    assert put["params"]["w"].tolist() == put["ema_params"]["w"].tolist() == [1, 1] and put["step"] == 0


@pytest.mark.parametrize(
    "more", [pytest.param({}, marks=pytest.mark.slow), {"shard": "params"}], ids=["whole", "split"]
)
def test_a_run_begins_there_and_what_is_frozen_stays(source, tmp_path, more, capsys):
    """All but the head; a resumed run neither reads the source nor begins anew."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    settings = {"init_from": str(copy), "freeze": "*,!head/*", "layer_decay": 0.5, "num_devices": 2, **more}
    start(tmp_path, "tuned", max_steps=3, **settings)
    assert "arrays match" in capsys.readouterr().out
    shutil.rmtree(copy)
    go_on(tmp_path, "tuned", "--max_steps", "6", "--num_devices", "2")
    assert "arrays match" not in capsys.readouterr().out
    there, here = arrays(source, best_of(source)), arrays(tmp_path / "tuned", 6)
    for name in (name for name in here if name.startswith("params/")):
        same = np.array_equal(here[name], there[name.replace("params/", "ema_params/")])
        assert same is not name.startswith("params/head/"), name
    assert sum(name.startswith("opt_state") and "head" not in name for name in here) <= 4, "counts"
