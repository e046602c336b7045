"""Tests of the system calls that Python's standard library does not have."""

import subprocess
import sys

import pytest
from helpers.sandbox_processes import ROOT

from rstar_lab.sandbox.runtime import kernel

FORK = """
import os, sys, threading
sys.path.insert(0, {root!r})
from rstar_lab.sandbox.runtime import kernel
os.register_at_fork(after_in_child=lambda: print("handler", flush=True))
if {threads}:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
pid = kernel.fork()
if pid == 0:
    thread = threading.Thread(target=print, args=("thread",))
    thread.start()
    thread.join()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(("threads", "handlers"), [(False, []), (True, ["handler"])])
def test_fork_runs_handlers_only_in_a_process_with_several_threads(threads, handlers):
    code = FORK.format(root=str(ROOT), threads=threads)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.split() == [*handlers, "thread", "7"]


def test_errors_of_mounts_name_the_folder():
    with pytest.raises(OSError, match=r"^\[Errno \d+\] mount /no/such/folder: ") as error:
        kernel.mount(b"none", b"/no/such/folder", b"tmpfs")
    assert error.value.errno
    with pytest.raises(OSError, match=r"^\[Errno \d+\] umount /no/such/folder: "):
        kernel.unmount(b"/no/such/folder")
