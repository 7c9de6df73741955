"""TensorBoard and W&B show what a run tells. W&B is no requirement: a small module stands in for it here."""

import io
import sys
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image
from test_events import tensorboard_events
from test_training import go_on, start

from cssm.config import UserError
from cssm.report.events import EventLog


def test_tensorboard_gets_images_and_hyperparameters(tmp_path):
    """As its plugin reads them: the settings of the run, beside what each split reached."""
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    out = EventLog(tmp_path, tensorboard=True)
    out.write("config", {"config": {"lr": 1e-3, "cssm": "gated", "gpus": None}})
    out.show(3, {"test/confusion": b"png"})
    out.write("summary", {"step": 3, "test": {"loss": 0.5, "accuracy": 0.75, "count": 4}, "wall_s": 1.0})
    out.close()
    values = {value.tag: value for event in tensorboard_events(tmp_path / "logs") for value in event.summary.value}
    assert values["test/confusion"].image.encoded_image_string == b"png"
    content = lambda tag: HParamsPluginData.FromString(values[tag].metadata.plugin_data.content)
    settings = content("_hparams_/session_start_info").session_start_info.hparams
    assert (settings["lr"].number_value, settings["cssm"].string_value) == (1e-3, "gated")
    names = [info.name.tag for info in content("_hparams_/experiment").experiment.metric_infos]
    assert names == ["test/loss", "test/accuracy"]


class Started:
    """What wandb.init returns, as far as it is used."""

    def __init__(self, **options):
        self.options, self.id = options, options["id"] or "made-up-id"
        self.defined, self.logged, self.summary, self.config, self.ended = [], [], {}, self, []
        self.settings = {}

    def define_metric(self, name, step_metric=None):
        self.defined.append((name, step_metric))

    def update(self, values, allow_val_change):
        assert allow_val_change
        self.settings |= values

    def log(self, values):
        self.logged.append(values)

    def finish(self, exit_code):
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch):
    """A module of that name; `runs` are those that it began."""
    module = ModuleType("wandb")
    module.runs = []
    module.init = lambda **options: module.runs.append(Started(**options)) or module.runs[-1]
    module.Settings, module.Image, module.Error = SimpleNamespace, lambda image: image, type("Error", (Exception,), {})
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


@pytest.mark.slow
def test_wandb_gets_the_run_and_a_resumed_one_goes_on_in_it(wandb, tmp_path):
    start(tmp_path, "run", wandb=True, max_steps=3)
    go_on(tmp_path, "run", "--num_devices", "1", "--max_steps", "4")
    first, second = wandb.runs
    assert (first.options["id"], second.options["id"], second.options["resume"]) == (None, "made-up-id", "allow")
    assert (first.options["project"], first.options["name"]) == ("cssm", "run")
    assert ("*", "step") in first.defined
    assert [row["step"] for row in first.logged if "train/loss" in row] == [1, 2, 3]
    assert [row["step"] for row in second.logged if "train/loss" in row] == [4]
    assert any("val/accuracy" in row for row in first.logged) and first.settings["embed_dim"] == 4
    assert isinstance(first.logged[-1]["test/confusion"], Image.Image)
    assert 0 <= first.summary["test/accuracy"] <= 1 and first.summary["run/wall_s"] > 0
    assert first.ended == second.ended == [0]


def test_a_run_that_failed_is_one_there_too(wandb, tmp_path):
    EventLog(tmp_path, io.StringIO(), wandb=True).close(failed=True)
    assert wandb.runs[0].ended == [1]


def test_the_project_comes_from_the_environment(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    EventLog(tmp_path, wandb=True).close()
    assert wandb.runs[0].options["project"] == "mine"


def test_wandb_that_is_missing_or_refuses_is_told_in_a_sentence(wandb, tmp_path, monkeypatch):
    def refuse(**_):
        raise wandb.Error("api_key not configured\nmore")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match=r"--wandb: .*\(api_key not configured\): type wandb login"):
        start(tmp_path, "run", wandb=True)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"--wandb needs the package wandb: type pip install wandb"):
        start(tmp_path, "run", wandb=True)
    assert not (tmp_path / "run").exists()
