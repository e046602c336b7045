"""Runs a program with input files, and returns files that it wrote: SandboxFusion's `files` and `fetch_files`.

Writing the files, the program and reading files are cells of one short session, so that the program runs like any other and its files
never leave the sandbox's file system. The program can forge what is read, because it ran in the same interpreter.
"""

import base64
import binascii
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES
from rstar_lab.sandbox.call import Call, CallResult, failure
from rstar_lab.sandbox.session_files import SessionFileError, SessionFiles
from rstar_lab.sandbox.sessions import ENDED
from rstar_lab.sandbox.wire import SessionEnd, Work

# Bytes of all files that one call returns.
FETCH_BYTES = 700_000
# Flushes the files that the program did not close, and returns which of the requested ones exist.
_FIND = """
import contextlib, gc, io, os
for item in gc.get_objects():
    with contextlib.suppress(Exception):
        if isinstance(item, io.IOBase):
            item.flush()
with open(1, "w", closefd=False) as out:
    out.write("\\0".join(name for name in names if os.path.isfile(os.path.join(folder, name))))
"""


class ServiceFiles(SessionFiles):
    """Files of the sessions of a service. run: runs work on the service."""

    def __init__(self, run: Callable[[Work], Awaitable[CallResult]]) -> None:
        self.run = run

    async def run_call(self, call: Call) -> CallResult:
        return await self.run(call)


@dataclass(frozen=True, slots=True)
class FilesResult:
    """The result of a program with files. files: name -> base64; message: which requested files are missing, and why."""

    result: CallResult
    files: dict[str, str]
    message: str = ""


def decode_files(files: Mapping[str, str | None]) -> dict[str, bytes]:
    """Return the contents of files (name -> base64; None: no file). Raises ValueError for a file that is not base64."""
    contents: dict[str, bytes] = {}
    for name, content in files.items():
        try:
            contents |= {name: base64.b64decode(content)} if content is not None else {}
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"files: {name!r} is not base64 ({error})") from error
    return contents


async def run_with_files(
    run: Callable[[Work], Awaitable[CallResult]], call: Call, files: Mapping[str, bytes], fetch: Sequence[str]
) -> FilesResult:
    """Run a call with input files (name -> content) and return the files named in `fetch`.

    Names are paths relative to the working folder. Raises ValueError if a file cannot be written.
    """
    if not files and not fetch:
        return FilesResult(await run(call), {})
    session, service = f"staged-{uuid.uuid4().hex}", ServiceFiles(run)
    try:
        folder = (await service.run_script(session, "import os; print(os.getcwd(), end='')")).stdout
        await service.write_files(session, files)
    except SessionFileError as error:
        await run(SessionEnd(session))
        if error.outcome in INFRASTRUCTURE_FAILURES:
            return FilesResult(failure(error.outcome, str(error)), {})
        raise ValueError(f"files: {error}") from error
    try:
        result = await run(replace(call, session=session))
        if result.stderr.startswith(ENDED):
            message = "fetch_files: the program ended its interpreter, so its files are lost" if fetch else ""
            return FilesResult(replace(result, stderr=result.stderr.removeprefix(ENDED)), {}, message)
        return FilesResult(result, *await _fetch(service, session, folder, fetch))
    finally:
        await run(SessionEnd(session))


async def _fetch(service: ServiceFiles, session: str, folder: str, fetch: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return the requested files that exist (name -> base64), and a message about those that cannot be returned."""
    files: dict[str, str] = {}
    left, messages = FETCH_BYTES, []
    try:
        found = (await service.run_script(session, _FIND, names=[*fetch], folder=folder)).stdout if fetch else ""
    except SessionFileError as error:
        return {}, f"fetch_files: {error}"
    for name in [name for name in fetch if name in found.split("\0")]:
        try:
            content = await service.read_file(session, f"{folder}/{name}", left)
        except SessionFileError as error:
            messages.append(f"fetch_files: {[name]} left out, of at most {FETCH_BYTES} bytes ({str(error)[-100:]})")
            continue
        left -= len(content)
        files[name] = base64.b64encode(content).decode()
    return files, "; ".join(messages)
