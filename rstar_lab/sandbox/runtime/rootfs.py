"""The read-only root file system of programs: the interpreter, system libraries and compilers, but no other host files."""

import contextlib
import os
import sys
from collections.abc import Iterator

from rstar_lab.sandbox.runtime import kernel

SCRATCH = "/box"
WORK, TEMPORARY, SHARED_MEMORY = f"{SCRATCH}/work", f"{SCRATCH}/tmp", f"{SCRATCH}/shm"
_HELD = "/held"  # mount point for an interpreter installed below /tmp, because each program has its own /tmp
_TEMPORARIES = ("/tmp", "/var/tmp")
DEVICES = ("null", "zero", "full", "random", "urandom")
# Few entries, because every program copies the mount table. Not all of /usr, because some images keep applications there.
_SYSTEM = [f"/usr/{part}" for part in ("bin", "lib", "lib32", "lib64", "libx32", "libexec", "include", "share")]
_SYSTEM += ["/usr/local/bin", "/usr/local/lib", "/nix/store", "/gnu/store"]
_SYSTEM += ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"]
_COPIED = ["/etc/ld.so.cache", "/etc/localtime"]
_ALTERNATIVES = "/etc/alternatives"
_LINKS = {
    **dict.fromkeys(_TEMPORARIES, TEMPORARY),
    "/dev/shm": SHARED_MEMORY,
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}
_FILES = {
    "/etc/passwd": "sandbox:x:1000:1000:sandbox:/box/work:/bin/sh\n",
    "/etc/group": "sandbox:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
    "/etc/hostname": "sandbox\n",
}
# Files and folders that the user of the sandbox has made readable.
additional: list[str] = []


def readable() -> list[str]:
    """Return the existing paths that a program may read: system libraries, compilers, Python's code, and additional ones."""
    paths = [*_SYSTEM, *additional]
    for prefix in {sys.base_prefix, sys.prefix, sys.base_exec_prefix, sys.exec_prefix}:
        paths += [f"{prefix}/{part}" for part in ("bin", "lib", "lib64")]
    paths += [path for path in sys.path if path.endswith("-packages")]
    # The interpreter may be a chain of symbolic links through several folders.
    link = sys.executable
    while link:
        paths.append(link)
        link = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link))) if os.path.islink(link) else ""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if path.startswith("/")}):
        if os.path.lexists(path) and not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return [path for path in kept if not os.path.islink(path) or path in _SYSTEM or path == sys.executable]


def files() -> dict[str, bytes]:
    """Return path -> content of generated and copied small files."""
    contents = {path: text.encode() for path, text in _FILES.items()}
    for path in [*_COPIED, *{f"{prefix}/pyvenv.cfg" for prefix in (sys.prefix, sys.exec_prefix)}]:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            contents[path] = file.read()
    return contents


def links() -> dict[str, str]:
    """Return path -> target of symbolic links."""
    targets = {path: os.readlink(path) for path in readable() if os.path.islink(path)} | _LINKS
    with contextlib.suppress(OSError):
        for name in os.listdir(_ALTERNATIVES):
            with contextlib.suppress(OSError):
                targets[f"{_ALTERNATIVES}/{name}"] = os.readlink(f"{_ALTERNATIVES}/{name}")
    return targets


def _devices(root: str) -> list[str]:
    """Create the device nodes; return the names that this user cannot create and that must be bind-mounted."""
    os.makedirs(f"{root}/dev", 0o755, exist_ok=True)
    missing = []
    for name in DEVICES:
        try:
            os.mknod(f"{root}/dev/{name}", 0o20666, os.stat(f"/dev/{name}").st_rdev)
            os.chmod(f"{root}/dev/{name}", 0o666)
        except OSError:
            missing.append(name)
    return missing


def _place(path: str) -> str:
    return f"{_HELD}{path}" if path.startswith(tuple(f"{folder}/" for folder in _TEMPORARIES)) else path


def temporary(root: str = "") -> Iterator[kernel.Step]:
    """Yield steps that create the folder TEMPORARY, with links to parts of the interpreter that are below /tmp on the host."""
    yield "mount_namespace", os.mkdir, (f"{root}{TEMPORARY}", 0o700)
    for held in [f"{_HELD}{folder}" for folder in _TEMPORARIES]:
        for name in os.listdir(f"{root}{held}") if os.path.exists(f"{root}{held}") else ():
            yield "mount_namespace", os.symlink, (f"{held}/{name}", f"{root}{TEMPORARY}/{name}")


def build() -> None:
    """Replace the root of this process, which must have its own mount namespace, by the programs' root file system.

    Raises OSError.
    """
    kernel.mount(b"none", b"/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    root = "/tmp"
    sources = [(path, os.open(path, os.O_PATH)) for path in readable() if not os.path.islink(path)]
    symlinks, small_files = links(), files()
    os.umask(0o022)
    kernel.mount(b"sandbox", root.encode(), b"tmpfs", kernel.MS_NOSUID, b"mode=755,size=16m")
    devices = [(f"/dev/{name}", os.open(f"/dev/{name}", os.O_PATH)) for name in _devices(root)]
    for path, fd in sources + devices:
        target = root + _place(path)
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        # By descriptor, because the path itself may be below the new root's mount point.
        source = f"/proc/self/fd/{fd}"
        if os.path.isdir(source):
            os.makedirs(target, 0o755, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(source.encode(), target.encode(), None, kernel.MS_BIND | kernel.MS_REC)
        os.close(fd)
    for path, data in small_files.items():
        target = root + _place(path)
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        fd = os.open(target, os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(fd, data)
        os.close(fd)
    for folder in (SCRATCH, "/proc"):
        os.makedirs(root + folder, 0o755, exist_ok=True)
    for path, target in symlinks.items():
        link = root + _place(path)
        os.makedirs(os.path.dirname(link), 0o755, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.symlink(target, link)
    kernel.run_steps(temporary(root))  # for the zygotes' imports; each program has its own
    kernel.mount_setattr(root.encode(), kernel.MS_RDONLY | kernel.MS_NOSUID)
    kernel.mount(b"proc", f"{root}/proc".encode(), b"proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.chdir(root)
    kernel.pivot_root(b".", b".")
    kernel.unmount(b".")
    os.chdir("/")
