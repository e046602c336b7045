"""Find the backend of a job by its name."""

from importlib import import_module

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import Profile, load_profile
from rstar_lab.jobs.backend import Backend

# Imported when they are first used: ray and kubernetes are large, and extras.
CLASSES = {
    "local": "rstar_lab.jobs.local:Local",
    "ray": "rstar_lab.jobs.ray_jobs:Ray",
    "slurm": "rstar_lab.jobs.slurm:Slurm",
    "kuberay": "rstar_lab.jobs.kuberay:KubeRay",
    "ssh": "rstar_lab.jobs.ssh.backend:OverSsh",
}


def backend_named(name: str) -> Backend:
    """Return a backend. Raises UserError for an unknown name."""
    if name not in CLASSES:
        raise UserError(f"backend {name!r} is unknown; choose local, ray, slurm, ssh or kuberay")
    module, _, attribute = CLASSES[name].partition(":")
    backend: Backend = getattr(import_module(module), attribute)()
    return backend


def choose(profile: str | None, *, host: str | None = None, backend: str | None = None) -> tuple[Profile, Backend]:
    """Return the profile and the backend of a job; the arguments are those of `submit`. Raises UserError for an unknown
    profile or backend, and for an unreachable host."""
    if profile is None and host:
        from rstar_lab.jobs.ssh.backend import profile_of_host

        machine = profile_of_host(host)
    else:
        machine = load_profile(profile or "laptop")
    return machine, backend_named("ssh" if host else backend or machine.backend)
