"""Fixtures of the browser tests: JupyterLab and Chromium, started once for all tests of this folder.

def test_it(lab):                                  # skipped with a message without Chromium
    with lab.notebook("03_train.ipynb") as page:   # a copy of notebooks/03_train.ipynb in a fresh kernel
        page.run_all()
        page.shot("train")                         # out/screenshots/train.png
                                                   # fails on any page or console error
"""

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

import pytest

from browser.lab_page import ROOT, START_S, TOKEN, Lab

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def chromium() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


# Package scope: while Playwright runs, no other test in this thread can start an event loop.
@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    executable = chromium()
    if executable is None:
        pytest.skip("Chromium is not installed: the browser tests did NOT run (apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, headless=True, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="package")
def lab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    private = {
        name: str(tmp_path_factory.mktemp(name.lower()))
        for name in (
            "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR",
            "IPYTHONDIR",
        )
    }  # fmt: skip
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
