"""A real disk that is full: of its size, or of a user's quota."""

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

REASONS = {"size": "No space left on device", "quota": "Disk quota exceeded"}


class SmallDisk:
    """A mounted disk with a limit, at `folder`. limit: "size" (256 kB of a tmpfs) or "quota" (600 kB of a btrfs subvolume)."""

    def __init__(self, root: Path, limit: str):
        self.limit, self.mount, self.reason = limit, root / "disk", REASONS[limit]
        self.folder = self.mount / "far"
        self.mount.mkdir()
        if limit == "size":
            self._run("mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", self.mount)
            self.folder.mkdir()
            return
        if not shutil.which("mkfs.btrfs"):
            pytest.skip("mkfs.btrfs is not installed: `make services` installs it")
        image = root / "disk.img"
        with image.open("wb") as file:
            file.truncate(128 << 20)
        self._run("mkfs.btrfs", "-q", image)
        self._run("mount", "-o", "loop", image, self.mount)
        self._run("btrfs", "subvolume", "create", self.folder)
        self._run("btrfs", "quota", "enable", self.mount)
        self._run("btrfs", "qgroup", "limit", "600K", self.folder)

    def fill(self) -> None:
        """Write until nothing fits, also no small file."""
        with contextlib.suppress(OSError):
            for size in (1 << 16, 1 << 10):
                with contextlib.suppress(OSError), (self.folder / f"fill-{size}").open("wb", buffering=0) as file:
                    while file.write(b"x" * size):
                        pass
            for number in range(10_000):
                (self.folder / f"fill-{number:05d}").write_bytes(b"x" * 1000)

    def free(self) -> None:
        """Raise the limit."""
        if self.limit == "size":
            self._run("mount", "-o", "remount,size=64m", self.mount)
        else:
            self._run("btrfs", "qgroup", "limit", "none", self.folder)

    def make_read_only(self) -> None:
        self._run("mount", "-o", "remount,ro", self.mount)

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.mount)], capture_output=True)

    def _run(self, *command: object) -> None:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            self.unmount()
            pytest.skip(f"{command[0]} needs root and a kernel that supports it: {done.stderr.strip()[:200]}")
