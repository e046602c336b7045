"""The batch script of Slurm jobs, run with bash on this machine: srun, scontrol, hostname and the interpreter are stand-ins that
record how they are called. Real Slurm is in tests/jobs/test_jobs_slurm.py."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rstar_lab.hardware.limits import raise_open_files
from rstar_lab.hardware.profiles import load_profile
from rstar_lab.jobs.render import sbatch_directives, sbatch_script
from rstar_lab.jobs.store import JobSpec

# Runs the command of a step here. --nodelist decides what hostname prints; a step without it runs once per node.
SRUN = """#!/usr/bin/env bash
export STUB_NODE=all
while [[ "$1" == --* ]]; do
  case "$1" in --nodelist=*) STUB_NODE="${1#*=}";; --nodelist) STUB_NODE="$2"; shift;; esac
  shift
done
export CUDA_VISIBLE_DEVICES=0,1 HIP_VISIBLE_DEVICES=0,1 ROCR_VISIBLE_DEVICES=0,1 GPU_DEVICE_ORDINAL=0,1
exec "$@"
"""
PYTHON = """#!{python} -S
import json, os, resource, sys
names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "RAY_TMPDIR")
record = dict(argv=sys.argv[1:], env={{name: os.environ.get(name) for name in names}},
              files=resource.getrlimit(resource.RLIMIT_NOFILE))
with open({log!r}, "a") as file:
    file.write(json.dumps(record) + "\\n")
"""


@pytest.fixture
def run_script(tmp_path):
    """Run a profile's batch script; returns the finished process and the calls of the interpreter."""
    folder, bin_folder, log = tmp_path / "job", tmp_path / "bin", tmp_path / "calls.jsonl"
    (folder / "code").mkdir(parents=True)
    bin_folder.mkdir()

    def program(name, text):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)

    def run(profile, *, nodes=2, hostname="10.1.2.3", getent="", all_addresses="", setup=""):
        program("srun", SRUN)
        program("scontrol", "#!/bin/sh\n" + "".join(f"echo node{number}\n" for number in range(nodes)))
        program(
            "hostname", f'#!/bin/sh\ncase "$1" in --all*|-I) echo "{all_addresses}";; *) echo "{hostname}";; esac\n'
        )
        program("getent", f'#!/bin/sh\nprintf "{getent}"\n[ -n "{getent}" ]\n')
        program("python3", PYTHON.format(python=sys.executable, log=str(log)))
        if setup:
            profile = profile.model_copy(update={"slurm": profile.slurm.model_copy(update={"setup": [setup]})})
        spec = JobSpec(
            "job", "toy", profile.name, "slurm", [str(bin_folder / "python3")], "/", str(tmp_path), {}, "now"
        )
        script = sbatch_script(profile.model_copy(update={"container": None}), spec, folder)
        environment = {
            "PATH": f"{bin_folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": str(nodes), "CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1",
            "ROCR_VISIBLE_DEVICES": "0,1", "GPU_DEVICE_ORDINAL": "0,1",
        }  # fmt: skip
        command = ["bash", "-c", f"ulimit -S -n 100; exec bash -c {shell_word(script)}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        for call in calls:
            if call["env"]["RAY_TMPDIR"]:
                shutil.rmtree(call["env"]["RAY_TMPDIR"], ignore_errors=True)
        return done, calls

    return run


def shell_word(text):
    return "'" + text.replace("'", "'\\''") + "'"


def head_address(calls):
    (start,) = [call["argv"] for call in calls if "--head" in call["argv"]]
    return next(word for word in start if word.startswith("--node-ip-address=")).partition("=")[2]


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ({"hostname": "10.1.2.3"}, "10.1.2.3"),
        ({"hostname": "127.0.1.1 10.1.2.3"}, "10.1.2.3"),
        ({"hostname": "fd00::12 10.0.0.5"}, "10.0.0.5"),
        ({"hostname": "127.0.1.1", "getent": r"10.9.9.9 STREAM node0\n10.9.9.9 DGRAM\n"}, "10.9.9.9"),
        (
            {"hostname": "127.0.1.1", "getent": r"127.0.1.1 STREAM node0\n", "all_addresses": "fe80::1 10.4.4.4"},
            "10.4.4.4",
        ),
    ],
)
def test_the_head_has_an_address_that_other_nodes_reach(run_script, addresses, expected):
    done, calls = run_script(load_profile("mi300x_8x8"), **addresses)
    assert done.returncode == 0, done.stdout + done.stderr
    assert head_address(calls) == expected


def test_only_one_node_may_have_no_address_but_loopback(run_script):
    done, calls = run_script(load_profile("mi300x_8x8"), hostname="127.0.1.1", getent=r"127.0.1.1 STREAM\n")
    assert done.returncode == 1 and "has no address that the other nodes can reach" in done.stdout
    assert not any("ray.scripts.scripts" in call["argv"] for call in calls)
    done, calls = run_script(load_profile("mi300x_8x8"), nodes=1, hostname="127.0.1.1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("profile", ["mi300x_8x8", "h100x8"])
def test_steps_get_no_gpu_variables_but_those_of_nvidia_and_many_files(run_script, profile):
    done, calls = run_script(load_profile(profile))
    assert done.returncode == 0, done.stdout + done.stderr
    modules = {call["argv"][1] for call in calls}
    assert {"rstar_lab.jobs.supervisor", "ray.scripts.scripts", "rstar_lab.jobs.wait_for_nodes"} <= modules
    for call in calls:
        assert call["files"][0] == call["files"][1] > 100
        visible = {name for name, value in call["env"].items() if value and name.endswith(("DEVICES", "ORDINAL"))}
        # On NVIDIA, the variable names the GPUs that Slurm gave to the job.
        assert visible == (set() if profile == "mi300x_8x8" else {"CUDA_VISIBLE_DEVICES"})


def test_the_folder_of_ray_is_private_on_every_node(run_script, tmp_path):
    done, calls = run_script(load_profile("mi300x_8x8"))
    folders = {call["env"]["RAY_TMPDIR"] for call in calls} - {None}
    assert len(folders) == 1 and done.returncode == 0
    assert re.fullmatch(r"/tmp/r\w{8}", folders.pop()), "short, and nobody can know it before"
    text = Path("/tmp/rxTESTxxx")
    for mode, fails in [(0o700, False), (0o755, True)]:
        text.mkdir(mode=mode)
        try:
            done, calls = run_script(
                load_profile("mi300x_8x8"),
                setup=f'mktemp() {{ case $1 in -u) echo {text};; *) command mktemp "$@";; esac; }}',
            )
        finally:
            shutil.rmtree(text, ignore_errors=True)
        assert ("cannot make the private folder" in done.stdout) == fails, done.stdout + done.stderr


def test_steps_of_pyxis_share_the_folder_of_ray(tmp_path):
    profile = load_profile("mi300x_8x8").model_copy(update={"container": "registry.org/a/rstar-lab:rocm"})
    spec = JobSpec("job", "toy", "x", "slurm", ["python3"], "/", str(tmp_path), {}, "now")
    script = sbatch_script(profile, spec, tmp_path)
    (mounts,) = re.findall(r"--container-mounts=(\S+?)[ )]", script)
    ray_folder = re.search(r"mktemp -u (/tmp)/", script)[1]
    assert f"{ray_folder}:{ray_folder}" in mounts.strip("'").split(",")


@pytest.mark.parametrize("name", ["mi300x_8x8", "h100x8"])
def test_exclusive_jobs_request_all_memory_of_the_node(name):
    assert "#SBATCH --mem=0" in sbatch_directives(load_profile(name), "job", "out")


def test_the_limit_of_open_files_is_raised():
    code = (
        "import resource; from rstar_lab.hardware.limits import raise_open_files\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard)); raise_open_files()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
    raise_open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard
