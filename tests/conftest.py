"""Settings of all tests."""

import atexit
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest_plugins = ["helpers.lazy_modules"]

# Processes that tests start import tests/helpers too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))

# No test uses the Hugging Face Hub; those of names on the Hub start a local server.
os.environ.setdefault("HF_ENDPOINT", "http://127.0.0.1:9")

# Records of jobs and tokens of services do not go to the home of the user who runs the tests.
if "XDG_STATE_HOME" not in os.environ:
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rstar-lab-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# With two threads per process, OpenMP's threads spin while they wait for a core that another test uses (six times the CPU time).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Property tests use the same examples in every `make test`; `make test-all` searches for new ones. Wall time depends on other processes.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


TESTS = Path(__file__).parent
REST = {line for line in (TESTS / "rest.txt").read_text().splitlines() if line and line[0] != "#"}


# Words of test files that start processes, or that load torch or data frames; and imports in the modules that a test file names.
HEAVY_WORDS = re.compile(
    r"\b(torch|transformers|vllm|verl|inspect_ai|pandas|duckdb|open_runs|doctor|subprocess|Popen|multiprocessing|playwright"
    r"|LocalSandbox|service)\b"
)
HEAVY_IMPORTS = re.compile(
    r"^ *(?:import|from) (?:torch|transformers|vllm|verl|pandas|duckdb|subprocess|multiprocessing)\b", re.M
)
IMPORTED = re.compile(r"^ *from ((?:rstar_lab|benchmarks|helpers)[\w.]*) import", re.M)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="leave out files whose tests start processes, or load torch or pandas"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not (config.option.fast and collection_path.name.startswith("test_")):
        return None
    text = collection_path.read_text(encoding="utf-8")
    names = [name.replace(".", "/") + ".py" for name in IMPORTED.findall(text)]
    files = [file for name in names for file in (TESTS.parent / name, TESTS / name) if file.exists()]
    heavy = HEAVY_WORDS.search(text) or any(HEAVY_IMPORTS.search(file.read_text(encoding="utf-8")) for file in files)
    return True if heavy else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect without the garbage collector, which would visit all imported modules again and again, and never visit them later."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark soaks as slow, mark the tests of tests/rest.txt, which `make test` leaves to `make test-rest`, and put files with slow
    tests first.

    Files that start processes take longest, so they must not be the last to start.
    """
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker("slow")
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        if item.get_closest_marker("slow") and (name in REST or name.partition("::")[0] in REST):
            item.add_marker("rest")
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(
        key=lambda item: (
            item.path not in slow_files,
            "verl" not in item.path.parts,
            "browser" not in item.path.parts,
            item.path.parent.name != "notebooks",
        )
    )


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files. All tests of a browser go to one process, which starts JupyterLab and Chromium once, and all
    that use verl to another, which imports it once."""
    from xdist.scheduler import LoadScopeScheduling

    groups = {"/browser/": "browser", "/rl/verl/": "verl", "/rl/algorithm/": "verl"}

    class LoadFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((group for folder, group in groups.items() if folder in file), file)

    return LoadFiles(config, log)


@pytest.fixture(scope="session")
def demo_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs of `make demo` (7 minutes). The variable RSTAR_LAB_DEMO names such a folder of an earlier demo."""
    if earlier := os.environ.get("RSTAR_LAB_DEMO"):
        return Path(earlier)
    folder = tmp_path_factory.mktemp("demo")
    subprocess.run([sys.executable, "-m", "rstar_lab.cli", "demo"], cwd=folder, check=True)
    return folder / "runs"
