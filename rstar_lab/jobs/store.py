"""A job's folder, RUNS_DIR/.jobs/ID: the submitted job (job.json), its log (log.txt) and its exit code (exit.json)."""

import contextlib
import hashlib
import hmac
import json
import os
import pwd
import re
import secrets
import stat
import tempfile
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rstar_lab.common.errors import DISK_FULL, UserError, os_error_message
from rstar_lab.runs.files import parse_json, read_text

SECRETS_FILE = "secrets.json"
REQUEUE_FILE = "requeue"  # written by the batch script when the allocation ends before the job

# Time for a stopped run to finish what it writes. Checkpoints are atomic, so a kill loses only the work since the last one.
GRACE_S = 10.0

# Names of runs and jobs become names of folders, Slurm jobs and Kubernetes resources.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,149}")
# With these keys a job is reached: values that another user wrote would send commands or tokens elsewhere.
CONNECTION_KEYS = {"ssh", "address", "token_path", "context"}
NOBODY = 65534


def seal(content: dict[str, Any]) -> str:
    """Return the HMAC-SHA256 of JSON content under this user's key. Raises UserError if the key cannot be read or made."""
    text = json.dumps(content, sort_keys=True)
    return hmac.new(_key(), text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def is_sealed(content: dict[str, Any], value: object) -> bool:
    """Whether `value` is the seal that this user's key gives to the content. False if the key cannot be read."""
    try:
        return isinstance(value, str) and hmac.compare_digest(seal(content).encode(), value.encode())
    except UserError:
        return False


def key_file() -> Path:
    """Return the path of this user's key."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "rstar-lab" / "key"


def _key() -> bytes:
    path = key_file()
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = path.with_name(f".key.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            try:
                os.link(temporary, path)  # does not replace the key that another process has made meanwhile
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        key = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot store the key that marks your jobs: {os_error_message(error, path)}") from error
    if len(key) < 32:
        raise UserError(
            f"{path}: damaged; delete it. Jobs over ssh that you submitted before must then be stopped on their host"
        )
    return key


class ForeignJob(UserError):
    """The job belongs to another user. Its files are not read."""


def check_name(name: str, what: str) -> str:
    """Return a name of a run or job. Raises UserError if it is too long or has a character that is not in NAME."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"{what} {name[:80]!r}: use at most 150 letters, digits, dots, underscores and hyphens, and begin with a letter or "
            "digit"
        )
    return name


@dataclass(frozen=True)
class JobSpec:
    """One submitted job. handle: data with which the backend finds the job again; sandbox_workers: number per node, 0
    for no service.

    action: the `command` of submit; None for the default. grid: name of the grid of jobs to which this one belongs.
    arguments: those of `submit`, for the command `evaluate`.
    """

    id: str
    recipe: str
    profile: str
    backend: str
    command: list[str]
    cwd: str
    runs_dir: str
    overrides: dict[str, Any]
    created: str
    run: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    handle: dict[str, Any] = field(default_factory=dict)
    sandbox_workers: int = 0
    action: str | None = None
    grid: str | None = None
    arguments: list[str] = field(default_factory=list)
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    def digest(self) -> str:
        """Return the SHA-256 of everything that the job runs: all fields but `handle`, which is added when it has started."""
        content = {key: value for key, value in asdict(self).items() if key != "handle"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def python(self) -> str:
        """The interpreter of the job. It must have this path on every node, or in the image."""
        return self.command[0]


def jobs_folder(runs: Path) -> Path:
    """Return RUNS/.jobs, and create it if it does not exist.

    It has the permissions of RUNS, so that all users of a shared runs folder can submit, and the sticky bit, so that no
    user can replace the jobs of another one. Raises UserError if others could replace them.
    """
    folder = runs / ".jobs"
    if folder.is_symlink() and folder.lstat().st_uid != os.geteuid():
        raise UserError(
            f"{folder}: a link of {user_name(folder)}; your jobs would be written to where it leads. Delete it"
        )
    if not folder.exists():
        folder.mkdir(parents=True)
        folder.chmod(runs.stat().st_mode & 0o7777 | stat.S_ISVTX)
    status = folder.stat()
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        try:
            folder.chmod(status.st_mode & 0o7777 | stat.S_ISVTX)
        except PermissionError:
            raise UserError(
                f"{folder}: other users can replace your jobs; its owner must run `chmod +t {folder}`"
            ) from None
    return folder


@lru_cache
def _user_id_in(folder: Path) -> int:
    """Return the user id with which this process creates files in a folder: a shared file system may map ids."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            user = os.fstat(file.fileno()).st_uid
    except OSError:
        return os.geteuid()
    # Ids that a file system maps to nobody tell users apart no longer.
    return os.geteuid() if user == NOBODY else user


def check_private(folder: Path) -> None:
    """Raises ForeignJob if a folder belongs to another user, UserError if it is a link or others can write into it."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{folder}: not a folder of a job; delete it")
    if status.st_uid != os.geteuid() and status.st_uid != _user_id_in(folder.parent):
        raise ForeignJob(f"{folder.name} belongs to {user_name(folder)}: only that user can query or stop it")
    if status.st_mode & 0o022:
        raise UserError(f"{folder}: other users can write into it. Check its files, then run `chmod 700 {folder}`")


def user_name(path: Path) -> str:
    """Return "user NAME" for the owner of a file, or its number if it has no name here."""
    user = path.lstat().st_uid
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"


@dataclass(frozen=True)
class JobExit:
    """How a job ended. code: exit code of its command, None if it was stopped before the command started."""

    code: int | None
    stopped: bool


class JobFolder:
    """Reads and writes one job's folder. Every file is written to a temporary name and renamed."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def of(cls, runs_dir: Path, job_id: str) -> "JobFolder":
        return cls(Path(runs_dir) / ".jobs" / job_id)

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    def write(self, name: str, content: dict[str, Any], *, mode: int = 0o644) -> None:
        """Write a file. Raises UserError that names it if the disk or the user's quota is full."""
        temporary = self.path / f".{name}.{secrets.token_hex(8)}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file, indent=1)
            temporary.rename(self.path / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise UserError(os_error_message(error, self.path / name)) from error

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file, or None if it does not exist. Raises UserError if it is not JSON."""
        path = self.path / name
        try:
            content = parse_json(read_text(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(os_error_message(error, path)) from error
        except ValueError as error:
            raise UserError(f"{path}: not valid JSON ({error}); delete the job's folder") from error
        if not isinstance(content, dict):
            raise UserError(f"{path}: not a JSON object; delete the job's folder")
        return content

    def exit(self) -> "JobExit | None":
        """Return how the job ended, or None before its end. Raises UserError if exit.json is damaged."""
        content = self.read("exit.json")
        if content is None:
            return None
        code, stopped = content.get("code"), content.get("stopped")
        if not (code is None or type(code) is int) or not isinstance(stopped, bool):
            raise UserError(f"{self.path / 'exit.json'}: damaged; delete the job's folder")
        return JobExit(code, stopped)

    def create(self) -> None:
        """Create the folder, which only its owner can open. Raises UserError if it exists or cannot be created."""
        try:
            jobs_folder(self.path.parent.parent)
            self.path.mkdir(mode=0o700)
        except OSError as error:
            if error.errno in DISK_FULL:
                raise UserError(os_error_message(error)) from error
            raise UserError(
                f"cannot create {error.filename or self.path}: {error.strerror}; the runs folder (--runs-dir, or storage.runs of the "
                "profile) must be on storage that this machine shares with the nodes of the job"
            ) from error

    def delete_secrets(self) -> None:
        """Delete the secrets that the submitter forwarded."""
        (self.path / SECRETS_FILE).unlink(missing_ok=True)

    def save(self, spec: JobSpec) -> None:
        """Write job.json. Creates the folder if there is none."""
        if not self.path.exists():
            self.create()
        content = asdict(spec)
        try:
            mark = {"seal": seal(content)} if spec.handle else {}
        except UserError:
            if CONNECTION_KEYS & spec.handle.keys():
                raise
            mark = {}  # the job is listed, but `check_sealed` refuses it
        self.write("job.json", content | mark)

    def spec(self) -> JobSpec:
        """Return the job that this user has submitted.

        Raises ForeignJob if the folder belongs to another user, UserError if there is no job, others can change it, job.json is
        damaged, or it names a connection that another user wrote.
        """
        with contextlib.suppress(FileNotFoundError):
            check_private(self.path)
        spec, content = self._read_spec()
        if CONNECTION_KEYS & spec.handle.keys():
            self._check_seal(content, "its connection", "Query the job where it was submitted, or submit it again")
        return spec

    def check_sealed(self, hint: str) -> None:
        """Raise UserError unless this user has submitted the job on this machine. Otherwise the job that `handle` names can be
        another job of the user.

        hint: what to do instead.
        """
        self._check_seal(self._read_spec()[1], "the job that it names", hint)

    def _check_seal(self, content: dict[str, Any], what: str, hint: str) -> None:
        fields = {key: value for key, value in content.items() if key != "seal"}
        if not is_sealed(fields, content.get("seal")):
            raise UserError(
                f"job {self.path.name}: {what} was not written by you on this machine, so it is not used. {hint}"
            )

    def submitted_spec(self, digest: str | None = None) -> JobSpec:
        """Return the content of job.json for the job's own processes, which may run as another user on the nodes of the job.

        digest: that of the submitted job. Raises UserError if job.json has changed since.
        """
        spec = self._read_spec()[0]
        if digest is not None and spec.digest() != digest:
            raise UserError(f"{self.path / 'job.json'} has changed since the job was submitted")
        return spec

    def _read_spec(self) -> tuple[JobSpec, dict[str, Any]]:
        content = self.read("job.json")
        if content is None:
            raise UserError(
                f"no job {self.path.name} in {self.path.parent.parent}: `rstar-lab jobs list` shows the jobs of a runs folder"
            )
        fields = {key: value for key, value in content.items() if key != "seal"}
        try:
            spec = TypeAdapter(JobSpec).validate_json(json.dumps(fields))
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"{self.path / 'job.json'}: {'.'.join(map(str, first['loc']))}: {first['msg']}; the file is damaged, or written "
                "by another version of rstar_lab. Delete the job's folder"
            ) from error
        if spec.id != self.path.name:
            raise UserError(f"{self.path / 'job.json'}: it is the file of another job; delete the job's folder")
        if spec.run is not None:
            check_name(spec.run, f"{self.path / 'job.json'}: run")
        return spec, content
