"""A real OpenSSH server on a free loopback port, with its own keys and client configuration."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from rstar_lab.hardware.profiles import Ssh
from rstar_lab.jobs.ssh import connection


class SshServer:
    """sshd on a loopback port. `config` is the client's configuration; its host is called `cluster`.

    user: who logs in; default: the current user. prefix: words before sshd's command, such as nsenter. environment: variables of
    every session.
    """

    def __init__(
        self,
        folder: Path,
        *,
        user: str | None = None,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ):
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        if sshd is None:
            pytest.skip("sshd is not installed: `make services` installs it")
        self.sshd, self.folder, self.process = [*prefix, sshd], folder, None
        for name in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (folder / "authorized_keys").write_bytes((folder / "user_key.pub").read_bytes())
        server = {
            "Port": self.port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host_key", "StrictModes": "no",
            "AuthorizedKeysFile": folder / "authorized_keys", "PidFile": folder / "sshd.pid", "UsePAM": "no",
            "PermitRootLogin": "yes", "PasswordAuthentication": "no", "Subsystem": "sftp internal-sftp",
        }  # fmt: skip
        sessions = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"], **(environment or {})}
        server["SetEnv"] = " ".join(f"{name}={value}" for name, value in sessions.items())
        (folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in server.items()))
        client = {
            "HostName": "127.0.0.1", "Port": self.port, "User": user or getpass.getuser(), "IdentityFile": folder / "user_key",
            "IdentitiesOnly": "yes", "UserKnownHostsFile": folder / "known_hosts", "StrictHostKeyChecking": "accept-new",
        }  # fmt: skip
        self.config = folder / "ssh_config"
        self.config.write_text("Host cluster\n" + "".join(f"  {key} {value}\n" for key, value in client.items()))
        self.start()

    def settings(self, remote_dir: Path) -> Ssh:
        """Return the section `ssh` of a profile that runs local jobs on this server."""
        return Ssh(
            host="cluster", config=str(self.config), remote_dir=str(remote_dir), backend="local", python=sys.executable
        )

    def start(self) -> None:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(parents=True, exist_ok=True)  # sshd separates its privileges there
        log = self.folder / "sshd.log"
        self.process = subprocess.Popen(
            [*self.sshd, "-D", "-f", str(self.folder / "sshd_config"), "-E", str(log)], start_new_session=True
        )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError(f"sshd did not start: {log.read_text()[-1000:]}")

    def stop(self) -> None:
        """Stop the server and cut its connections."""
        server = psutil.Process(self.process.pid)
        for process in [server, *server.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if "sshd" in process.name():
                    process.kill()
        self.process.wait()


def forget_agents() -> None:
    """Close all agents of this process."""
    while connection._agents:
        connection._agents.popitem()[1].close()
