"""Files beside a program: written into its folder before it runs, fetched from there afterwards.

The three are cells of one short session, so that the program itself runs as any other and the files stay in its box.
"""

import base64
import binascii
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from rstar_lab.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.sessions import ENDED
from rstar_lab.sandbox.wire import SessionEnd, Work

# All files of a call that are fetched: as base64 they fit what a cell may print.
FETCH_BYTES = 700_000
STEP_TIMEOUT_S = 10.0
FETCHED = TypeAdapter(tuple[dict[str, str], list[str]])

# Both run in the sandbox, in a namespace of their own.
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
for thing in gc.get_objects():  # what the program did not close
    with contextlib.suppress(Exception):
        if isinstance(thing, io.IOBase):
            thing.flush()
found, large = {}, []
for name in names:
    path = os.path.join(folder, name)
    if os.path.isfile(path):
        with open(path, "rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            large.append(name)
        else:
            most -= len(content)
            found[name] = base64.b64encode(content).decode()
with open(1, "w", closefd=False) as out:
    json.dump([found, large], out)
"""


@dataclass(frozen=True, slots=True)
class FilesResult:
    """What came of a program with files. files: name -> base64, of those fetched; message: why others are not there."""

    result: CallResult
    files: dict[str, str]
    message: str = ""


def check_files(files: Mapping[str, str | None]) -> None:
    """Raises ValueError for a file that is no base64."""
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
    """Run a call among its files (name -> base64, None: no file); paths are relative to its folder.

    Raises ValueError where a file cannot be written there.
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
            message = "fetch_files: the program ended its interpreter, and its files went with it" if fetch else ""
            return FilesResult(replace(result, stderr=result.stderr.removeprefix(ENDED)), {}, message)
        if not fetch:
            return FilesResult(result, {})
        fetched = await step(READ_FILES, names=list(fetch), folder=written.stdout, most=FETCH_BYTES)
        return FilesResult(result, *contents(fetched, fetch))
    finally:
        await run(SessionEnd(session))


def contents(fetched: CallResult, names: Sequence[str]) -> tuple[dict[str, str], str]:
    """The files, and what is wrong with them. The program shared its interpreter with what fetched them: nothing is believed."""
    try:
        found, large = FETCHED.validate_json(fetched.stdout)
        files = {name: found[name] for name in names if name in found}
        check_files(files)
    except ValueError:
        return {}, reason("fetch_files", fetched)
    left_out = [name for name in names if name in large]
    return files, f"fetch_files: {left_out} left out: more than {FETCH_BYTES} bytes together" if left_out else ""


def reason(field: str, step: CallResult) -> str:
    lines = step.stderr.strip().splitlines()
    return f"{field}: {lines[-1] if lines else step.outcome}"
