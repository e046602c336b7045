"""Tests that a run has one writer at a time, also after a kill, and that readers are never blocked."""

import os
import signal
import subprocess
import sys

import pytest
from helpers.run_rows import rows

from rstar_lab.common.errors import UserError
from rstar_lab.runs import RunLocked, RunReader, RunWriter
from rstar_lab.runs.compact import compact

TRAIN = {"kind": "train", "recipe": {}, "seed": 0}
HOLD = """
import sys, time
from rstar_lab.runs import RunWriter
writer = RunWriter.open(sys.argv[1], "a", kind="train", recipe={}, seed=0)
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_second_writer_gets_the_pid_and_can_write_after_a_kill(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "held\n"
            for second in (lambda: RunWriter.open(tmp_path, "a", **TRAIN), lambda: compact(tmp_path / "a")):
                with pytest.raises(RunLocked, match=f"process {first.pid} on ") as caught:
                    second()
                assert isinstance(caught.value, UserError)
            assert RunReader(tmp_path / "a").status == "running"
        finally:
            first.send_signal(signal.SIGKILL)
    assert RunReader(tmp_path / "a").status == "interrupted"
    with RunWriter.open(tmp_path, "a", **TRAIN) as writer:
        assert writer.attempt == 2
        writer.write_step("rl", 0, **rows(0), metrics={})


@pytest.mark.slow
def test_forked_child_does_not_keep_the_lock(tmp_path):
    writer = RunWriter.open(tmp_path, "a", **TRAIN)
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(sender)
        os.read(receiver, 1)  # lives until the test ends
        os._exit(0)
    try:
        os.close(receiver)
        with pytest.raises(RunLocked):
            RunWriter.open(tmp_path, "a", **TRAIN)  # the child's copy is gone, the writer's own is not
        writer.close()
        RunWriter.open(tmp_path, "a", **TRAIN).close()
    finally:
        os.close(sender)
        os.waitpid(pid, 0)
