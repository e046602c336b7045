"""Fixtures of the browser tests: JupyterLab and Chromium, started once per module.

def test_it(lab):                                  # skipped with a message without Chromium
    with lab.notebook("03_train.ipynb") as page:   # a copy of notebooks/03_train.ipynb in a fresh kernel
        page.run_all()
        page.shot("train")                         # out/screenshots/train.png
                                                   # fails on any page or console error
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "analysis"))
SHOTS = ROOT / "out" / "screenshots"
TOKEN = "rstar-lab-test"
START_S, CELL_S = 240, 240  # upper bounds for a busy machine
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def chromium() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class LabPage:
    """A notebook open in JupyterLab; `page` is Playwright's."""

    def __init__(self, lab: "Lab", page: Any, path: str) -> None:
        self.lab, self.page, self.path = lab, page, path
        self.errors: list[str] = []
        # Model starts that anywidget aborted after two seconds. The widgets recover from this, so it is not an error.
        self.late_starts: list[str] = []
        page.on("pageerror", self._page_error)
        page.on("console", lambda message: self._console(message))

    def _page_error(self, error: Any) -> None:
        stack = getattr(error, "stack", None) or str(error)
        late = "[anywidget] Failed to initialize model" in stack
        # JupyterLab sometimes removes a node twice when a kernel restarts. Code of widgets comes from blob: URLs.
        twice = "'removeChild' on 'Node'" in stack and "blob:" not in stack
        if not twice:
            (self.late_starts if late else self.errors).append(f"page error: {stack}")

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(f"console error: {message.text} ({message.location.get('url', '')})")

    def wait(self, expression: str, timeout_s: float = CELL_S) -> None:
        self.page.wait_for_function(expression, timeout=timeout_s * 1000)

    def ready(self) -> None:
        """Wait until JupyterLab shows the notebook with a connected, idle kernel."""
        self.wait(
            "() => { const kernel = window.jupyterapp?.shell.currentWidget?.context?.sessionContext?.session?.kernel;"
            " return kernel?.connectionStatus === 'connected' && kernel.status === 'idle'; }",
            START_S,
        )

    def command(self, name: str) -> None:
        self.page.evaluate("name => { void window.jupyterapp.commands.execute(name); }", name)

    def run_all(self, timeout_s: float = CELL_S) -> None:
        """Run all cells and wait for the last. Fails with the error of the first cell that fails."""
        error = self.page.evaluate(
            """async seconds => {
              const app = window.jupyterapp;
              const late = new Promise((_, reject) => setTimeout(reject, 1000 * seconds, new Error(`still running after ${seconds} s`)));
              await Promise.race([app.commands.execute('notebook:run-all-cells'), late]);
              const cells = app.shell.currentWidget.content.model.sharedModel.cells.filter(cell => cell.cell_type === 'code');
              const failed = cells.flatMap(cell => cell.outputs).find(output => output.output_type === 'error');
              return failed ? `${failed.ename}: ${failed.evalue}` : null;
            }""",
            timeout_s,
        )
        assert error is None, f"a cell of {self.path} failed: {error}"

    def restart(self) -> None:
        """Restart the kernel and wait for it."""
        self.page.evaluate(
            "async () => { await window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.restart(); }"
        )
        self.ready()

    def theme(self, name: str) -> None:
        """'JupyterLab Light' or 'JupyterLab Dark'."""
        self.page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", name)
        self.wait(f"() => document.body.dataset.jpThemeName === '{name}'")

    def shot(self, name: str, selector: str | None = None) -> Path:
        SHOTS.mkdir(parents=True, exist_ok=True)
        path = SHOTS / f"{name}.png"
        if selector:
            self.page.locator(selector).first.screenshot(path=path)
        else:
            self.page.screenshot(path=path)
        return path


class Lab:
    """A JupyterLab server and a browser that open notebooks."""

    def __init__(self, url: str, folder: Path, browser: Any) -> None:
        self.url, self.folder, self.browser = url, folder, browser

    def api(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Authorization": f"token {TOKEN}"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    @contextlib.contextmanager
    def notebook(
        self,
        source: str | Path,
        *,
        size: tuple[int, int] = (1440, 1000),
        init: str = "",
        parameters: dict[str, Any] | None = None,
        fragment: str = "",
    ) -> Iterator[LabPage]:
        """Open a copy of a notebook in a new page and kernel.

        source: file name in notebooks/, or a path. parameters: values inserted after the cell tagged `parameters`, as
        papermill does. init: JavaScript that runs before the page's own. fragment: end of the URL, including "#".
        Asserts at the end that the page reported no error.
        """
        source = Path(source)
        source = source if source.is_absolute() else ROOT / "notebooks" / source
        name = f"{time.monotonic_ns()}-{source.name}"
        book = nbformat.read(source, as_version=4)
        if parameters:
            at = next(i for i, cell in enumerate(book.cells) if "parameters" in cell.metadata.get("tags", []))
            assignments = "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
            book.cells.insert(at + 1, nbformat.v4.new_code_cell(assignments))
        nbformat.write(book, self.folder / name)
        body = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}}
        session = self.api("api/sessions", body)
        context = self.browser.new_context(viewport={"width": size[0], "height": size[1]}, accept_downloads=True)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.set_default_timeout(CELL_S * 1000)
        if init:
            page.add_init_script(init)
        opened = LabPage(self, page, name)
        try:
            page.goto(
                f"{self.url}/lab/workspaces/{name.split('-')[0]}/tree/{name}?token={TOKEN}{fragment}",
                wait_until="domcontentloaded",
            )
            opened.ready()
            yield opened
            assert not opened.errors, "the page reported errors:\n" + "\n".join(opened.errors)
        except BaseException:
            with contextlib.suppress(Exception):
                opened.shot(f"failed-{source.stem}")
            raise
        finally:
            context.close()
            with contextlib.suppress(urllib.error.URLError):
                self.api(f"api/sessions/{session['id']}", method="DELETE")


# Module scope: while Playwright runs, no other test in this thread can start an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = chromium()
    if executable is None:
        pytest.skip("Chromium is not installed: the browser tests did NOT run (apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, headless=True, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    private = {
        name: str(tmp_path_factory.mktemp(name.lower()))
        for name in (
            "JUPYTER_CONFIG_DIR",
            "JUPYTER_RUNTIME_DIR",
            "JUPYTERLAB_SETTINGS_DIR",
            "JUPYTERLAB_WORKSPACES_DIR",
            "IPYTHONDIR",
        )
    }
    quiet = Path(private["JUPYTERLAB_SETTINGS_DIR"]) / "@jupyterlab" / "apputils-extension"
    quiet.mkdir(parents=True)
    (quiet / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (folder.parent / "lab.log").open("w")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VSCODE_")}
    server = subprocess.Popen(
        [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={TOKEN}", "--allow-root", f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True",
            "--LabApp.extension_manager=readonly",
        ],
        env=environment | private | {"RSTAR_LAB_ROOT": str(ROOT), "OMP_NUM_THREADS": "1"}, cwd=folder, stdout=log, stderr=subprocess.STDOUT,
    )  # fmt: skip
    started = Lab(f"http://127.0.0.1:{port}", folder, browser)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                started.api("api/status")
                break
            except (urllib.error.URLError, OSError) as error:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"JupyterLab did not start; see {log.name}") from error
                time.sleep(0.3)
        yield started
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
        log.close()


@pytest.fixture(scope="session")
def axe() -> Path:
    """Path of axe-core's script, installed by tests/services.sh."""
    path = ROOT / "out" / "npm" / "node_modules" / "axe-core" / "axe.min.js"
    if not path.exists():
        pytest.skip("axe-core is not installed: accessibility was NOT checked (run `make services`; it needs npm)")
    return path
