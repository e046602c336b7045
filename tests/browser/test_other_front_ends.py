"""The widgets and notebooks elsewhere than in JupyterLab: marimo, Notebook 7, `jupyter execute` and nbconvert, each as
`pip install 'rstar_lab[notebooks]' notebook marimo` installs it.

    pytest -m soak tests/browser/test_other_front_ends.py
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from helpers.notebooks import GOLDEN

from browser.lab_page import ROOT, SHOTS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]
WAIT_MS = 180_000
APP = """
import marimo

app = marimo.App(width="full")


@app.cell
def _():
    import marimo as mo
    from rstar_lab.analysis import explore, inspect, open_runs, overview, plot_curves

    runs = open_runs("runs")
    return explore, inspect, mo, overview, plot_curves, runs


@app.cell
def _(explore, inspect, mo, overview, plot_curves, runs):
    shown = [inspect(runs), explore([plot_curves(runs, ["pass1"])], runs), overview("runs").table]
    mo.vstack([mo.ui.anywidget(each) for each in shown])
    return


@app.cell
def _(plot_curves, runs):
    plot_curves(runs, ["reward"])
    return
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin folder of an environment with the notebooks extra, Notebook 7 and marimo."""
    folder = tmp_path_factory.mktemp("front-ends")
    uv = [str(Path(sys.executable).parent / "uv")]
    packages = [f"{ROOT}[notebooks]", "notebook>=7", "marimo"]
    subprocess.run([*uv, "venv", "--quiet", folder], check=True)
    done = subprocess.run(
        [*uv, "pip", "install", "--quiet", "--python", folder / "bin" / "python", *packages],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"the packages cannot be installed: {done.stderr.strip()[-300:]}")
    return folder / "bin"


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder with runs and a notebook that reads them."""
    shutil.copytree(GOLDEN, tmp_path / "runs")
    shutil.copy(ROOT / "notebooks" / "05_inspect.ipynb", tmp_path)
    return tmp_path


def variables(folder: Path) -> dict[str, str]:
    """The environment variables of a user without settings, in which the environment finds its own packages only."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {
        "HOME": str(folder),
        "IPYTHONDIR": str(folder / ".ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / ".jupyter"),
    }


@contextlib.contextmanager
def serving(command: list[str], folder: Path, path: str = "") -> Iterator[str]:
    """Start a server and yield its address; {port} in the command is its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [part.format(port=address.rpartition(":")[2]) for part in command]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=variables(folder), stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(address + path, timeout=10):
                break
            assert server.poll() is None, (folder / "server.log").read_text()
            time.sleep(0.3)
        yield address
    finally:
        server.terminate()
        server.wait(60)


def use_inspector(page) -> None:
    """Open a rollout and set a filter in the first inspector of the page, and check that it follows."""
    page.wait_for_selector(".rl-app .rl-seg", timeout=WAIT_MS)
    app = page.locator(".rl-app").first
    app.locator("[data-index='3']").click()
    app.locator(".rl-chosen[data-index='3']").wait_for(timeout=WAIT_MS)  # Playwright looks into marimo's shadow roots
    before = app.locator(".rl-count").inner_text()
    app.locator(".rl-toggle:text('Correct')").click()
    for _ in range(600):
        if app.locator(".rl-count").inner_text() != before:
            return
        page.wait_for_timeout(300)
    raise AssertionError(f"the filter did not change the list: {before}")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_marimo_shows_the_widgets_in_its_theme(installed, project, browser, theme):
    (project / "app.py").write_text(APP)
    (project / ".marimo.toml").write_text(f'[display]\ntheme = "{theme}"\n')
    command = [
        str(installed / "marimo"),
        "-q",
        "-y",
        "run",
        "app.py",
        "--headless",
        "--no-token",
        "--host",
        "127.0.0.1",
    ]
    with serving([*command, "--port", "{port}"], project) as address:
        other = {"light": "dark", "dark": "light"}[theme]  # the theme of the page decides, not that of the system
        page = browser.new_page(viewport={"width": 1400, "height": 1400}, color_scheme=other)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        use_inspector(page)
        page.locator(".rl-figure .main-svg").first.wait_for(timeout=WAIT_MS)
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / f"marimo-{theme}.png")
        assert page.locator(".rl-overview tbody tr").count() == 5 and page.locator(".rl-app").count() == 2
        scheme = "element => getComputedStyle(element).colorScheme"
        assert page.locator(".rl-app").first.evaluate(scheme) == theme
        ink = page.locator(".rl-figure .xtick text").first.evaluate("element => getComputedStyle(element).fill")
        shade = sum(map(int, ink.removeprefix("rgb(").rstrip(")").split(",")))
        assert (shade > 380) == (theme == "dark"), ink
        assert errors == []
        page.close()


def test_notebook_7_shows_the_inspector(installed, project, browser):
    command = [
        str(installed / "jupyter"), "notebook", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port={port}",
        "--ServerApp.port_retries=0",
        "--JupyterNotebookApp.expose_app_in_browser=True", "--IdentityProvider.token=", f"--ServerApp.root_dir={project}",
    ]  # fmt: skip
    with serving(command, project, "/api/status") as address:
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(WAIT_MS)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(f"{error}\n{getattr(error, 'stack', '')}"))
        page.goto(f"{address}/notebooks/05_inspect.ipynb")
        kernel = "window.jupyterapp?.shell?.currentWidget?.context?.sessionContext?.session?.kernel"
        page.wait_for_function(f"() => {kernel}?.connectionStatus === 'connected' && {kernel}.status === 'idle'")
        page.evaluate("() => { void window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
        use_inspector(page)
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / "notebook-7.png")
        # Code of widgets comes from blob: URLs; other errors are of Notebook 7.
        assert [error for error in errors if "blob:" in error and "Failed to initialize model" not in error] == []
        page.close()


def test_jupyter_execute_runs_a_notebook_and_nbconvert_shows_its_figures(installed, project, browser):
    path = project / "05_inspect.ipynb"
    jupyter = str(installed / "jupyter")
    subprocess.run([jupyter, "execute", "--inplace", path.name], cwd=project, env=variables(project), check=True)
    outputs = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    figures = [output.data for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {})]
    # GitHub shows an image or a table, and nothing of plotly.
    assert figures and all({"image/svg+xml", "text/html"} & data.keys() for data in figures)
    subprocess.run([jupyter, "nbconvert", "--to", "html", path.name], cwd=project, env=variables(project), check=True)
    page = browser.new_page(viewport={"width": 1000, "height": 1000}, offline=True)
    page.goto((project / "05_inspect.html").as_uri())
    assert page.locator(".rl-page .rl-seg").count() > 2 and page.locator(".rl-table tbody tr").count() >= 10
    assert page.locator("img[src^='data:image/svg'], .jp-RenderedSVG svg, .main-svg").count() >= len(figures)
    page.close()
