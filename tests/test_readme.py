"""README and docs say what is so: targets and links exist, programs work. Commands: tests/test_docs_commands.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cssm.report import Reporter

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def programs(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_two_commands_come_first():
    assert README.index("make train") < README.index("make test") < README.index("pip install")


def test_every_target_of_make_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"^ +make ([a-z]+)", page.read_text(), re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_table_of_exit_codes_is_that_of_the_program():
    from cssm import cli, nonfinite

    documented = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", README, re.MULTILINE) for code in row.split(",")}
    codes = {0, cli.BUG, cli.USAGE, cli.OUT_OF_MEMORY, cli.DEVICES, nonfinite.NON_FINITE, cli.STORAGE, cli.UNREAD}
    codes |= {cli.INTERRUPTED, 143}
    assert documented == codes


def test_the_sample_output_has_the_form_of_real_output(capsys):
    """Digits aside, its lines of steps, evaluations and summary are those that a reporter prints."""
    with Reporter(None) as report:
        with report.progress(468, 465):
            for step in (466, 467, 468):
                report.update(step, loss=0.1, accuracy=0.1, images_per_s=100.0)
            report.event("eval", split="val", step=468, loss=0.1, accuracy=0.1, count=270, best=True)
        report.event("eval", split="test", step=468, loss=0.1, accuracy=0.1, count=269)
    form = lambda line: re.sub(r"[\d,.:]+", "0", line).strip()
    printed = {form(line) for line in capsys.readouterr().out.splitlines()}
    sample = [form(line) for line in README.splitlines() if re.match(r"\s+(step|val|test) +(step )?[\d/]+ ", line)]
    assert len(sample) >= 3 and set(sample) <= printed


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "README.md" and programs(page)], ids=lambda p: p.name
)
def test_programs_in_the_docs_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for program in programs(page):
        exec(compile(program, page.name, "exec"), {"__name__": "docs"})


@pytest.mark.slow
def test_the_program_in_the_readme_runs(tmp_path):
    (program,) = programs(ROOT / "README.md")
    program = (
        program.replace("max_steps=100", f"max_steps=2, checkpoint_dir={str(tmp_path)!r}")
        + "\nassert summary['step'] == 2"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=300)
