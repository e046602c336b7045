"""Copy the working tree into a job's folder, without data, caches and files that usually hold secrets."""

import gzip
import io
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from rstar_lab.common.errors import UserError
from rstar_lab.untrusted.text import counted

# Ray rejects a working_dir of more than 100 MiB with HTTP 413.
LIMIT_MB = 90
SKIPPED_FOLDERS = {".git", ".venv", "node_modules", "__pycache__", ".ipynb_checkpoints"}
SKIPPED_AT_ROOT = {"runs", "out"}  # only at the root: rstar_lab/runs is code
# Files that usually hold secrets. They are never sent, even if git tracks them.
SECRET_FILES = {".env", ".netrc", "id_rsa", "id_ed25519", "credentials", "secrets.yaml", "secrets.json"}


@dataclass(frozen=True)
class Package:
    files: int
    megabytes: float
    left_out: tuple[str, ...]
    links: tuple[str, ...] = ()

    def __str__(self) -> str:
        secret = f"; not sent, because they may hold secrets: {', '.join(self.left_out)}" if self.left_out else ""
        links = (
            f"; links that are absolute or leave the tree are not sent: {', '.join(self.links)}" if self.links else ""
        )
        return f"{counted(self.files, 'file')}, {self.megabytes:.1f} MB of the working tree{secret}{links}"


def tree_root() -> Path:
    """Return the root of the git tree around the current folder, else the current folder."""
    git = subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    return Path(git.stdout.strip()) if git.returncode == 0 else Path.cwd()


def list_files(root: Path) -> list[Path]:
    """Return the files of a tree, relative to its root: in a git repository those that git does not ignore, else all
    files except caches."""
    git = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True
    )
    if git.returncode == 0:
        names = [Path(name) for name in git.stdout.decode().split("\0") if name]
    else:
        names = [path.relative_to(root) for path in root.rglob("*")]
    names = [name for name in names if not SKIPPED_FOLDERS & set(name.parts) and name.parts[0] not in SKIPPED_AT_ROOT]
    return sorted(name for name in names if (root / name).is_file() or (root / name).is_symlink())


def select_files(root: Path, limit_mb: float = LIMIT_MB) -> tuple[list[Path], Package]:
    """Return the files and symbolic links to send, relative to `root`. Absolute links and links that leave `root` are not sent.

    Raises UserError if they exceed `limit_mb`, with the largest files.
    """
    names = list_files(root)
    links = [name for name in names if (root / name).is_symlink() and not _is_inside(root, name)]
    names = [name for name in names if name not in links]
    left_out = [name for name in names if name.name in SECRET_FILES or name.suffix in (".pem", ".key")]
    names = [name for name in names if name not in left_out]
    sizes = {name: (root / name).lstat().st_size for name in names}
    total = sum(sizes.values()) / 2**20
    if total > limit_mb:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        listing = ", ".join(f"{name} ({sizes[name] / 2**20:.0f} MB)" for name in largest)
        raise UserError(
            f"the working tree {root} is {total:.0f} MB; the limit is {limit_mb:g} MB; largest files: {listing}. "
            "Move data and models to shared storage, or list them in .gitignore"
        )
    return names, Package(len(names), total, tuple(map(str, left_out)), tuple(map(str, links)))


def _is_inside(root: Path, name: Path) -> bool:
    """Whether a symbolic link is relative and its target is in the tree, so that the copy of the tree has it too."""
    target = Path(os.path.realpath(root / name))
    return not (root / name).readlink().is_absolute() and target.is_relative_to(root.resolve())


def pack(root: Path, target: Path, *, limit_mb: float = LIMIT_MB) -> Package:
    """Copy the tree at `root` to `target`. Raises UserError if it is larger than `limit_mb`."""
    names, package = select_files(root, limit_mb)
    for name in names:
        destination = target / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, destination, follow_symlinks=False)
    return package


def pack_tar(root: Path) -> tuple[bytes, Package]:
    """Return the tree at `root` as a gzipped tar file. The same files give the same bytes."""
    names, package = select_files(root, LIMIT_MB)
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=4, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for name in names:
            archive.add(root / name, name, filter=_without_owner)
    return buffer.getvalue(), package


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove what differs between copies of a tree: owner, time and permissions other than the owner's."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    entry.mode &= 0o700
    return entry
