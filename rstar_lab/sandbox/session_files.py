"""Files of a session, for LocalSandbox and SandboxClient. Each method runs cells in the session."""

import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.limits import MAX_STDIN_BYTES

# Bytes that one cell returns: as base64 they must fit into its output.
CHUNK_BYTES = 700_000
# Largest file that is read.
MAX_FILE_BYTES = 64 * 1024 * 1024
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


class SessionFileError(RuntimeError):
    """A file of a session cannot be written or read. The message names the file.

    outcome: of the cell that failed; None if the cell succeeded but its output is invalid.
    """

    def __init__(self, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class SessionFiles(ABC):
    """Writes and reads files of a session.

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
            await self.run_script(session, _WRITE, base64.b64encode(content).decode(), name=name)

    async def read_files(self, session: str, paths: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of files of a session: path -> content, at most 64 MiB each."""
        return {path: await self.read_file(session, path) for path in paths}

    async def read_file(self, session: str, path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return the content of a file of a session, which is read in chunks of 700 kB."""
        content = bytearray()
        while True:
            result = await self.run_script(session, _READ, name=path, start=len(content), size=CHUNK_BYTES)
            try:
                chunk = base64.b64decode(result.stdout, validate=True)
            except (binascii.Error, ValueError) as error:
                raise SessionFileError(f"{path}: the session did not return its content ({error})") from error
            content += chunk
            if len(content) > max_bytes:
                raise SessionFileError(f"{path}: larger than {max_bytes} bytes")
            if len(chunk) < CHUNK_BYTES:
                return bytes(content)

    async def run_script(self, session: str, script: str, stdin: str = "", **names: object) -> CallResult:
        """Run a script as a cell of the session, with variables of its own. Raises SessionFileError if it fails."""
        code = f"exec({script!r}, {names!r})"
        result = await self.run_call(Call(code, stdin, timeout_s=STEP_TIMEOUT_S, session=session))
        if result.outcome is not Outcome.OK:
            # The reason is the last line of its stderr.
            reason = [str(result.outcome), *result.stderr.strip().splitlines()][-1]
            raise SessionFileError(f"{names.get('name', 'files')}: {reason}", result.outcome)
        return result
