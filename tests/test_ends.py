"""Every end of a command is a clean end: no process and no shared memory is left, and a run says that it was stopped."""

import asyncio
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import nullcontext
from pathlib import Path

import nbformat
import psutil
import pytest
from helpers import mcp_server
from helpers.analysis_runs import make_run
from helpers.tiny_models import make_model

from rstar_lab.common.outcomes import Outcome
from rstar_lab.hardware.local_ray import LocalRay
from rstar_lab.jobs import JobStatus, submit
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.problems import Problem, write_problems
from rstar_lab.rl.tools.mcp import load_mcp_tools
from rstar_lab.rl.training import data_parallel
from rstar_lab.runs.writer import RunWriter

ROOT = Path(__file__).parents[1]
CLOSED = "its output is closed"
ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, CLOSED]
CLI = "-m rstar_lab.cli"
LOCKED = re.compile(r"rstar-[a-z]+-(\d+)-[0-9a-f]{8}")
NOTEBOOK = """
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.pipeline import run_recipe
from rstar_lab.rl.resolved import resolve
await run_recipe(resolve(load_recipe("tiny_fast", {"runs": "runs"}), model=True), Reporter(True), stages=True, evaluations=False)
"""
VERL = "tiny_fast --profile laptop --runs-dir runs --set sft.optimizer=adamw --set sft.schedule=cosine"
STAGE = (
    "tiny_fast --profile laptop --retries 1 --runs-dir runs --set sft=null --set model=model --set evaluate.samples=1"
    " --set rl.problems_per_step=2 --set rl.group_size=2"
)
SLOW = """
import pathlib, time
from rstar_lab.doctor import rule

def reward(*_):
    pathlib.Path("started").touch()
    time.sleep(60)

RULE = rule("slow", reads=("rollouts.reward",), cause="", remedy="", source="")(reward)
"""
CLIENT = {"name": "t", "version": "1"}
CALLS = [
    {"method": "initialize", "id": 1, "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": CLIENT}},
    {"method": "notifications/initialized"},
    {"method": "tools/call", "id": 2, "params": {"name": "list_runs", "arguments": {}}},
]  # fmt: skip
MCP = "".join(json.dumps({"jsonrpc": "2.0"} | call) + "\n" for call in CALLS)
EVALUATE = "evaluate model --problems problems.jsonl --samples 200 --set evaluate.max_response_tokens=900"
# Per command: arguments of Python; text that it prints once its processes run, or pattern of a file that it has written by then (short
# ones print none: they are ended after a second); and how
# it ends: with 128 plus the signal (STOPPED), also with 0 (SERVICE), or with any code (None). Only the first three take seconds.
STOPPED, SERVICE = "stopped", "service"
COMMANDS = {
    "bench": (f"{CLI} bench scheduler", "bench", STOPPED),
    "view": (f"{CLI} view runs --no-browser", "http", SERVICE),
    "chat": (f"{CLI} chat model --engine transformers", "> ", SERVICE),
    "serve": (f"{CLI} serve model --port 0 --max-model-len 512", "http", SERVICE),
    "evaluate": (f"{CLI} {EVALUATE}", "runs/evaluate-*/run.json", STOPPED),
    "train": (f"{CLI} train tiny_fast --runs-dir runs", "rl", STOPPED),
    "verl": (f"-m rstar_lab.rl.verl.train {VERL}", "runs/*-sft/metrics.jsonl", STOPPED),
    "notebook": ("-m papermill book.ipynb out.ipynb -k python3 --log-output", "runs/*-sft/metrics.jsonl", None),
    "rehearse": (f"{CLI} rehearse tiny_fast --folder rehearsal", "rehearsal/**/metrics.jsonl", STOPPED),
    "demo": (f"{CLI} demo --fast --runs-dir runs", "runs/*-sft/metrics.jsonl", STOPPED),
    "run": (f"{CLI} run tiny_fast --runs-dir runs", "runs/*-rl/metrics.jsonl", STOPPED),
    "stage": (f"-m rstar_lab.rl.verl.train {STAGE}", "runs/*-rl/metrics.jsonl", STOPPED),
    "rescore": (f"{CLI} rescore a --reward slow:reward", "started", STOPPED),
    "doctor": (f"{CLI} doctor runs --rule slow:RULE", "started", STOPPED),
    "data prepare": (f"{CLI} data prepare many.jsonl --out out.jsonl", "repeated row", STOPPED),
    "ablation": (f"{CLI} ablation report runs --save-data out.parquet", "runs/a/run.json", SERVICE),
    "mcp": (f"{CLI} mcp --runs-dir runs", '"id":2', SERVICE),
    "inject": (f"{CLI} inject none --folder inject", "inject/**/metrics.jsonl", STOPPED),
    "sft": (f"{CLI} sft tiny_fast --runs-dir runs", "runs/*-sft/metrics.jsonl", STOPPED),
    "audit": (f"{CLI} audit slow:reward --problems problems.jsonl", "started", STOPPED),
    "preflight": (f"{CLI} preflight tiny_fast", "", SERVICE),
    "export": (f"{CLI} export a --format sft --out out.jsonl", "", SERVICE),
    "report": (f"{CLI} report a --out report.html", "", SERVICE),
    "compact": (f"{CLI} runs compact a", "", SERVICE),
    "rewind": (f"{CLI} rewind stored-rl 2 copy", "", SERVICE),
}
ROWS = [name if i < 3 else pytest.param(name, marks=pytest.mark.soak) for i, name in enumerate(COMMANDS)]


def marked(mark):
    """Return the command lines of the processes that have this mark in their environment, and the semaphores that they have open."""
    found, semaphores = [], set()
    for process in psutil.process_iter():
        try:
            if process.environ().get("RSTAR_LAB_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
                semaphores |= {
                    Path(file.path) for file in process.memory_maps() if file.path.startswith("/dev/shm/sem.")
                }
        except psutil.Error:
            pass
    return found, semaphores


def stale():
    """Return the folders in shared memory whose processes have ended."""
    names = [LOCKED.fullmatch(path.name) for path in Path("/dev/shm").iterdir()]
    return [name[0] for name in names if name and not psutil.pid_exists(int(name[1]))]


def heed_signals():
    """Reset signals that the shell of the tests ignores, as `nohup` does."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def end(arguments, ready, how, folder, temporary, settle_s=2.0):
    """Start a command, end it, and return its exit code, its stderr, and the processes and semaphores that it left."""
    mark = uuid.uuid4().hex
    command = subprocess.Popen(
        [sys.executable, *arguments.split()], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
        env=os.environ | {"RSTAR_LAB_TEST": mark, "PYTHONPATH": str(ROOT), "TMPDIR": temporary},
        preexec_fn=heed_signals,
    )  # fmt: skip
    if " mcp " in arguments:
        command.stdin.write(MCP.encode())
        command.stdin.flush()
    seen, deadline = b"", time.monotonic() + 600
    while ready.encode() not in seen and not any(folder.glob(ready)):
        (readable, *_) = select.select([command.stdout, command.stderr], [], [], 0.5)
        chunk = b"".join(os.read(stream.fileno(), 2**16) for stream in readable)
        seen += chunk
        if (readable and not chunk) or time.monotonic() > deadline:
            command.terminate()
            pytest.fail(seen.decode())
    time.sleep(settle_s)
    _, semaphores = marked(mark)
    if how is CLOSED:
        command.stdout.close()
    else:
        command.send_signal(how)
    try:
        command.wait(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(command.pid, signal.SIGKILL)
        raise
    errors = command.stderr.read().decode()
    deadline = time.monotonic() + 20  # of the processes of one that was killed
    while (left := marked(mark)[0]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return command.returncode, errors, left + [str(path) for path in semaphores if path.exists()]


@pytest.fixture
def temporary():
    folder = tempfile.mkdtemp(prefix="ends-", dir="/tmp")  # short: sockets are created in it
    yield folder
    shutil.rmtree(folder)


def prepared(name, folder):
    """Write the files that a command reads, and return its row of the table."""
    for run in "abcdefghijkl" if name in ("doctor", "ablation") else "ab":
        make_run(folder / "runs", run, steps=1 if COMMANDS[name][1] else 60, label=run if name == "ablation" else "")
    if name == "rewind":
        recipe = load_recipe("tiny_fast").model_dump(mode="json")
        with RunWriter.open(folder / "runs", "stored-rl", kind="train", recipe=recipe, seed=0) as writer:
            for step in (1, 2):
                writer.write_step("rl", step, trajectories=[], calls=[], transcripts=[], metrics={})
                with writer.checkpoint(step) as checkpoint:
                    (checkpoint / "model.safetensors").write_bytes(bytes(1_000_000_000))
            writer.finish("stopped")
    (folder / "slow.py").write_text(SLOW)
    if name == "data prepare":
        problems = (
            Problem(problem_id=f"p{i}", question=f"What is {i} + {i % 977}?", answer=f"{i}") for i in range(50_000)
        )
        write_problems(folder / "many.jsonl", problems)
    if re.search("[ =]model ", COMMANDS[name][0]):
        make_model(folder / "model", max_length=1024 if name != "stage" else 4096)
    if "problems.jsonl" in COMMANDS[name][0]:
        problems = [Problem(problem_id=f"p{i}", question=f"{i} + 1?", answer=f"{i + 1}") for i in range(20)]
        write_problems(folder / "problems.jsonl", problems)
    if name == "notebook":
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK)]), folder / "book.ipynb")
    return COMMANDS[name]


def remaining(temporary):
    """Return the files left in the temporary folder, except the cache of torch's compiler and connection files of Jupyter kernels."""
    return [
        path for path in Path(temporary).iterdir() if not path.match("torchinductor_*") and not path.match("tmp*.json")
    ]


def run_another(temporary):
    """Run a command, which removes what a killed one could not remove."""
    subprocess.run([sys.executable, *CLI.split(), "profiles"], env=os.environ | {"TMPDIR": temporary}, check=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ENDS, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_a_command_that_is_ended_leaves_nothing(name, how, tmp_path, temporary):
    if how is CLOSED and name != "train":
        pytest.skip("it prints nothing more")
    arguments, ready, status = prepared(name, tmp_path)
    code, errors, left = end(arguments, ready, how, tmp_path, temporary, settle_s=2.0 if ready else 1.0)
    assert left == []
    assert how is not signal.SIGKILL or code == -9 or not ready
    if how is signal.SIGKILL or name == "notebook":  # a kernel is killed with its client
        run_another(temporary)
    assert not stale() and not remaining(temporary)
    if how is signal.SIGKILL or status is None:
        return
    assert "Traceback" not in errors, errors
    assert code in (128 + (signal.SIGPIPE if how is CLOSED else how), 0 if status == SERVICE else None)
    if status == STOPPED:
        assert errors.strip().endswith("stopped; run the same command again to continue")
    for run in tmp_path.glob("runs/*/run.json"):
        assert json.loads(run.read_text())["status"] in ("stopped", "finished")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", ["bench", *(pytest.param(row, marks=pytest.mark.soak) for row in ("chat", "serve", "train"))]
)
def test_ten_ends_in_a_row_leak_nothing(name, tmp_path, temporary):
    arguments, ready, _ = prepared(name, tmp_path)
    groups = Path("/sys/fs/cgroup/pids")  # version 1; a launcher in the tests' own group creates them here
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP) * 2:
        assert end(arguments, ready, how, tmp_path, temporary, settle_s=0.5)[2] == []
        assert len(remaining(temporary)) <= 2, "what a killed command left is not removed by the next one"
    assert not stale() and not remaining(temporary)
    owners = [int(path.name.split("-")[3]) for path in groups.glob("rstar-lab-sandbox-*[0-9]")]
    assert all(map(psutil.pid_exists, owners))


def test_a_list_whose_reader_has_gone_prints_no_error(tmp_path):
    text = f"{sys.executable} -m rstar_lab.cli recipes --json | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == "" and done.stdout[1:].strip() in ("0", "141")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["stop", "kill", "SIGTERM", "SIGHUP", "SIGKILL"])
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_the_end_of_a_job_is_in_its_run_and_its_log(backend, how, tmp_path):
    """`stop`: of the job; `kill`: of its trainer; a signal: to its supervisor."""
    with LocalRay(cpus=2) if backend == "ray" else nullcontext() as cluster:
        address = cluster and cluster.address
        check_end_of_a_job(
            submit("tiny_fast", runs_dir=tmp_path, preflight=False, backend=backend, address=address), how, tmp_path
        )


def check_end_of_a_job(job, how, folder):
    deadline = time.monotonic() + 300
    while '"event": "sft"' not in job.logs():
        assert time.monotonic() < deadline, job.logs()
        time.sleep(0.5)
    command = ["-m", "rstar_lab.jobs.supervisor", str(job.folder.path)]
    (supervisor,) = (
        process for process in psutil.process_iter(["cmdline"]) if (process.info["cmdline"] or [])[1:] == command
    )
    processes = supervisor.children(recursive=True)
    status = JobStatus.STOPPED if how in ("stop", "SIGTERM") else JobStatus.FAILED
    match how:
        case "stop":
            assert job.stop() is status
        case "kill":
            supervisor.children()[0].kill()
        case _:
            supervisor.send_signal(getattr(signal, how))
    assert job.wait(timeout_s=60) is status
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    run_another(tempfile.gettempdir())
    assert not stale()
    if status is JobStatus.STOPPED:
        assert json.loads((folder / "tiny_fast-sft" / "run.json").read_text())["status"] == "stopped"
    if how == "kill":
        assert job.logs().splitlines()[-1].startswith("error: the command of the job was killed by SIGKILL")
    assert "Traceback" not in job.logs() and "helper process" not in job.logs()


def wait_on_ranks(ranks):
    """Entry point of a helper process: work with the other ranks until they end."""
    while True:
        ranks.share(None)


@pytest.mark.slow
def test_a_helper_of_the_training_that_is_stopped_by_a_signal_ends_the_command(monkeypatch, caplog):
    monkeypatch.setattr(data_parallel, "STOPPED_S", 0.5)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    with pytest.raises(data_parallel.RankDied, match="run the same command to continue"):
        with data_parallel.HelperProcesses(2) as helpers:
            ranks = helpers.lead("test_ends:wait_on_ranks")
            (helper,) = helpers._processes
            helper.send_signal(signal.SIGSTOP)
            while True:
                ranks.share(1)
                ranks.gather(0)
    assert f"helper process {helper.pid} of the training is stopped; it is ended" in caplog.text
    assert helper.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_tool_server_that_is_stopped_by_a_signal_delays_no_rollout():
    address = f"mcp+stdio:{sys.executable} {mcp_server.__file__}"
    before = set(psutil.Process().children())

    async def use():
        tool = next(tool for tool in load_mcp_tools(address, 60.0) if tool.schema["function"]["name"] == "count")
        assert (await tool({}, seed=0, traj_id="t")).outcome is Outcome.OK
        (server,) = set(psutil.Process().children()) - before
        server.suspend()
        tool.server.time_limit_s = 1.0
        result = await tool({}, seed=0, traj_id="t")
        await tool.close("t")
        return server, result

    async def limited():
        async with asyncio.timeout(60):
            return await use()

    server, result = asyncio.run(limited())
    assert result.outcome is Outcome.TIMEOUT and not server.is_running()
