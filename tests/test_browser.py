"""Pages in a real browser: headless Chromium opens them offline, in light and dark, and has no complaint."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_page import Reader

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[1]
SHORT = "--max_steps 12 --log_every 1 --eval_every 4 --embed_dim 4 --seq_len 2 --max_eval_examples 64"
SCHEMES = {"dark": 0, "light": 1}  # Blink's numbers


class Browser:
    """Chromium with a profile of its own, that resolves no name."""

    def __init__(self, profile: Path):
        command = shutil.which("chromium")
        assert command, "the browser tests need Chromium: apt-get install chromium, or leave them out with -m"
        self.command = [command, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        self.command += ["--hide-scrollbars", "--enable-logging=stderr", "--allow-file-access-from-files"]
        self.command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}"]

    def open(self, page: Path, *flags: str) -> tuple[str, list[str]]:
        """(stdout, what the console of the page says)."""
        command = [*self.command, *flags, page.as_uri()]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        return result.stdout, [line for line in result.stderr.splitlines() if ":CONSOLE:" in line]

    def screenshot(self, page: Path, scheme: str, width: int) -> np.ndarray:
        """uint8 [H, W, 3]; the file lies beside the page, to be looked at."""
        target = page.with_name(f"{page.stem}_{scheme}_{width}.png")
        flags = [f"--screenshot={target}", f"--window-size={width},2400"]
        _, complaints = self.open(page, *flags, f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}")
        assert not complaints
        return np.asarray(Image.open(target).convert("RGB"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    return Browser(tmp_path_factory.mktemp("profile"))


def command(*words: str) -> None:
    subprocess.run([sys.executable, "main.py", *words], cwd=ROOT, check=True, timeout=300)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """report.html of a run whose name is hostile, and the page of two runs."""
    root = tmp_path_factory.mktemp("runs")
    for name, cell in (("<b>$1$ & '2'", "gated"), ("plain", "hgru_bi")):
        command(
            "--cssm",
            cell,
            "--checkpoint_dir",
            str(root),
            "--run_name",
            name,
            *SHORT.split(),
            "--num_devices=1",
            "--quiet",
        )
    command("compare", str(root), "--output", str(root / "compare.html"))
    return {"report": next(root.glob("<b>*")) / "report.html", "compare": root / "compare.html"}


@pytest.mark.parametrize("name", ["report", "compare"])
def test_a_page_opens_without_a_complaint_and_without_a_network(browser, pages, name):
    dom, complaints = browser.open(pages[name], "--dump-dom")
    assert not complaints
    read = Reader(dom)
    assert [tag for tag, _ in read.tags].count("svg") >= 7
    wanted = {"report": "Confusion matrix|Answers on the test split|Environment", "compare": "Runs compared|Curves"}
    assert set(wanted[name].split("|")) <= set(read.texts)


@pytest.mark.parametrize("name", ["report", "compare"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_page_is_light_or_dark_as_its_reader_has_it(browser, pages, name, width):
    light, dark = (browser.screenshot(pages[name], scheme, width) for scheme in ("light", "dark"))
    assert light.shape == dark.shape and light.shape[1] == width
    assert light[2, 2].tolist() == [255] * 3 and dark[2, 2].max() < 40
    # Text and curves: dark on light, and light on dark, in both.
    assert (light.max(-1) < 100).mean() > 0.002 and (dark.min(-1) > 150).mean() > 0.002


@pytest.mark.parametrize(
    "bad, says",
    [
        ("<script>undefined_function()</script>", "undefined_function"),
        ('<img src="https://example.com/x.png">', "Content Security Policy"),
    ],
)
def test_a_page_that_is_not_right_is_caught(browser, pages, tmp_path, bad, says):
    """Without the policy scripts run, and their errors show; with it nothing is fetched."""
    text = pages["report"].read_text().replace("</body>", f"{bad}</body>")
    if "script" in bad:
        text = text.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
    (tmp_path / "bad.html").write_text(text)
    _, complaints = browser.open(tmp_path / "bad.html", "--dump-dom")
    assert any(says in line for line in complaints)
