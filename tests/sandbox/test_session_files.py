"""Tests of files of sessions."""

import os

import pytest

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
    await sandbox.close_session("files")


async def test_files_of_a_session_of_an_embedded_sandbox():
    async with LocalSandbox(Limits(timeout_s=5.0), workers=1) as sandbox:
        await check_files(sandbox)


async def test_files_of_a_session_of_a_service(service):
    async with SandboxClient(service["url"]) as client:
        await check_files(client)


async def test_a_session_that_returns_something_else_is_an_error():
    async with LocalSandbox(Limits(timeout_s=5.0), workers=1) as sandbox:
        fake = "import threading, os\nexec = lambda *_: print('no base64!')"
        await sandbox.run(fake, session="fake")
        with pytest.raises(SessionFileError):
            await sandbox.read_files("fake", ["x"])
