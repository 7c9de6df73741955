"""Run directories: new ones, refused ones, and finding the one to go on with."""

import os

import pytest

from cssm.checkpoint import Checkpoints, saved_meta
from cssm.config import Config, UserError, parse_args
from cssm.resume import resume_record
from cssm.runs import open_run


def alone(name, decide):
    """The only process decides."""
    return decide()


def saved_run(root, name, step=3, **settings):
    config = Config(checkpoint_dir=str(root), run_name=name, **settings)
    run = open_run(config, {}, alone)
    with Checkpoints(run.checkpoints) as checkpoints:
        checkpoints.save(step, {"a": 1.0}, {"config": resume_record(config, 64, 1), "best": {}, "step": step})
    return run


def reopen(root, *argv):
    parsed = parse_args(["--checkpoint_dir", str(root), *argv])
    return open_run(parsed.config, parsed.typed, alone)


def test_a_new_run_is_named_after_time_and_model(tmp_path):
    run = open_run(Config(arch="vit", cssm="gated", checkpoint_dir=str(tmp_path)), {}, alone)
    assert run.directory.parent == tmp_path and run.directory.is_dir() and not run.resumed
    assert run.directory.name.endswith("_vit_gated")
    assert open_run(Config(arch="baseline", checkpoint_dir=str(tmp_path)), {}, alone).directory.name.endswith(
        "_baseline"
    )


def test_two_unnamed_runs_of_one_second_have_directories_of_their_own(tmp_path):
    config = Config(checkpoint_dir=str(tmp_path))
    assert len({open_run(config, {}, alone).directory for _ in range(3)}) == 3


def test_an_existing_run_is_refused_with_both_ways_out(tmp_path):
    saved_run(tmp_path, "a")
    with pytest.raises(UserError, match=r"a exists already: type --resume .*/a .* or another --run_name") as error:
        reopen(tmp_path, "--run_name", "a")
    assert error.value.exit_code == 2


def test_a_run_is_found_by_its_directory_its_checkpoints_and_a_step(tmp_path):
    run = saved_run(tmp_path, "a", lr=0.25)
    for path in (run.directory, run.checkpoints, run.checkpoints / "3"):
        found = reopen(tmp_path, "--resume", str(path))
        assert (found.directory, found.resumed, found.config.lr) == (run.directory, True, 0.25)


def test_auto_takes_the_run_that_saved_last_or_the_one_named(tmp_path):
    older, newer = saved_run(tmp_path, "older"), saved_run(tmp_path, "newer")
    os.utime(older.checkpoints / "3", (1, 1))
    (tmp_path / "empty").mkdir()
    assert reopen(tmp_path, "--resume", "auto").directory == newer.directory
    assert reopen(tmp_path, "--resume", "auto", "--run_name", "older").directory == older.directory


def test_auto_starts_a_new_run_where_there_is_nothing_and_says_so(tmp_path):
    run = reopen(tmp_path, "--resume", "auto", "--run_name", "b", "--lr", "0.5")
    assert (run.resumed, run.config.lr, run.directory) == (False, 0.5, tmp_path / "b")
    assert "so a new run starts" in run.notes[0]


def test_changes_on_resume_are_told_and_a_changed_model_is_refused(tmp_path):
    saved_run(tmp_path, "a", lr=0.25)
    run = reopen(tmp_path, "--resume", str(tmp_path / "a"), "--lr", "0.5")
    assert run.notes == ("lr: was 0.25, now 0.5",) and run.config.lr == 0.5
    with pytest.raises(UserError, match="--embed_dim 64: the run to resume has 32"):
        reopen(tmp_path, "--resume", str(tmp_path / "a"), "--embed_dim", "64")


def test_a_run_refused_before_it_began_leaves_nothing_behind(tmp_path):
    run = open_run(Config(checkpoint_dir=str(tmp_path)), {}, alone)
    (run.directory / "metrics.jsonl").touch()
    run.discard_if_unused()
    assert not run.directory.exists()
    kept = saved_run(tmp_path, "kept")
    kept.discard_if_unused()
    assert kept.checkpoints.exists()


@pytest.mark.parametrize("inside", [False, True])
def test_a_path_without_a_run_is_refused(tmp_path, inside):
    path = tmp_path / "nowhere"
    if inside:
        path.mkdir()
    with pytest.raises(UserError, match="there is no such path" if not inside else "there is no checkpoint in it"):
        reopen(tmp_path, "--resume", str(path))


def test_the_first_process_decides_where_a_run_lives(tmp_path):
    """The others take its directory, and the configuration of the run that it found, without looking themselves."""
    told = {}

    def first(name, decide):
        told[name] = decide()
        return told[name]

    saved = saved_run(tmp_path, "old", lr=0.25).directory
    for typed in ({"checkpoint_dir": str(tmp_path)}, {"checkpoint_dir": str(tmp_path), "resume": str(saved)}):
        config = Config(**typed)
        run = open_run(config, typed, first)
        assert open_run(config, typed, lambda name, decide: told[name]) == run
    assert run.resumed and run.directory == saved and run.config.lr == 0.25


def test_a_named_run_that_ended_before_its_first_checkpoint_begins_anew_with_auto(tmp_path):
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "metrics.jsonl").write_text("{}")
    run = reopen(tmp_path, "--resume", "auto", "--run_name", "named")
    assert run.directory == tmp_path / "named" and not run.resumed


def test_a_run_goes_on_with_the_classes_it_began_with(tmp_path):
    run, old = saved_run(tmp_path, "run"), {"classes": ["a", "b"], "train_examples": 1000}
    assert run.data_changes({"classes": ["c"], "train_examples": 1}) == []  # it is new
    with Checkpoints(run.checkpoints) as checkpoints:
        checkpoints.save(4, {"a": 1.0}, {**saved_meta(run.checkpoints), "data": old})
    resumed = reopen(tmp_path, "--resume", "auto")
    assert resumed.data_changes(old) == []
    for classes, what in ((["a", "b", "c"], "class c is new"), (["a"], "class b is gone"), (["b", "a"], "their order")):
        with pytest.raises(UserError, match=f"began with 2 classes, .*{what}"):
            resumed.data_changes({**old, "classes": classes})
    (note,) = resumed.data_changes({**old, "train_examples": 999})
    assert "there were 1,000 training examples and now are 999" in note


def test_checkpoints_that_know_nothing_of_the_data_go_on(tmp_path):
    saved_run(tmp_path, "run")
    assert reopen(tmp_path, "--resume", "auto").data_changes({"classes": [], "train_examples": 9}) == []
