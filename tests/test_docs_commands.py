"""Every command of the docs is one; those of quick start and how-to pages are run, in the order of each page."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_readme import photos, programs

from cssm.cli import main
from cssm.config import parse_args

ROOT = Path(__file__).resolve().parents[1]
HOWTO = sorted(ROOT.glob("docs/howto/*.md"))
RUN = [page for page in [ROOT / "docs" / "quickstart.md", *HOWTO] if "```bash" in page.read_text()]
ALL = [*sorted(ROOT.glob("docs/*.md")), *HOWTO]
# What is behind main.py on a line of its own, or in backticks; a part in [brackets] is one that may be left out.
LINE = re.compile(r"^ *(?:[A-Z_]+=\S+ )*(?:taskset -c 0 )?python main\.py(.*)$", re.MULTILINE)
SMALL = "--max_train_examples 128 --max_eval_examples 16 --embed_dim 8 --seq_len 2".split()
# Commands that are no main.py, and the test that runs them.
ELSEWHERE = {
    "sbatch configs/launch/slurm.sbatch": ("test_configs.py", "configs/launch/slurm.sbatch"),
    "srun --ntasks-per-node=1 python main.py": ("test_parallel_doc.py", "srun"),
}


def commands(page):
    """The lines of the page's bash blocks, without what is said about them."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_every_command_is_one(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for rest in LINE.findall(page.read_text()):
        argv = shlex.split(re.sub(r"\[[^\]]*\]|\\$", "", rest.split("#")[0]))
        if argv[:1] != ["--help"]:
            parse_args(argv)


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


def test_what_is_not_run_here_is_run_elsewhere():
    found = {command for page in RUN for command in commands(page) if not command.startswith(("python ", "make "))}
    for command in found:
        name, what = next(row for start, row in ELSEWHERE.items() if command.startswith(start))
        assert what in (ROOT / "tests" / name).read_text()


def shortened(command):
    """The words of a command behind `python`, its run cut to a few steps on two of the simulated devices."""
    _, script, *words = shlex.split(command)
    if script == "train":  # make train ARGS="..."
        script, words = "main.py", shlex.split(words[0].removeprefix("ARGS="))
    cut = {"--trials": "2", "--epochs": "1"}
    words = [cut.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    if words[0] == "bench":
        words += ["--devices", "2", "--steps", "2", "--max_train_examples", "128"]
    elif words[0] not in ("compare", "devices"):
        words += [] if "--gpus" in words else ["--num_devices", "2"]
        words += [] if "--find_lr" in words else ["--max_steps", "3" if "--resume" in words else "2"]
        words += [] if "--resume" in words else SMALL
    return [script, *words]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_in_turn(page, tmp_path, monkeypatch, capsys):
    """In this process, where programs are compiled once; those of the README are run as a user runs them."""
    photos(tmp_path / "photos")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        if command.startswith(tuple(ELSEWHERE)):
            continue
        script, *argv = shortened(command)
        if script == "main.py":
            code = main(argv)
        else:
            code = subprocess.run([sys.executable, script, *argv], timeout=300).returncode
        assert code == 0, (command, capsys.readouterr().err)
