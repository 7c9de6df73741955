"""Every shell command of README and docs is run, in the order of its page, in the small form of page_commands.py."""

import re

import pytest
from page_commands import (
    PAGES,
    ROOT,
    SMALL,
    commands,
    complete,
    flags_of,
    make_checkout,
    make_data,
    more,
    run,
    shortened,
)
from test_readme import programs

from cssm.config import parse_args

HOWTO = [page for page in PAGES if page.parent.name == "howto"]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
ONCE = {command: page for page in reversed(PAGES) for command in commands(page) if command.startswith("make ")}

# What is not run, by its beginning, with the reason. Nothing else is left out.
NOT_RUN = {
    "pip install": "it takes a gigabyte from the network",
    "python -m venv .venv && .venv/bin/pip install": "likewise",
    "uv ": "likewise, with a program that is no requirement; what it then starts is `python main.py`",
    "tensorboard ": "it is no requirement and a server without an end; tests/test_viewers.py reads what it would show",
    "make audit": "it asks an index on the network about each requirement",
    ".venv-audit/bin/pip-audit": "likewise",
    "bash configs/launch/run_all.sh": "tests/test_configs.py runs it",
    "bash configs/launch/scaling.sh": "tests/test_configs.py runs it",
    "bash .ci/run": "it runs all tests, these among them, from a fresh clone",
    "python tests/faults/soak.py": "`make soak` of the same page runs it",
    "SEED=7 python tests/faults/soak.py": "likewise",
    "python tests/aot/compile_step.py": "it needs jax's CUDA packages, gigabytes that are no requirement",
}


def left_out(command):
    return command.startswith(tuple(NOT_RUN))


def here(page):
    """The commands that the test of this page runs: a target of make is run for the first page that has it."""
    return [c for c in commands(page) if not left_out(c) and ONCE.get(c, page) == page]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_is_one(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        words = flags_of(complete(command, 0))
        if words is not None and words != ["--help"]:
            parse_args(words)


def test_no_command_escapes_and_each_reason_has_a_command():
    """main.py with something behind it stands nowhere in code but in a command; every start of NOT_RUN is on a page."""
    found = [command for page in PAGES for command in commands(page)]
    assert len(found) > 120
    assert all(any(command.startswith(start) for command in found) for start in NOT_RUN)
    for page in PAGES:
        code = re.sub(r" *\\\n *", " ", page.read_text())
        typed = re.findall(r"(?<=main\.py) (?:--\w|[a-z]+ --)[^#`\n]*", code)
        known = " ".join(commands(page))
        assert not [rest for rest in typed if re.sub(r"\s+$", "", rest) not in known]


def test_one_rule_makes_commands_small(monkeypatch):
    """Flags that a command does not take, or that would make it larger, are left out; what was typed stays in front."""
    monkeypatch.chdir(ROOT)
    words = lambda *flags: [word for pair in SMALL if pair[0] in flags for word in pair]
    some = ("--max_steps", "--max_train_examples", "--max_eval_examples", "--embed_dim", "--depth", "--seq_len")
    some += ("--batch_size",)
    assert more(["--arch", "vit"]) == words(*some)
    assert more(["--dataset", "cabc"])[-2:] == ["--image_size", "64"], "which has none of 32 pixels"
    assert more(["compare", "runs"]) == more(["--dry_run"]) == []
    assert " --devices 1,2 --steps 2 " in shortened("python main.py bench --devices 1,2")
    assert shortened("make train ARGS='--resume auto'") == "make train 'ARGS=--resume auto --max_steps 3'"
    both = shortened("python main.py --num_processes 2 --coordinator_address h --process_id 0").split(" & ")
    assert [re.findall(r"--process_id (\d)", each) for each in both] == [["0"], ["1"]]


@pytest.mark.parametrize("page", HOWTO, ids=lambda page: page.name)
def test_links_lead_somewhere_and_programs_run(page, tmp_path, monkeypatch):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
    monkeypatch.chdir(tmp_path)
    from cssm import cells

    monkeypatch.setattr(cells, "CELLS", cells.CELLS)
    monkeypatch.setitem(cells.CELLS, "no_gate", cells.CELLS["no_gate"])
    for program in programs(page):
        exec(compile(program, page.name, "exec"), {"__name__": "docs"})


def test_the_how_to_pages_are_all_listed():
    listed = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "howto" / "README.md").read_text()))
    assert listed == {page.name for page in HOWTO} - {"README.md"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, as some pages take one for granted."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run("python main.py --run_name digits") == 0
    return folder / "runs"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # README has some forty
@pytest.mark.parametrize(
    "page", [page for page in PAGES if here(page) and page.name != "using.md"], ids=lambda page: page.name
)
def test_the_commands_of_a_page_run_in_turn(page, trained, tmp_path, monkeypatch, capfd):
    """Those of docs/using.md are run by tests/test_using_doc.py, which also compares what they print."""
    make_checkout(tmp_path)
    make_data(tmp_path, page)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").symlink_to(trained / "digits")
    for number, command in enumerate(here(page)):
        assert run(complete(command, number)) == 0, (command, capfd.readouterr())
        capfd.readouterr()
