"""Files and plots of a session, for LocalSandbox and SandboxClient. Each method runs cells in the session."""

import base64
import binascii
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.limits import MAX_STDIN_BYTES

# Bytes that one cell returns: as base64 they must fit into its output.
CHUNK_BYTES = 700_000
# Largest file that is read, and most plots and bytes of all plots together that `plots` returns.
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_PLOTS = 64
# Largest file that is written: it is sent as base64 on the standard input of a cell.
MAX_WRITTEN_BYTES = MAX_STDIN_BYTES // 4 * 3
STEP_TIMEOUT_S = 10.0

# These scripts run in the sandbox; their variables are separate from those of the session.
_WRITE = """
import base64, os, sys
os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
with open(name, "wb") as file:
    file.write(base64.b64decode(sys.stdin.read()))
"""
_READ = """
import base64
with open(name, "rb") as file:
    file.seek(start)
    content = base64.b64encode(file.read(size)).decode()
with open(1, "w", closefd=False) as out:
    out.write(content)
"""
_PLOT = """
import json, sys, tempfile
paths = []
if "matplotlib.pyplot" in sys.modules:
    pyplot = sys.modules["matplotlib.pyplot"]
    for number in pyplot.get_fignums():
        paths.append(tempfile.mkstemp(".png")[1])
        pyplot.figure(number).savefig(paths[-1], format="png")
    pyplot.close("all")
with open(1, "w", closefd=False) as out:
    json.dump(paths, out)
"""
_REMOVE = """
import os
for path in paths:
    os.remove(path)
"""


class SessionFileError(RuntimeError):
    """A file or plot of a session cannot be written or read. The message names the file.

    outcome: of the cell that failed; None if the cell succeeded but its output is invalid.
    """

    def __init__(self, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class SessionFiles(ABC):
    """Writes and reads files of a session, and reads its plots.

    Paths are relative to the working folder of the session's interpreter. The code of the session can forge what these methods
    read, because they run cells in it. They raise SessionFileError if a file cannot be written or read.
    """

    @abstractmethod
    async def run_call(self, call: Call) -> CallResult:
        """Run a call and return its result."""

    async def write_files(self, session: str, files: Mapping[str, bytes]) -> None:
        """Write files (path -> content) of at most 48 MiB in a session. Creates missing folders, and the session if necessary."""
        for name, content in files.items():
            if len(content) > MAX_WRITTEN_BYTES:
                raise SessionFileError(f"{name}: larger than {MAX_WRITTEN_BYTES} bytes", Outcome.INVALID_ARGUMENTS)
            await _run_script(self, session, _WRITE, base64.b64encode(content).decode(), name=name)

    async def read_files(self, session: str, paths: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of files of a session: path -> content, at most 64 MiB each."""
        return {path: b"".join([chunk async for chunk in self.read_chunks(session, path)]) for path in paths}

    async def read_chunks(self, session: str, path: str) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file of a session, at most 64 MiB, in one or more chunks of at most 700 kB."""
        size = 0
        while True:
            result = await _run_script(self, session, _READ, name=path, start=size, size=CHUNK_BYTES)
            try:
                chunk = base64.b64decode(result.stdout, validate=True)
            except (binascii.Error, ValueError) as error:
                raise SessionFileError(f"{path}: the session did not return its content ({error})") from error
            size += len(chunk)
            if size > MAX_FILE_BYTES:
                raise SessionFileError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
            yield chunk
            if len(chunk) < CHUNK_BYTES:
                return

    async def plots(self, session: str) -> list[bytes]:
        """Return the open matplotlib figures of a session as PNG files, and close them. No figures: an empty list.

        Raises SessionFileError for more than 64 figures, or for more than 64 MiB together.
        """
        result = await _run_script(self, session, _PLOT)
        try:
            paths = json.loads(result.stdout)
        except (ValueError, RecursionError):
            paths = None
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise SessionFileError("plots: the session did not return a list of files")
        if len(paths) > MAX_PLOTS:
            raise SessionFileError(f"plots: {len(paths)} figures; at most {MAX_PLOTS} are returned")
        plots, size = [], 0
        for path in paths:
            content = b""
            async for chunk in self.read_chunks(session, path):
                content += chunk
                size += len(chunk)
                if size > MAX_FILE_BYTES:
                    raise SessionFileError(f"plots: larger than {MAX_FILE_BYTES} bytes together")
            plots.append(content)
        await _run_script(self, session, _REMOVE, paths=paths)
        return plots


async def _run_script(sandbox: SessionFiles, session: str, script: str, stdin: str = "", **names: object) -> CallResult:
    code = f"exec({script!r}, {names!r})"
    result = await sandbox.run_call(Call(code, stdin, timeout_s=STEP_TIMEOUT_S, session=session))
    if result.outcome is not Outcome.OK:
        raise SessionFileError(f"{names.get('name', 'plots')}: {last_line(result)}", result.outcome)
    return result


def last_line(result: CallResult) -> str:
    """Return why a call failed: the last line of its stderr, else its outcome."""
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else str(result.outcome)
