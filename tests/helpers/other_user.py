"""A second host on this machine, for tests: sshd and Slurm that run jobs as a user who exists only during the test.

The host has its own mount namespace, in which that user can read this interpreter even if it is in root's home.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.slurm_cluster import slurm_cluster
from helpers.ssh_server import SshServer

# $1: scratch folder; the other arguments: folders to show. Hides root's home, except for the folders to show.
NAMESPACE = """
set -e
scratch=$1; shift; number=0
for folder; do mkdir "$scratch/$number"; mount --bind "$folder" "$scratch/$number"; number=$((number + 1)); done
mount -t tmpfs -o mode=755 tmpfs /root
number=0
for folder; do mkdir -p "$folder"; mount --bind "$scratch/$number" "$folder"; number=$((number + 1)); done
echo ready
exec sleep infinity
"""


@dataclass(frozen=True)
class Host:
    """user: its name there. home: its home. server: reached as `cluster` with the configuration server.config."""

    user: str
    home: Path
    server: SshServer
    prefix: tuple[str, ...]
    environment: dict[str, str]

    def run(self, script: str) -> str:
        """Run a shell script as the user and return its output."""
        variables = {"HOME": str(self.home), "USER": self.user, "PATH": os.environ["PATH"], **self.environment}
        command = [
            "setpriv",
            f"--reuid={self.user}",
            f"--regid={self.user}",
            "--init-groups",
            "sh",
            "-c",
            f"cd; {script}",
        ]
        done = subprocess.run([*self.prefix, *command], capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextlib.contextmanager
def other_user(*, slurm: bool = True) -> Iterator[Host]:
    """Yield a host whose user owns nothing of the caller's. Skips the test if this is not root on Linux."""
    if os.geteuid() != 0 or not shutil.which("useradd"):
        pytest.skip("making a user and a mount namespace requires root")
    folder = Path(tempfile.mkdtemp(prefix="far", dir="/tmp"))
    folder.chmod(0o755)
    user, home = f"rsl{secrets.token_hex(3)}", folder / "home"
    (folder / "ssh").mkdir()
    (folder / "mounts").mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # With the password "*" sshd does not count the account as locked.
        options = ["--create-home", "--home-dir", str(home), "--shell", "/bin/bash", "--password", "*", user]
        subprocess.run(["useradd", *options], check=True, capture_output=True)
        stack.callback(subprocess.run, ["userdel", user], capture_output=True)
        namespace = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", NAMESPACE, "sh", str(folder / "mounts"), *_python_folders()],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(namespace.wait)
        stack.callback(namespace.kill)
        assert namespace.stdout is not None
        if namespace.stdout.readline() != "ready\n":
            pytest.skip("no mount namespaces here")
        prefix = ("nsenter", f"--mount=/proc/{namespace.pid}/ns/mnt", f"--wdns={folder}", "--")
        environment: dict[str, str] = {}
        if slurm:
            environment["SLURM_CONF"] = str(stack.enter_context(slurm_cluster(prefix)) / "slurm.conf")
        server = SshServer(folder / "ssh", user=user, prefix=prefix, environment=environment)
        stack.callback(server.stop)
        stack.callback(_end_processes_of, user)
        yield Host(user, home, server, prefix, environment)


def _python_folders() -> list[str]:
    """Return the folders of this interpreter that lie in root's home, outer ones first."""
    folders = {os.path.realpath(path) for path in (sys.base_prefix, sys.prefix)}
    return sorted(path for path in folders if Path(path).is_relative_to("/root"))


def _end_processes_of(user: str) -> None:
    subprocess.run(["pkill", "-KILL", "-U", str(pwd.getpwnam(user).pw_uid)], capture_output=True)
