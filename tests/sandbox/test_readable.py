"""Tests of files that programs may read, and of modules that are imported for them."""

import json

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.sandbox import LocalSandbox
from rstar_lab.sandbox.supervisor_pool import check_readable


@pytest.mark.slow
async def test_programs_read_files_and_use_imported_modules(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "table.csv").write_text("1,2\n")
    (tmp_path / "secret").write_text("x")
    code = f"""
import json, os, sys
imported = "wave" in sys.modules
import wave
def writable(path):
    try:
        open(path, "w").close()
        return True
    except OSError:
        return False
print(json.dumps([open("{data}/table.csv").read(), os.path.exists("{tmp_path}/secret"), writable("{data}/new"),
                  writable("{data}/table.csv"), imported, "sci" + "py" in sys.modules]))"""
    async with LocalSandbox(workers=1, readable=[data], preload=["wave"]) as sandbox:
        for session in (None, "s"):
            assert json.loads((await sandbox.run(code, session=session)).stdout) == [
                "1,2\n",
                False,
                False,
                False,
                True,
                True,
            ]
        assert (await sandbox.run("import sys\n'wa' + 've' in sys.modules")).value == "False"
    with pytest.raises(UserError, match="--preload: No module named 'not_there'"):
        await LocalSandbox(workers=1, preload=["not_there"]).start()


def test_errors_name_the_option_and_the_path():
    with pytest.raises(UserError, match="--readable /does/not/exist: no such file"):
        check_readable("/does/not/exist")
    with pytest.raises(UserError, match="name a folder below /proc"):
        check_readable("/proc")
