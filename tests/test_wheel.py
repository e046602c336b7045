"""The wheel works outside of the source tree: in a new environment with one extra, and with everything."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "runs"
UV = Path(sys.executable).parent / "uv"
pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command away from the source tree and return what it prints."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(item) for item in command], cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--wheel", "--quiet", "--out-dir", folder, ROOT, cwd=ROOT)
    (found,) = folder.glob("*.whl")
    return found


def interpreters() -> dict[str, Path]:
    """Return the other supported versions of Python on this machine: on PATH, or installed by pyenv."""
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in ("3.12", "3.13"):
        names = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
        for name in names:  # a shim of pyenv can exist without its interpreter
            if name and subprocess.run([name, "--version"], capture_output=True).returncode == 0:
                found.setdefault(version, Path(name))
    return found


OTHERS = interpreters()
RUN_CODE = """
import asyncio
from rstar_lab.sandbox import LocalSandbox
async def main():
    async with LocalSandbox() as sandbox:
        print((await sandbox.run("print(6 * 7)")).stdout)
if __name__ == "__main__":
    asyncio.run(main())
"""
OPEN_RUNS = f"""
from rstar_lab.analysis import inspect, open_runs
runs = open_runs({str(GOLDEN)!r})
print(len(runs.steps()), len(runs.trajectories()))
assert "<" in inspect(runs).static_html()
"""


def install(wheel: Path, extra: str, folder: Path, interpreter: Path = Path(sys.executable)) -> Path:
    """Make a new environment with one extra of the wheel; return its folder of commands."""
    python = folder / "bin" / "python"
    run(UV, "venv", "--quiet", "--python", interpreter, folder, cwd=wheel.parent)
    constraints = next(path for path in (ROOT / "constraints" / "cpu.txt", ROOT / "constraints.txt") if path.exists())
    target = f"rstar_lab[{extra}] @ {wheel.as_uri()}"
    run(
        UV, "pip", "install", "--quiet", "--python", python, "--constraint", constraints, target, cwd=wheel.parent
    )  # fmt: skip
    return python.parent


def test_the_sandbox_extra_runs_code_and_shows_help(wheel, tmp_path):
    bin_folder = install(wheel, "sandbox", tmp_path / "venv")
    assert "sandbox" in run(bin_folder / "rstar-lab", "--help", cwd=tmp_path)
    assert "serve" in run(bin_folder / "rstar-lab", "sandbox", "--help", cwd=tmp_path)
    for command, extra in (("runs list", "analysis"), ("run tiny", "cpu")):
        done = subprocess.run(
            [bin_folder / "rstar-lab", *command.split()], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 1 and f"pip install '.[{extra}]'" in done.stderr, (
            command,
            done.stderr[-500:],
        )
    (tmp_path / "program.py").write_text(RUN_CODE)
    assert run(bin_folder / "python", "program.py", cwd=tmp_path).strip() == "42"


def test_the_analysis_extra_opens_a_run_and_exports_a_trajectory(wheel, tmp_path):
    bin_folder = install(wheel, "analysis", tmp_path / "venv")
    steps, trajectories = run(bin_folder / "python", "-c", OPEN_RUNS, cwd=tmp_path).split()
    assert int(steps) and int(trajectories)
    assert "run_id" in run(bin_folder / "rstar-lab", "runs", "list", "--runs-dir", GOLDEN, "--json", cwd=tmp_path)


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_sandbox_and_analysis_run_on_other_versions_of_python(wheel, tmp_path, version):
    if version not in OTHERS:
        pytest.skip(f"PYTHON {version} IS NOT TESTED: no such interpreter is installed")
    bin_folder = install(wheel, "sandbox,analysis", tmp_path / "venv", OTHERS[version])
    (tmp_path / "program.py").write_text(RUN_CODE)
    assert run(bin_folder / "python", "program.py", cwd=tmp_path).strip() == "42"
    assert int(run(bin_folder / "python", "-c", OPEN_RUNS, cwd=tmp_path).split()[1])


def test_profiles_recipes_and_notebooks_are_in_the_wheel(wheel, tmp_path):
    # The dependencies come from this environment: a second copy of torch and vLLM would take gigabytes.
    target = tmp_path / "site"
    run(UV, "pip", "install", "--quiet", "--no-deps", "--target", target, wheel, cwd=tmp_path)
    path = {"PYTHONPATH": str(target)}
    where = run(sys.executable, "-c", "import rstar_lab; print(rstar_lab.__file__)", cwd=tmp_path, **path)
    assert where.startswith(str(target))
    cli = (sys.executable, "-m", "rstar_lab.cli")
    checks = run(*cli, "preflight", "tiny", "--profile", "laptop", "--json", cwd=tmp_path, **path)
    assert json.loads(checks.splitlines()[-1])
    copied = run(*cli, "notebooks", "mine", cwd=tmp_path, **path).split()
    assert {Path(name).name for name in copied} == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert run(sys.executable, "-m", "rstar_lab.jobs.render", "h100x8", "kuberay", cwd=tmp_path, **path)
