"""Prepare a host for jobs: send the working tree, and read the host's own profile."""

import hashlib
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rstar_lab.errors import UserError
from rstar_lab.hardware.profiles import Profile, Ssh, load_profile, parse_profile
from rstar_lab.jobs.pack import pack_tar, tree_root
from rstar_lab.jobs.ssh.connection import Connection, ConnectionLost
from rstar_lab.jobs.ssh.mirror import foreign_run

PROFILE = "rstar-lab-profile:"  # precedes the profile in the output of the host


def connect(profile: Profile, host: str | None, log: Callable[[str], None]) -> tuple[Ssh, dict[str, Any]]:
    """Send the working tree to the profile's host, or to `host`; return the settings and the handle of a job there."""
    settings = ssh_settings(profile, host)
    remote, code = install_tree(Connection(settings), log)
    runs = profile.storage.runs if Path(profile.storage.runs).is_absolute() else f"{remote}/runs"
    return settings, {"ssh": settings.model_dump(), "code": code, "runs": runs}


def profile_of_host(host: str) -> Profile:
    """Return the profile in `rstar-lab/profile.yaml` on a host. Of its section `ssh`, only python, setup, remote_dir,
    transcripts and backend are used, and its list of secrets is ignored.

    Without that file: the profile `laptop`, with Slurm if the host has sbatch. Raises UserError if the host cannot be reached or
    the file is not a profile.
    """
    settings = Ssh(host=host)
    file = f"{settings.remote_dir}/profile.yaml"
    look = f"echo {PROFILE}; if [ -f {file} ]; then cat {file}; elif command -v sbatch >/dev/null; then echo 'backend: slurm'; fi"
    # Text that login scripts print comes first.
    text = Connection(settings).run(look).rpartition(f"{PROFILE}\n")[2]
    if text in ("", "backend: slurm\n"):
        settings = settings.model_copy(update={"backend": "slurm" if text else "local"})
        return load_profile("laptop").model_copy(update={"backend": "ssh", "ssh": settings})
    profile = parse_profile(text, f"{host}: {file}")
    if profile.backend == "kuberay":
        raise UserError(f"{host}: {file}: backend must be local, ray, slurm or ssh")
    backend = profile.ssh.backend if profile.backend == "ssh" else profile.backend
    # The host cannot choose how it is reached, nor which variables of this machine are sent to it.
    found = profile.ssh.model_dump(include={"python", "setup", "remote_dir", "transcripts"})
    settings = Ssh(**found, host=host, backend=backend)
    return profile.model_copy(update={"backend": "ssh", "ssh": settings, "secrets": []})


def check_run_names(run_name: str, runs_dir: Path, handle: Mapping[str, Any]) -> None:
    """Reject a job whose runs cannot be copied to `runs_dir`, because a run of that name there is not a copy from this host."""
    for run_id in (f"{run_name}-sft", f"{run_name}-rl"):
        if problem := foreign_run(runs_dir / run_id, handle["ssh"]["host"], f"{handle['runs']}/{run_id}"):
            raise UserError(f"{problem}; submit with another --name or --runs-dir")


def ssh_settings(profile: Profile, host: str | None) -> Ssh:
    """Return where to send a job: the profile's `ssh` section, with `host` in place of its host.

    With a profile for another backend, that backend runs the job on the host.
    """
    settings = profile.ssh.model_copy(update={"host": host} if host else {})
    return settings if profile.backend == "ssh" else settings.model_copy(update={"backend": profile.backend})


def install_tree(connection: Connection, log: Callable[[str], None] = print) -> tuple[str, str]:
    """Send the working tree to the host, if it does not have it. Returns the absolute paths of `remote_dir` and of the code.

    Each version of the tree has its own folder, which is named by its content and never changed, so running jobs keep
    their code.
    """
    archive, package = pack_tar(tree_root())
    version = hashlib.sha256(archive).hexdigest()[:16]
    folder = shlex.quote(connection.settings.remote_dir.removeprefix("~/"))
    look = f"mkdir -p {folder}/code {folder}/runs; cd {folder}; pwd -P; [ -d code/{version} ] && echo present || echo missing"
    *_, path, presence = _write_there(connection, look).splitlines()
    if presence == "missing":
        log(f"{connection.host}: receives {package}")
        unpack = (
            f"cd {shlex.quote(path)}/code; new=$(mktemp -d .{version}.XXXXXX); trap 'rm -rf $new' EXIT; tar -xzf - -C $new\n"
            f"mv -T $new {version} 2>/dev/null || [ -d {version} ]"
        )
        _write_there(connection, unpack, content=archive, timeout_s=600)
    return path, f"{path}/code/{version}"


def _write_there(connection: Connection, script: str, **options: Any) -> str:
    """Run a script that writes to `remote_dir`; options: those of `Connection.run`. Errors name the folder and the remedy."""
    try:
        return connection.run(script, **options)
    except ConnectionLost:
        raise
    except UserError as error:
        folder = connection.settings.remote_dir
        raise UserError(
            f"cannot write to {folder} on the host: {error}. Free space or quota there, or set ssh.remote_dir in the profile to a "
            "folder in which you can write"
        ) from error
