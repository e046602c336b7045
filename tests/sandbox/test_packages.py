"""Tests of additional packages and readable files of programs."""

import json
import sys
import zipfile

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import LocalSandbox
from rstar_lab.sandbox.packages import check_readable, install_packages


@pytest.fixture
def requirements(tmp_path, monkeypatch):
    """Return a requirements file that names one wheel on disk, so that no package index is needed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel = tmp_path / "tiny_extra-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_extra.py", "answer = 42\n")
        archive.writestr("tiny_extra-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny_extra\nVersion: 1.0\n")
        archive.writestr(
            "tiny_extra-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_extra-1.0.dist-info/RECORD", "")
    file = tmp_path / "requirements.txt"
    file.write_text(f"{wheel}\n")
    return file


@pytest.mark.slow
@pytest.mark.asyncio
async def test_programs_import_packages_and_read_files_but_cannot_write_them(requirements, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "table.csv").write_text("1,2\n")
    (tmp_path / "secret").write_text("x")
    code = f"""
import json, os, subprocess, sys, tiny_extra
child = subprocess.run([sys.executable, "-c", "import tiny_extra; print(tiny_extra.answer)"], capture_output=True, text=True)
def writable(path):
    try:
        open(path, "w").close()
        return True
    except OSError:
        return False
folder = os.path.dirname(tiny_extra.__file__)
print(json.dumps([tiny_extra.answer, child.stdout, open("{data}/table.csv").read(), os.path.exists("{tmp_path}/secret"),
                  writable("{data}/new"), writable("{data}/table.csv"), writable(folder + "/new")]))"""
    async with LocalSandbox(workers=1, readable=[data], packages=requirements) as sandbox:
        result = await sandbox.run(code)
        assert result.outcome == Outcome.OK, result
        assert json.loads(result.stdout) == [42, "42\n", "1,2\n", False, False, False, False]
    async with LocalSandbox(workers=1) as sandbox:
        assert "ModuleNotFoundError" in (await sandbox.run("import tiny_extra")).stderr


@pytest.mark.slow
@pytest.mark.asyncio
async def test_preloaded_modules_are_imported_once_for_all_programs(requirements):
    code = "import sys\nfound = 'tiny_extra' in sys.modules\nimport tiny_extra\nfound, 'sci' + 'py' in sys.modules"
    async with LocalSandbox(workers=1, packages=requirements, preload=["tiny_extra"]) as sandbox:
        assert (await sandbox.run(code)).value == "(True, True)"
        assert (await sandbox.run(code, session="s")).value == "(True, True)"
        assert (await sandbox.run("import sys\n'sci' + 'py' in sys.modules")).value == "False"
    with pytest.raises(UserError, match="--preload: No module named 'not_there'"):
        await LocalSandbox(workers=1, preload=["not_there"]).start()


@pytest.mark.slow
def test_packages_are_installed_once(requirements, monkeypatch):
    folder = install_packages(requirements)
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    assert install_packages(requirements) == folder


def test_errors_name_the_option_and_the_path(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--readable /does/not/exist: no such file"):
        check_readable("/does/not/exist")
    with pytest.raises(UserError, match="name a folder below /proc"):
        check_readable("/proc")
    with pytest.raises(UserError, match="--packages /does/not/exist: No such file"):
        install_packages("/does/not/exist")
