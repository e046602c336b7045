"""Runs a program with input files, and returns files that it wrote.

Writing the files, the program and reading files are three cells of one short session, so that the program runs like any
other and its files never leave the sandbox's file system.
"""

import base64
import binascii
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.session_files import STEP_TIMEOUT_S, last_line
from rstar_lab.sandbox.sessions import ENDED
from rstar_lab.sandbox.wire import SessionEnd, Work

# Bytes of all files that one call returns: as base64 they must fit into a cell's output.
FETCH_BYTES = 700_000
FETCHED = TypeAdapter(tuple[dict[str, str], list[str], dict[str, str]])

# Both scripts run in the sandbox; their variables are separate from those of the program.
WRITE_FILES = """
import base64, os
for name, content in files.items():
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "wb") as file:
        file.write(base64.b64decode(content))
print(os.getcwd(), end="")
"""
READ_FILES = """
import base64, contextlib, gc, io, json, os
for item in gc.get_objects():  # flush the files that the program did not close
    with contextlib.suppress(Exception):
        if isinstance(item, io.IOBase):
            item.flush()
contents, large, unreadable = {}, [], {}
for name in names:
    try:
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        with open(path, "rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        unreadable[name] = type(error).__name__
        continue
    if len(content) > max_bytes:
        large.append(name)
    else:
        max_bytes -= len(content)
        contents[name] = base64.b64encode(content).decode()
with open(1, "w", closefd=False) as out:
    json.dump([contents, large, unreadable], out)
"""


@dataclass(frozen=True, slots=True)
class FilesResult:
    """The result of a program with files. files: name -> base64; message: which requested files are missing, and why."""

    result: CallResult
    files: dict[str, str]
    message: str = ""


def check_files(files: Mapping[str, str | None]) -> None:
    """Raise ValueError for a file that is not base64."""
    for name, content in files.items():
        try:
            base64.b64decode(content or "")
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"files: {name!r} is not base64 ({error})") from error


async def run_with_files(
    run: Callable[[Work], Awaitable[CallResult]],
    call: Call,
    files: Mapping[str, str | None],
    fetch: Sequence[str],
) -> FilesResult:
    """Run a call with input files (name -> base64; None: no file) and return the files named in `fetch`.

    Names are paths relative to the working folder. Raises ValueError if a file cannot be written.
    """
    if not files and not fetch:
        return FilesResult(await run(call), {})
    session = f"staged-{uuid.uuid4().hex}"

    async def step(script: str, **names: object) -> CallResult:
        code = f"exec({script!r}, {names!r})"
        return await run(Call(code, timeout_s=STEP_TIMEOUT_S, memory_mb=call.memory_mb, session=session))

    try:
        written = await step(
            WRITE_FILES, files={name: content for name, content in files.items() if content is not None}
        )
        if written.outcome in INFRASTRUCTURE_FAILURES:
            return FilesResult(written, {})
        if written.outcome is not Outcome.OK:
            raise ValueError(reason("files", written))
        result = await run(replace(call, session=session))
        if result.stderr.startswith(ENDED):
            message = "fetch_files: the program ended its interpreter, so its files are lost" if fetch else ""
            return FilesResult(replace(result, stderr=result.stderr.removeprefix(ENDED)), {}, message)
        if not fetch:
            return FilesResult(result, {})
        fetched = await step(READ_FILES, names=list(fetch), folder=written.stdout, max_bytes=FETCH_BYTES)
        return FilesResult(result, *contents(fetched, fetch))
    finally:
        await run(SessionEnd(session))


def contents(fetched: CallResult, names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Validate the output of READ_FILES; return the files and a message about missing ones.

    The output is untrusted, because the script ran in the program's interpreter.
    """
    try:
        fetched_files, large, unreadable = FETCHED.validate_json(fetched.stdout)
        files = {name: fetched_files[name] for name in names if name in fetched_files}
        check_files(files)
    except ValueError:
        return {}, reason("fetch_files", fetched)
    messages = []
    if left_out := [name for name in names if name in large]:
        messages.append(f"fetch_files: {left_out} left out: more than {FETCH_BYTES} bytes together")
    if failed := [name for name in names if name in unreadable]:
        messages.append(f"fetch_files: {failed} cannot be read ({unreadable[failed[0]][:100]})")
    return files, "; ".join(messages)


def reason(field: str, step: CallResult) -> str:
    """Return an error message for a step that failed."""
    return f"{field}: {last_line(step)}"
