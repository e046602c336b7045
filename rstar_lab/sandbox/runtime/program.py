"""The forked process that becomes the user's program: compile, run, report, exit.

This code runs in the same process as the user's code, so its results are untrusted. It reports the value of the last
expression and whether the program raised. The supervisor takes everything else from the kernel.
"""

import _thread
import ast
import atexit
import builtins
import contextlib
import gc
import linecache
import mmap
import os
import random
import re
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable

from rstar_lab.sandbox.runtime import kernel

FILENAME = "main.py"
REPORT_BYTES = 2 * 1024 * 1024
MARK_BYTES = 64
_HEAD = struct.Struct("=BBI")
_SECRET_BYTES = 16
_CHALLENGE = slice(REPORT_BYTES - 2 * _SECRET_BYTES, REPORT_BYTES - _SECRET_BYTES)
_ANSWER = slice(REPORT_BYTES - _SECRET_BYTES, REPORT_BYTES)
# Descriptors of a copy of a session: channel, cell, stdin, stdout, stderr, report.
FDS_PER_COPY = 6
COPIES_PER_MESSAGE = 16
_SIGINT = int(signal.SIGINT)
# A call of print whose parentheses are nested at most twice.
_PRINT = re.compile(r"print\((?:[^()]++|\((?:[^()]++|\([^()]*\))*\))*\)")
NOTHING, DONE, RAISED, INVALID, NO_MEMORY = range(5)


class Report:
    """Shared memory in which the program stores how it ended and its value.

    fd: file in memory to map, for a copy of a session; -1 for anonymous memory.
    """

    def __init__(self, fd: int = -1) -> None:
        self._map = mmap.mmap(fd, REPORT_BYTES)
        self.owner = os.getpid()

    def clear(self) -> None:
        """Free the pages, so that nothing of the previous program remains."""
        try:
            self._map.madvise(mmap.MADV_REMOVE)
        except OSError:  # gVisor, whose containers run one call or session
            self.write(NOTHING, None)

    def write(self, ending: int, value: bytes | None) -> None:
        """Store how the process `owner` ended and its value. Has no effect in a process that it has forked."""
        if os.getpid() != self.owner:
            return
        body = value or b""
        self._map[: _HEAD.size] = _HEAD.pack(ending, value is not None, len(body))
        self._map[_HEAD.size : _HEAD.size + len(body)] = body

    def read(self, max_bytes: int) -> tuple[int, memoryview | None]:
        """Return how the program ended and its value, which is valid until `clear`. Accepts any content of the memory."""
        ending, has_value, size = _HEAD.unpack_from(self._map)
        value = (
            memoryview(self._map)[_HEAD.size : _HEAD.size + min(size, max_bytes + MARK_BYTES)] if has_value else None
        )
        return (ending if ending <= NO_MEMORY else NOTHING), value

    def challenge(self) -> bytes:
        """Store a new secret, which the interpreter returns with `answer` at the end of the next cell."""
        secret = os.urandom(_SECRET_BYTES)
        self._map[_CHALLENGE] = secret
        return secret

    def answer(self) -> None:
        """Mark the report as that of the current cell, by returning the secret of the cell."""
        self._map[_ANSWER] = self._map[_CHALLENGE]

    def answered(self, secret: bytes) -> bool:
        """Return whether the report is that of the cell with this secret."""
        return self._map[_ANSWER] == secret

    def hide_from_children(self) -> None:
        """Unmap the memory in processes that the program forks."""
        self._map.madvise(mmap.MADV_DONTFORK)


def reseed(seed: int | None) -> None:
    """Seed the random generators; None draws fresh state."""
    random.seed(seed)
    if "sympy.core.random" in sys.modules:
        sys.modules["sympy.core.random"].seed(seed)
    if "numpy.random" in sys.modules:
        # With None, numpy gathers entropy itself, which takes several times as long as seeding from an integer.
        sys.modules["numpy.random"].seed((random.getrandbits(32) if seed is None else seed) % 2**32)


def open_streams() -> None:
    """Open text streams over descriptors 0, 1 and 2 that accept any byte and are flushed at every line.

    Called in the zygote; the files behind the descriptors change with every program.
    """
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = open(1, "w", 1, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))


def warm_up(code: str) -> None:
    """Run code once in the zygote to fill caches, do lazy imports and specialise bytecode for all programs."""
    out, err = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        for text in (code, "1 / 0", "x = ("):
            run_cell(text.encode(), new_main().__dict__, 1000, lambda *_: None)
    sys.stdout, sys.stderr = out, err
    linecache.clearcache()


def new_main() -> types.ModuleType:
    """Install an empty module `__main__` and return it."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = main
    return main


def ends_in_print(source: str) -> bool:
    """Return whether the last statement is certainly a call of print. Its value is None, so the code needs no syntax tree."""
    last = source.rstrip().rpartition("\n")[2]
    return _PRINT.fullmatch(last) is not None and '"""' not in source and "'''" not in source


def compile_cell(code: bytes, filename: str) -> tuple[types.CodeType, types.CodeType | None]:
    """Compile code into its statements and its last expression (None if there is none). Raises what `compile` raises."""
    # A byte-order mark, which editors write at the start of a file, is not part of the code.
    source = code.decode("utf-8", "surrogatepass").removeprefix("\ufeff")
    linecache.cache[filename] = (lambda: source,)
    if ends_in_print(source):
        return compile(source, filename, "exec", dont_inherit=True), None
    tree = ast.parse(source, filename)
    last = None
    if tree.body and isinstance(ending := tree.body[-1], ast.Expr):
        tree.body.pop()
        last = ast.Expression(ending.value)
    body = compile(tree, filename, "exec", dont_inherit=True)
    # `from __future__` imports of the statements apply to the expression too.
    flags = body.co_flags & 0x1FE0000
    return body, compile(last, filename, "eval", flags, dont_inherit=True) if last else None


def print_exception(error: BaseException) -> None:
    """Print an exception as the interpreter does, without the frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = f"{type(error).__name__}\n"
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
        sys.stderr.write(text)
        sys.stderr.flush()
    except BaseException:
        # The program may have closed or replaced sys.stderr.
        with contextlib.suppress(OSError):
            os.write(2, text.encode("utf-8", "backslashreplace"))


def run_cell(
    code: bytes, namespace: dict, max_bytes: int, report: Callable[[int, bytes | None], None], filename: str = FILENAME
) -> None:
    """Run code; report how it ended (DONE, RAISED, ...) and the repr of its last expression, cut to `max_bytes`.

    Reports before it prints an exception or leaves: what then runs can be code of the program (`__str__`, sys.stderr, exit handlers),
    which could end the process with status 0.
    """
    try:
        body, last = compile_cell(code, filename)
    except BaseException as error:
        report(INVALID, None)
        error.__traceback__ = None
        print_exception(error)
        return
    text = None
    try:
        exec(body, namespace)
        value = None if last is None else eval(last, namespace)
        if value is not None:
            namespace["_"] = value
            text = repr(value).encode("utf-8", "backslashreplace")
            if len(text) > max_bytes:
                text = text[:max_bytes] + b"... [value cut at %d bytes]" % max_bytes
        report(DONE, text)
    except SystemExit as leaving:
        failed = leaving.code is not None and leaving.code != 0
        report(RAISED if failed else DONE, None)
        if failed and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
    except BaseException as error:
        report(NO_MEMORY if isinstance(error, MemoryError) else RAISED, None)
        print_exception(error)


def finish() -> None:
    """Do what the interpreter does at exit: join threads, run exit handlers, flush."""
    try:
        if _thread._count() or threading._threading_atexits:  # type: ignore[attr-defined]
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:
        print_exception(error)
    flush()


def flush() -> None:
    """Flush the current and the original output streams."""
    for stream, original in ((sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)):
        for file in (stream,) if stream is original else (stream, original):
            try:
                file.flush()  # type: ignore[union-attr]
            except BaseException:
                pass


def reopen(stdin: int, stdout: int, stderr: int) -> list[int]:
    """Open the standard streams, files in memory, again: the program must not share offset and flags with its supervisor."""
    both = os.O_RDWR | os.O_APPEND
    files = ((stdin, os.O_RDONLY), (stdout, both), (stderr, both))
    return [os.open(f"/proc/self/fd/{fd}", flags) for fd, flags in files]


def copy_working_folder() -> None:
    """Give a copy of a session its own working folder, with the files of the original."""
    original = os.getcwd()
    folder = f"{os.path.dirname(original)}/fork-{os.getpid()}"
    try:
        os.mkdir(folder, 0o700)
    except OSError:
        return  # outside of the writable folders: there is nothing to copy
    copy_files(original, folder)
    os.chdir(folder)


def copy_files(source: str, target: str) -> None:
    """Copy files, folders and symbolic links. Not with shutil.copytree, which reads extended attributes."""
    for entry in os.scandir(source):
        copy = f"{target}/{entry.name}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), copy)
        elif entry.is_dir():
            os.mkdir(copy)
            copy_files(entry.path, copy)
        elif entry.is_file():
            with open(entry.path, "rb") as reading, open(copy, "wb") as writing:
                while data := reading.read(1 << 20):
                    writing.write(data)
            os.chmod(copy, entry.stat().st_mode & 0o777)


def become_copy(channel: int, cell: int, fds: list[int]) -> Report:
    """Attach the descriptors of a copy to this process, a fork of a session's interpreter; return the report of the copy."""
    theirs, cell_file, *streams, report_file = fds
    for target, fd in enumerate(reopen(*streams)):
        os.dup2(fd, target)
        os.close(fd)
    os.dup2(theirs, channel)
    os.dup2(cell_file, cell)
    report = Report(report_file)
    report.hide_from_children()
    return report


def fork_copies(channel: int, cell: int, fds: list[int]) -> Report | None:
    """Fork the interpreter of a session once per FDS_PER_COPY descriptors. Returns its report in a copy, None in the original.

    A child that exits forks the copies. The namespace's init then reaps them, so that the user's code does not see them as
    children.
    """
    try:
        pid = os.fork()
    except OSError:
        pid = -1  # a limit is reached: the supervisor notices the closed descriptors
    if pid:
        for fd in fds:
            os.close(fd)
        if pid > 0:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        return None
    for first in range(0, len(fds), FDS_PER_COPY):
        try:
            child = os.fork()
        except OSError:
            break
        if child == 0:
            report = become_copy(channel, cell, fds[first : first + FDS_PER_COPY])
            for fd in fds:
                os.close(fd)
            copy_working_folder()
            reseed(None)
            return report
    os._exit(0)


def run_session(channel: int, cell: int, max_bytes: int, report: Report) -> None:
    """Run the interpreter of a session: run a cell, or fork, for each byte on the channel. Does not return."""
    report.owner = os.getpid()
    report.hide_from_children()
    sock = socket.socket(fileno=channel)
    # Keeps the original's report alive in a copy, where it is not mapped: freeing it would unmap what is now at its addresses.
    reports = [report]
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.enable()
        namespace = sys.modules["__main__"].__dict__
        number = 0
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(sock, 1, FDS_PER_COPY * COPIES_PER_MESSAGE)
                if message == b"f":
                    copy = fork_copies(channel, cell, fds)
                    if copy is not None:
                        report = copy
                        reports.append(copy)
                        os.write(channel, b"r")
                    continue
                if message != b".":
                    return
                number += 1
                os.lseek(0, 0, os.SEEK_SET)
                seed, _, code = os.pread(cell, os.fstat(cell).st_size, 0).partition(b"\n")
                sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
                if seed:
                    reseed(int(seed))
                run_cell(code, namespace, max_bytes, report.write, f"cell {number}")
                flush()
            except KeyboardInterrupt:
                report.write(RAISED, None)
            if os.getpid() != report.owner:
                return
            report.answer()
            os.write(channel, b".")
    finally:
        os._exit(0)


# In a new process, multiprocessing sets the start method before it loads the program, and refuses to set it again.
_RESET_START_METHOD = """\
import multiprocessing
multiprocessing.context._default_context._actual_context = None
exec(compile({code!r}, {name!r}, "exec"))
"""


def save_main(code: bytes, path: str) -> None:
    """Write the program to a file, from which `spawn` and `forkserver` of multiprocessing load it in new processes.

    The file is beside the working folder, which is empty at first. Without a writable folder the program runs all the same.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        if b"set_start_method" in code:
            code = _RESET_START_METHOD.format(code=code, name=FILENAME).encode()
        os.write(fd, code)
        os.close(fd)
        sys.modules["__main__"].__file__ = path
    except OSError:
        pass  # not `suppress`, whose methods would be more pages that every program copies


def run_program(code: bytes, path: str, max_bytes: int, report: Report) -> None:
    """Run the user's program in this process, report its value and exit. Does not return. path: of the file with the program."""
    report.owner = os.getpid()
    try:
        kernel.set_signal_handler(_SIGINT, signal.default_int_handler)
        gc.enable()
        save_main(code, path)
        run_cell(code, sys.modules["__main__"].__dict__, max_bytes, report.write)
        finish()
        os._exit(0)
    finally:
        os._exit(1)
