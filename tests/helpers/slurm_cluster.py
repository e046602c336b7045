"""A real Slurm on this machine: munge, a controller and two nodes."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")


def install_slurm() -> None:
    """Install Slurm with apt. Skips the test with the reason if that is not possible."""
    os.environ["PATH"] += ":/usr/sbin"
    if all(shutil.which(name) for name in NEEDED):
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        pytest.skip("Slurm is not installed, and installing it needs apt-get and root")
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "slurm-wlm", "munge"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    )
    if not all(shutil.which(name) for name in NEEDED):
        pytest.skip(f"Slurm could not be installed: {done.stderr.strip()[-300:]}")


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def slurm_cluster(prefix: Sequence[str] = ()) -> Iterator[Path]:
    """Run Slurm with the nodes n1 and n2 of two CPUs each. Yields its folder, which contains slurm.conf.

    prefix: words before the command of each daemon, such as nsenter. Skips the test if Slurm does not start.
    """
    install_slurm()
    folder = Path(tempfile.mkdtemp(prefix="sl", dir="/tmp"))  # a short path: munge's socket lies in it
    folder.chmod(0o755)  # the commands of other users read the configuration
    for name in ("munge", "state", "d/n1", "d/n2", "run"):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o711)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    user, ports = getpass.getuser(), [free_port() for _ in range(3)]
    config = f"""
        ClusterName=test
        SlurmctldHost=localhost(127.0.0.1)
        SlurmUser={user}
        SlurmdUser={user}
        SlurmctldPort={ports[0]}
        AuthInfo=socket={folder}/munge/sock
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        SelectType=select/cons_tres
        SelectTypeParameters=CR_CPU
        JobAcctGatherType=jobacct_gather/none
        ReturnToService=2
        MpiDefault=none
        SlurmdParameters=config_overrides
        StateSaveLocation={folder}/state
        SlurmctldPidFile={folder}/run/ctld.pid
        SlurmdSpoolDir={folder}/d/%n
        SlurmdPidFile={folder}/run/slurmd.%n.pid
        NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
        NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
        PartitionName=all Nodes=n1,n2 Default=YES State=UP
    """
    (folder / "slurm.conf").write_text(textwrap.dedent(config).lstrip())
    munge, environment = folder / "munge", os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    commands = [
        ["munged", "-F", f"--key-file={key}", f"--socket={munge}/sock", f"--pid-file={munge}/pid",
         f"--log-file={munge}/log", f"--seed-file={munge}/seed", "--force"],
        ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"],
    ]  # fmt: skip
    daemons = []
    try:
        for command in commands:
            with (folder / f"{len(daemons)}.log").open("wb") as log:
                daemons.append(subprocess.Popen([*prefix, *command], stdout=log, stderr=log, env=environment))
            time.sleep(0.5)
        _wait_until_idle(folder, environment)
        yield folder
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_idle(folder: Path, environment: dict[str, str]) -> None:
    deadline, command = time.monotonic() + 120, ["sinfo", "-h", "-o", "%D %t"]
    while True:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment).stdout.strip()
        if output == "2 idle":
            return
        if time.monotonic() > deadline:
            logs = "".join(path.read_text(errors="replace")[-500:] for path in sorted(folder.glob("*.log")))
            pytest.skip(f"Slurm did not start here ({output}): {logs}")
        time.sleep(0.5)
