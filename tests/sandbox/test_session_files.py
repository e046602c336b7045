"""Tests of files and plots of sessions."""

import base64
import os

import pytest

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Limits, LocalSandbox, SandboxClient
from rstar_lab.sandbox.session_files import CHUNK_BYTES, MAX_WRITTEN_BYTES, SessionFileError

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]


async def check_files(sandbox: LocalSandbox | SandboxClient) -> None:
    large = os.urandom(2 * CHUNK_BYTES)
    await sandbox.write_files("files", {"in/data.bin": b"\x00\xff\n", "large": large, "empty": b""})
    result = await sandbox.run("content = open('in/data.bin', 'rb').read()\ncontent", session="files")
    assert result.value == r"b'\x00\xff\n'"
    await sandbox.run("open('out', 'wb').write(content * 2)", session="files")
    files = await sandbox.read_files("files", ["out", "large", "empty"])
    assert files == {"out": b"\x00\xff\n" * 2, "large": large, "empty": b""}
    with pytest.raises(SessionFileError, match="missing: FileNotFoundError"):
        await sandbox.read_files("files", ["missing"])
    with pytest.raises(SessionFileError, match="x: larger than 50331648 bytes"):
        await sandbox.write_files("files", {"x": bytes(MAX_WRITTEN_BYTES + 1)})
    with pytest.raises(SessionFileError, match="/etc/new: "):
        await sandbox.write_files("files", {"/etc/new": b""})
    assert (await sandbox.run("len(content)", session="files")).value == "3"
    assert await sandbox.plots("files") == []
    await sandbox.close_session("files")


async def test_files_of_a_session_of_an_embedded_sandbox():
    async with LocalSandbox(Limits(timeout_s=5.0), workers=1) as sandbox:
        await check_files(sandbox)


async def test_files_of_a_session_of_a_service(service):
    async with SandboxClient(service["url"]) as client:
        await check_files(client)


async def test_files_over_http(http):
    large = os.urandom(2 * CHUNK_BYTES)
    contents = {"in/data": b"\x00\xff", "large": large, "empty": b""}
    body = {
        "session": "http",
        "files": {path: base64.b64encode(content).decode() for path, content in contents.items()},
    }
    assert http.post("/files/write", json=body).status_code == 204
    for path, content in contents.items():
        reply = http.post("/files/read", json={"session": "http", "path": path})
        assert (reply.status_code, reply.content) == (200, content)
    missing = http.post("/files/read", json={"session": "http", "path": "missing"})
    assert missing.status_code == 422 and "missing: FileNotFoundError" in missing.json()["detail"]
    forbidden = http.post("/files/write", json={"session": "http", "files": {"/etc/new": ""}})
    assert forbidden.status_code == 422 and "/etc/new: " in forbidden.json()["detail"]
    assert http.post("/files/write", json={"session": "http", "files": {"x": "abc"}}).status_code == 422
    assert "rstar_lab_sandbox_in_flight 0.0" in http.get("/metrics").text


async def test_a_session_that_returns_something_else_is_an_error():
    async with LocalSandbox(Limits(timeout_s=5.0), workers=1) as sandbox:
        fake = "import threading, os\nexec = lambda *_: print('no base64!')"
        await sandbox.run(fake, session="fake")
        for read in (sandbox.read_files("fake", ["x"]), sandbox.plots("fake")):
            with pytest.raises(SessionFileError):
                await read


async def test_open_figures_are_returned_as_png_and_closed():
    async with LocalSandbox(Limits(timeout_s=60.0), workers=1) as sandbox:
        draw = "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.figure(); plt.plot([2, 1])"
        result = await sandbox.run(draw, session="plots")
        assert result.outcome == Outcome.OK, result.stderr
        plots = await sandbox.plots("plots")
        assert len(plots) == 2 and all(plot.startswith(b"\x89PNG") for plot in plots)
        assert await sandbox.plots("plots") == []


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ("['/dev/zero'] * 65", "65 figures"),
        ("[os.path.abspath('large')] * 3", "together"),
        ("[1]", "list of files"),
    ],
)
async def test_a_session_cannot_return_plots_without_end(fake, message):
    async with LocalSandbox(Limits(timeout_s=20.0), workers=1) as sandbox:
        code = "open('large', 'wb').write(bytes(30 << 20))\nimport json, os\n"
        code += f"def dump(paths, out): out.write(json.dumps({fake}))\njson.dump = dump"
        assert (await sandbox.run(code, session="plots")).outcome == Outcome.OK
        with pytest.raises(SessionFileError, match=message):
            await sandbox.plots("plots")
