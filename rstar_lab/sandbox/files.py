"""Runs a program with input files, and returns files that it wrote: SandboxFusion's `files` and `fetch_files`.

Writing the files, the program and reading files are cells of one short session, so that the program runs like any other and its files
never leave the sandbox's file system. The program can forge what is read, because it ran in the same interpreter.
"""

import base64
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter, ValidationError

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.sandbox.call import Call, CallResult, failure
from rstar_lab.sandbox.sessions import ENDED
from rstar_lab.sandbox.wire import SessionEnd, Work

# Bytes of all files that one call returns: as base64 they must fit into the output of a cell.
FETCH_BYTES = 700_000
STEP_TIMEOUT_S = 10.0

# These scripts run in the sandbox; their variables are separate from those of the session.
_WRITE = """
import base64, os, sys
os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
with open(name, "wb") as file:
    file.write(base64.b64decode(sys.stdin.read()))
"""
# Flushes the files that the program did not close, and prints (name -> base64, name -> why it cannot be read).
_READ = """
import base64, contextlib, gc, io, json, os
for item in gc.get_objects():
    with contextlib.suppress(Exception):
        if isinstance(item, io.IOBase):
            item.flush()
files, errors = {}, {}
for name in names:
    try:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                content = file.read(left + 1)
            if len(content) > left:
                raise ValueError(f"more than {left} bytes")
            files[name] = base64.b64encode(content).decode()
            left -= len(content)
    except Exception as error:
        errors[name] = repr(error)
with open(1, "w", closefd=False) as out:
    json.dump([files, errors], out)
"""
_FOUND: TypeAdapter[tuple[dict[str, str], dict[str, str]]] = TypeAdapter(tuple[dict[str, str], dict[str, str]])
Run = Callable[[Work], Awaitable[CallResult]]


class FileError(RuntimeError):
    """Files cannot be written or read. outcome: of the cell that failed."""

    def __init__(self, message: str, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class FilesResult:
    """The result of a program with files. files: name -> base64; message: which requested files are missing, and why."""

    result: CallResult
    files: dict[str, str]
    message: str = ""


async def run_with_files(run: Run, call: Call, files: Mapping[str, str | None], fetch: Sequence[str]) -> FilesResult:
    """Run a call with input files (name -> base64; None: no file) and return the files named in `fetch`.

    Names are paths relative to the working folder. run: runs work on the service. Raises ValueError if a file cannot be written.
    """
    if not files and not fetch:
        return FilesResult(await run(call), {})
    session = f"staged-{uuid.uuid4().hex}"
    try:
        folder = await _run_script(run, session, "import os; print(os.getcwd(), end='')")
        for name, content in files.items():
            if content is not None:
                await _run_script(run, session, _WRITE, content, name=name)
        result = await run(replace(call, session=session))
        if result.stderr.startswith(ENDED):
            message = "fetch_files: the program ended its interpreter, so its files are lost" if fetch else ""
            return FilesResult(replace(result, stderr=result.stderr.removeprefix(ENDED)), {}, message)
        return FilesResult(result, *await _fetch(run, session, folder, fetch))
    except FileError as error:
        if error.outcome in INFRASTRUCTURE_FAILURES:
            return FilesResult(failure(error.outcome, str(error)), {})
        raise ValueError(f"files: {error}") from error
    finally:
        await run(SessionEnd(session))


async def _run_script(run: Run, session: str, script: str, stdin: str = "", **names: object) -> str:
    """Run a script as a cell of the session, with variables of its own, and return its output. Raises FileError if it fails."""
    result = await run(Call(f"exec({script!r}, {names!r})", stdin, timeout_s=STEP_TIMEOUT_S, session=session))
    if result.outcome is not Outcome.OK:
        # The reason is the last line of its stderr.
        reason = [str(result.outcome), *result.stderr.strip().splitlines()][-1]
        raise FileError(f"{names.get('name', 'files')!r}: {reason}", result.outcome)
    return result.stdout


async def _fetch(run: Run, session: str, folder: str, fetch: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return the requested files that exist (name -> base64), and a message about those that cannot be returned."""
    if not fetch:
        return {}, ""
    try:
        text = await _run_script(run, session, _READ, names=[*fetch], folder=folder, left=FETCH_BYTES)
        found, errors = _FOUND.validate_json(text)
        for content in found.values():
            base64.b64decode(content, validate=True)
    except (FileError, ValueError) as error:
        reason = "the session did not return them" if isinstance(error, ValidationError) else error
        return {}, f"fetch_files: {reason}"
    messages = [f"fetch_files: {[name]} left out ({errors[name][-100:]})" for name in fetch if name in errors]
    return {name: found[name] for name in fetch if name in found}, "; ".join(messages)
