"""Notebooks in JupyterLab, as the browser tests use them."""

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

from browser.widget_page import clipped_controls

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "out" / "screenshots"
FAULTS = (Path(__file__).parent / "text_faults.js").read_text()  # returns the faults in the texts of a page
TOKEN = "rstar-lab-test"
START_S, CELL_S = 240, 240  # upper bounds for a busy machine


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
        self.sessions: set[str] = set()  # of the notebooks that are open

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
        assert {session["id"] for session in self.api("api/sessions")} == self.sessions, "an earlier test left a kernel"
        session = self.api("api/sessions", body)
        self.sessions.add(session["id"])
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
            assert not (clipped := clipped_controls(page)), clipped
        except BaseException:
            with contextlib.suppress(Exception):
                opened.shot(f"failed-{source.stem}")
            raise
        finally:
            context.close()
            with contextlib.suppress(urllib.error.URLError):
                self.api(f"api/sessions/{session['id']}", method="DELETE")
            self.sessions.remove(session["id"])
