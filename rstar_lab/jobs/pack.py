"""What a job needs of the working tree, copied into the job's folder: that, and nothing else, is sent."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rstar_lab.errors import UserError

# Ray refuses a working_dir past 100 MiB, with a bare HTTP 413.
LIMIT_MB = 90
SKIPPED_FOLDERS = {".git", ".venv", "node_modules", "__pycache__", ".ipynb_checkpoints"}
SKIPPED_AT_THE_ROOT = {"runs", "out"}  # rstar_lab/runs is code
# Files that hold secrets by custom: never sent, tracked or not.
SECRET_FILES = {".env", ".netrc", "id_rsa", "id_ed25519", "credentials", "secrets.yaml", "secrets.json"}


@dataclass(frozen=True)
class Package:
    files: int
    megabytes: float
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        secret = f"; left out, since they may hold secrets: {', '.join(self.left_out)}" if self.left_out else ""
        return f"{self.files} files, {self.megabytes:.1f} MB of the working tree{secret}"


def tree_root() -> Path:
    """The git tree that the caller stands in, so that a notebook sends more than its own folder; else where it stands."""
    found = subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True)
    return Path(found.stdout.strip()) if found.returncode == 0 else Path.cwd()


def listed(root: Path) -> list[Path]:
    """Files of the tree, relative: as git sees them (tracked, and new ones it does not ignore), or all but known clutter."""
    git = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True
    )
    if git.returncode == 0:
        names = [Path(name) for name in git.stdout.decode().split("\0") if name]
    else:
        names = [path.relative_to(root) for path in root.rglob("*")]
    names = [
        name for name in names if not SKIPPED_FOLDERS & set(name.parts) and name.parts[0] not in SKIPPED_AT_THE_ROOT
    ]
    return sorted(name for name in names if (root / name).is_file())


def pack(root: Path, target: Path, *, limit_mb: float = LIMIT_MB) -> Package:
    """Copy the tree at `root` to `target`. Raises UserError past the limit, with the largest files."""
    names = listed(root)
    left_out = [name for name in names if name.name in SECRET_FILES or name.suffix in (".pem", ".key")]
    names = [name for name in names if name not in left_out]
    sizes = {name: (root / name).stat().st_size for name in names}
    total = sum(sizes.values()) / 2**20
    if total > limit_mb:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        told = ", ".join(f"{name} ({sizes[name] / 2**20:.0f} MB)" for name in largest)
        raise UserError(
            f"the working tree {root} is {total:.0f} MB, past the limit of {limit_mb:g} MB; largest: {told}. "
            "Put data and models on shared storage, or let .gitignore name them"
        )
    for name in names:
        destination = target / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, destination)
    return Package(len(names), total, tuple(map(str, left_out)))
