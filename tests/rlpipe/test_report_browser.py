"""The report in a real browser: it draws everything without a network."""

import html
import re
import shutil
import subprocess

import matplotlib.image
import pytest

from rlpipe.monitoring.json_lines import append_json_line
from rlpipe.monitoring.metric_dictionary import METRICS
from rlpipe.monitoring.panels import GROUPS, name_pattern
from rlpipe.monitoring.report import write_report
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.phases import PHASES

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def run(tmp_path):
    """A run in which every metric of the dashboards was logged, and one rank is slow."""
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.config.write_text("run: {name: x}\n")
    names = {metric.replace("{dataset}", "held_out").replace("{engine}", "0") for metric in METRICS}
    for iteration in range(1, 6):
        row = {name: 0.5 + 0.1 * iteration + number / 1000 for number, name in enumerate(sorted(names))}
        row |= {f"time/{phase}_seconds": 0.25 for phase in PHASES}
        row |= {"iteration": iteration, "time/rollout_seconds": 6.25, "time/step_seconds": 10.0, "ranks/slowest": 1}
        row |= {"ranks/compute_mean_seconds": 1.0, "ranks/compute_max_seconds": 1.5, "rollout/truncated_share": 0.3}
        append_json_line(directory.metrics, row)
        for rank in (0, 1):
            seconds = {"forward": 1.0 + rank, "train_exchange": 1.0 - rank}
            append_json_line(
                directory.ranks,
                {"iteration": iteration, "name": f"actor-{rank}", "host": f"node{rank}", "seconds": seconds},
            )
    directory.logs.mkdir()
    event = {"kind": "triton", "name": "chunk_bwd<T>", "seconds": 3.0, "compiled": True, "iteration": 4}
    append_json_line(directory.jit_events, event)
    return directory.path


def test_the_page_has_advice_charts_and_tables_and_needs_nothing_from_outside(run):
    page = write_report(run).page.read_text()
    assert "rollout is 62% of the step: add engines" in page
    assert "The slowest rank computes 50% longer than the mean; 5 of 5 times it is actor-1 on node1." in page
    assert "1 compilations after iteration 1, most often triton chunk_bwd&lt;T&gt;" in page
    assert "30% of the responses meet the token limit" in page
    panels = [panel for group in GROUPS if group.in_report for panel in group.panels]
    drawn = set(re.findall("<figcaption>(.*?)</figcaption>", page))
    told = html.unescape(" ".join(re.findall("The same values as above: (.*?)</p>", page)))
    for panel in panels:
        assert html.escape(panel.title) in drawn or panel.title in told, panel.title
    assert name_pattern("x") == "^x$"
    for name in ("rollout tok/s/GPU", "actor-1", "node1", "chunk_bwd&lt;T&gt;", "train exchange s"):
        assert name in page
    for outside in ("http://", "https://", "src=", "<script", "<link", "@import"):
        assert outside not in page, outside


@pytest.mark.slow
@pytest.mark.skipif(_CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_the_page(run, tmp_path):
    page, picture = write_report(run).page, tmp_path / "page.png"
    command = [
        str(_CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1300,4000",
    ]
    shot = subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=400)
    assert picture.exists(), shot.stderr.decode()
    dumped = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=400).stdout
    assert dumped.count("<figure>") == page.read_text().count("<figure>") > 20
    image = matplotlib.image.imread(picture)[..., :3]
    assert image.shape[:2] == (4000, 1300)
    # Ink in every band of the page's first 2000 rows: nothing collapsed, and the drawings have colors.
    bands = image[:2000].reshape(10, 200, 1300, 3)
    assert all((band < 0.9).any() for band in bands)
    colored = (image.max(axis=-1) - image.min(axis=-1)) > 0.2
    assert colored.sum() > 5000


@pytest.mark.slow
@pytest.mark.skipif(_CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [400, 800, 1400])
def test_no_part_is_wider_than_the_window(run, tmp_path, width):
    """In a frame, since a window has a least width. Tables scroll within theirs."""
    page, frame = write_report(run).page, tmp_path / "frame.html"
    script = (
        "<script>onload = () => { const page = document.querySelector('iframe').contentDocument.documentElement;"
        "document.title = page.scrollWidth + ' ' + page.querySelectorAll('svg').length }</script>"
    )
    frame.write_text(
        f"<iframe src='{page.as_uri()}' style='border: 0; width: {width}px; height: 3000px'></iframe>{script}"
    )
    command = [str(_CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=400).stdout
    found = re.search(r"<title>(\d+) (\d+)</title>", dumped)
    assert found is not None, dumped[:500]
    assert int(found[1]) <= width and int(found[2]) > 20
