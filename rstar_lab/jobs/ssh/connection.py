"""Reach a host through the user's OpenSSH client. No password is asked for, stored or logged.

All commands to one host share one connection (ControlMaster), which closes a minute after the last use.
"""

import base64
import contextlib
import json
import os
import re
import resource
import shlex
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import Ssh
from rstar_lab.untrusted.files import DataError, check_type, parse_json

CONNECT_S, START_S = 15, 60.0
# Without an answer for ALIVE_S * ALIVE_COUNT seconds the connection counts as lost.
ALIVE_S, ALIVE_COUNT = 5, 3
READY = "rstar-lab-agent"
T = TypeVar("T")
MAX_ANSWER_BYTES = 512 * 2**20
MAX_OUTPUT_BYTES = 64 * 2**20  # of a script, and of the errors of ssh
# Hosts, users and lists of jump hosts, also as ssh:// and with IPv6 addresses. No part begins with a hyphen.
ADDRESS = re.compile(r"(?!.*[@,/:\[]-)[A-Za-z0-9_[][A-Za-z0-9._@:,/%\[\]+-]*")


class ConnectionLost(UserError):
    """The host cannot be reached now. The job continues; the same call works again when the host answers."""


class Refused(UserError):
    """The host could be reached, and what was asked for failed there."""


class Connection:
    """Runs commands on one host."""

    def __init__(self, settings: Ssh):
        """Raises UserError if the settings name no host, or one that ssh could read as an option."""
        if not settings.host:
            raise UserError("ssh.host is missing: set it in the profile, or with --host")
        for key in ("host", "user", "jump"):
            value = getattr(settings, key)
            if value and not ADDRESS.fullmatch(value):
                raise UserError(f"ssh.{key} {value[:80]!r}: not the name of a host or user")
        self.settings = settings
        self.host = f"{settings.user}@{settings.host}" if settings.user else settings.host

    def options(self) -> list[str]:
        """Return the options of ssh that reach this host, also for rsync."""
        settings = self.settings
        options = {
            "BatchMode": "yes", "ConnectTimeout": CONNECT_S, "ServerAliveInterval": ALIVE_S,
            "ServerAliveCountMax": ALIVE_COUNT, "ControlMaster": "auto", "ControlPath": _control_folder() / "%C",
            "ControlPersist": 60,
        }  # fmt: skip
        parts = ["-F", settings.config] if settings.config else []
        parts += [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
        parts += ["-o", f"Port={settings.port}"] if settings.port else []
        return [*parts, "-J", settings.jump] if settings.jump else parts

    def run(self, script: str, *, content: bytes = b"", timeout_s: float = 60) -> str:
        """Run a shell script on the host with `content` as its input; return its output.

        Raises ConnectionLost if the host cannot be reached, UserError with the output if the script fails.
        """
        # A file, not a pipe: the process that keeps the shared connection inherits stderr, so a pipe would never end.
        with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as output:
            command = ["ssh", *self.options(), "--", self.host, shell_command(script)]
            try:
                with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=errors) as process:
                    _limit_output(process)
                    try:
                        process.communicate(content, timeout_s)
                    finally:
                        process.kill()  # does nothing if it has ended
            except FileNotFoundError:
                raise UserError("ssh is not installed here: install the OpenSSH client") from None
            except subprocess.TimeoutExpired:
                raise ConnectionLost(f"{self.host} did not answer within {timeout_s:g} s") from None
            message = _last_lines(errors)
            output.seek(0)
            text = output.read().decode(errors="replace")
        if process.returncode == 255:  # ssh itself failed
            route = f"{self.host} through {self.settings.jump}" if self.settings.jump else self.host
            raise ConnectionLost(f"cannot reach {route}: {message or 'the connection was closed'}")
        if process.returncode == -signal.SIGXFSZ:
            raise UserError(f"{self.host}: its output is longer than {MAX_OUTPUT_BYTES} bytes")
        if process.returncode:
            raise Refused(f"{self.host}: {message or text.strip()[-500:]}")
        return text

    def close(self) -> None:
        """Close the shared connection."""
        command = ["ssh", *self.options(), "-O", "exit", "--", self.host]
        with contextlib.suppress(subprocess.TimeoutExpired):  # it closes itself a minute after its last use
            subprocess.run(command, capture_output=True, timeout=CONNECT_S)


class Agent:
    """A running `rstar_lab.jobs.ssh.agent` on the host. Starts at the first request, and again after a lost connection."""

    def __init__(self, connection: Connection, code: str, runs: str):
        """code: folder with the package on the host, from which the agent starts. runs: folder of runs on the host."""
        self.connection, self.code, self.runs = connection, code, runs
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._errors: IO[bytes] | None = None
        self._waits = False  # a request was sent whose answer was not read

    def request(self, operation: str, *, timeout_s: float = 60, retry_s: float = 0, **arguments: Any) -> Any:
        """Return the result of one operation of the agent.

        A lost connection is opened again: the first time at once, then repeatedly until `retry_s` seconds have passed.
        Raises ConnectionLost if that does not help, UserError with the message of the host if the operation fails.
        """
        deadline, attempt = time.monotonic() + retry_s, 0
        with self._lock:
            while True:
                was_running = self._process is not None
                try:
                    return self._request({"operation": operation, "arguments": arguments}, timeout_s)
                except ConnectionLost:
                    self._end()
                    attempt += 1
                    if not (was_running and attempt == 1) and time.monotonic() > deadline:
                        raise
                    time.sleep(min(0.2 * attempt, 2))

    def close(self) -> None:
        with self._lock:
            self._end()

    def _request(self, request: dict[str, Any], timeout_s: float) -> Any:
        if self._waits:
            self._end()  # otherwise this request would read the answer to the one before
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._waits = True
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._lost() from None
        answer = self._read(timeout_s)
        self._waits = False
        if "error" in answer:
            raise Refused(f"{self.connection.host}: {answer['error']}")
        return answer.get("value")

    def _start(self) -> None:
        settings = self.connection.settings
        lines = [*settings.setup, f"cd {shlex.quote(self.code)}"]
        lines.append(f"exec {shlex.quote(settings.python)} -m rstar_lab.jobs.ssh.agent {shlex.quote(self.runs)}")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by _end
        self._process = subprocess.Popen(
            ["ssh", *self.connection.options(), "--", self.connection.host, shell_command("\n".join(lines))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
        )  # fmt: skip
        _limit_output(self._process)
        if self._read(START_S).get("ready") != READY:
            raise self._lost()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        timer = threading.Timer(timeout_s, self._process.kill)  # a host can send lines for ever
        timer.start()
        try:
            while line := self._process.stdout.readline(MAX_ANSWER_BYTES):
                if len(line) == MAX_ANSWER_BYTES:
                    self._end()
                    raise UserError(f"{self.connection.host}: an answer is longer than {MAX_ANSWER_BYTES} bytes")
                with contextlib.suppress(DataError):  # login scripts may print before the agent starts
                    return parse_json(line, self.connection.host, dict)
        finally:
            timer.cancel()
        if time.monotonic() >= deadline:
            raise ConnectionLost(f"{self.connection.host} did not answer within {timeout_s:g} s")
        raise self._lost()

    def _lost(self) -> UserError:
        assert self._process is not None and self._errors is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        message, code = _last_lines(self._errors), self._process.poll()
        if code not in (None, 255, 0) and message:  # the agent failed, not the connection
            self._end()
            return UserError(f"{self.connection.host}: the agent of rstar_lab cannot start: {message}")
        return ConnectionLost(f"connection to {self.connection.host} lost: {message or 'closed by the host'}")

    def _end(self) -> None:
        process, self._process, self._waits = self._process, None, False
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, self._errors):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()


# One agent per host, code and runs folder; all jobs of a board use it.
_agents: dict[tuple[str, str, str], Agent] = {}


def agent_of(handle: Mapping[str, Any]) -> Agent:
    """Return this process's agent for the handle of a job: its `ssh` settings, and the folders `code` and `runs` on the host."""
    settings = Ssh(**handle["ssh"])
    key = (settings.model_dump_json(), handle["code"], handle["runs"])
    if key not in _agents:
        _agents[key] = Agent(Connection(settings), handle["code"], handle["runs"])
    return _agents[key]


def ask(agent: Agent, operation: str, kind: type[T], **options: Any) -> T:
    """Return the result of an operation of the agent as a type. The host may be in the hands of somebody else.

    options: of `Agent.request`. Raises as `Agent.request`, and DataError for a result of another type.
    """
    return check_type(agent.request(operation, **options), kind, unreadable(agent))


def unreadable(agent: Agent) -> str:
    """Return the beginning of the error for an answer of another form."""
    return f"{agent.connection.host}: its answer cannot be read; check the version of rstar_lab there"


def shell_command(script: str) -> str:
    """Return the command line that runs a script with sh, whatever the user's login shell is.

    csh rejects line breaks in quotes and fish reads backslashes in them, so the script is sent as base64.
    """
    encoded = base64.b64encode(f"set -e\numask 077\n{script}".encode()).decode()
    return f"exec sh -c 'eval \"$(echo {encoded} | base64 -d)\"'"


def _limit_output(process: subprocess.Popen[bytes]) -> None:
    """End a process that writes more than MAX_OUTPUT_BYTES into a file: the host decides how much ssh writes."""
    with contextlib.suppress(OSError):  # it has ended
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES))


def _control_folder() -> Path:
    """Return the folder of the shared connections' sockets. Its path is short: a socket's name has at most 104 characters."""
    folder = Path(tempfile.gettempdir()) / f"rstar-lab-ssh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"{folder} is a link, belongs to another user or is open to others: delete it")
    return folder


def _last_lines(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return " ".join(line.strip() for line in lines[-3:])[-500:]
