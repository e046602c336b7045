"""The common mistakes of the command line, one a row: each is one line that says what is wrong and what to do."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command import exit_code
from helpers.small_disk import SmallDisk

from rstar_lab.common.errors import UserError
from rstar_lab.rl.overrides import parse_overrides

pytestmark = pytest.mark.slow
CLI = [sys.executable, "-m", "rstar_lab.cli"]
FILES = {
    "half.yaml": "rl: {lr: [1\n",
    "empty.yaml": "",
    "a.jsonl": '{"problem_id": "1", "question": "1+1", "answer": "2"}\n',
    "wrong.jsonl": '{"q": "1+1", "a": "2"}\n',
    "broken.jsonl": '{"question": "1+1", \n',
    "empty.jsonl": "",
    "text.csv": "hello",
    "short.parquet": "PAR",
    "folder/other.txt": "text",
    "runs/tiny-rl/run.json": "{}",
}
# (command line, exit code, part of the message). The command line is split as bash does.
MISTAKES = [
    ("dmeo", 2, "no such command 'dmeo'. Did you mean 'demo'?"),
    ("demo --quick", 2, "no such option: --quick; `"),
    ("demo --real --fast", 1, "--real cannot be combined with --fast"),
    ("demo --out a.jsonl", 1, "a.jsonl is a file; give a folder"),
    ("run", 2, "missing argument 'RECIPE'; `"),
    ("run tiny rl.lr=1e-5", 2, "a recipe key is set with --set KEY=VALUE, as in --set rl.lr=1e-4"),
    ("run tiny --steps 3", 2, "a recipe key is set with --set KEY=VALUE"),
    ("run tiny --profile laptop", 2, "run --help` lists what is possible"),
    ("serve", 2, "missing argument 'MODEL'; `"),
    ("init", 1, "init: give --model and --problems, as in"),
    ("init --model a.jsonl --problems a.jsonl", 1, "at least 2 are needed"),
    ("init --model a.jsonl --problems wrong.jsonl --fields question=q,answer=b", 1, "field 'b': missing; the row has q, a"),
    ("sandbox serve --port many", 2, "invalid value for '--port': Input should be a valid integer"),
    # recipes and keys
    ("run nosuch", 1, "recipe nosuch: no such file; shipped recipes: evaluate"),
    ("run tny", 1, "did you mean tiny?"),
    ("run half.yaml", 1, "recipe half.yaml: not YAML"),
    ("run empty.yaml", 1, "the file must be a mapping of keys"),
    ("run folder", 1, "is a folder, not a file"),
    ("run tiny --set rl.lrr=1", 1, "rl.lrr: unknown key; did you mean lr?"),
    ("run tiny --set rl.roc.rule=paper", 1, "rl.roc: unknown key; did you mean rl.method.roc?"),
    ("run tiny --set seed", 1, "--set seed: give key=value"),
    ("run tiny --set rl.lr=1e400", 1, "recipe tiny: rl.lr: Input should be a finite number"),
    ("run tiny --set rl.lr=abc", 1, "rl.lr: Input should be a valid number"),
    ("run tiny --set rl.lr=“1e-5”", 1, "typographic quotation mark"),
    ("run tiny --set stages.0.problems={file:none.jsonl}", 1, "a value needs a space after the colon"),
    ("run tiny --set rl.reward=nomod:x", 1, "rl.reward: nomod:x: no module nomod"),
    ("run tiny --set rl.tools=[nomod:x]", 1, "rl.tools: nomod:x: no module nomod"),
    ("run tiny --runs-dir half.yaml", 1, "--runs-dir half.yaml: half.yaml is a file; give a folder"),
    ("preflight tiny --profile nosuch", 1, "no profile 'nosuch'; choose one of a100x8, h100x8, h100x8_local, laptop"),
    ("preflight half.yml", 1, "did you mean half.yaml?"),
    ("preflight a.jsonl", 1, "init --problems a.jsonl` writes one"),
    ("preflight tiny --set rl.lora=8", 1, "rl.lora: Input should be a valid dictionary; give its keys, as in {rank: VALUE}"),
    # models, without a network
    ("run tiny_fast --set model=missing --set sft=null", 1, "model folder missing does not exist: give a folder"),
    ("run tiny_fast --set model=Qwen/Qwen3-0.6B", 1, "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B"),
    ("evaluate Qwen/Qwen3-0.6B@v1 --problems a.jsonl", 1, "hf download Qwen/Qwen3-0.6B --revision v1"),
    ("chat Qwen/Qwen3-0.6B", 1, "hf download Qwen/Qwen3-0.6B --local-dir"),
    ("evaluate nowhere --problems a.jsonl", 1, "model nowhere: neither a folder with a config.json, nor a run"),
    ("serve folder", 1, "model folder: neither a folder with a config.json, nor a run"),
    ("chat http://localhost:1 --prompt hi", 1, "does not answer"),
    ('chat http://localhost:1 --prompt ""', 1, "chat --prompt: the prompt is empty"),
    # files of problems
    ("data prepare missing.csv --out x.jsonl", 1, "missing.csv: no such file"),
    ("data prepare b.jsonl --out x.jsonl", 1, "b.jsonl: no such file; did you mean a.jsonl?"),
    ("data prepare folder --out x.jsonl", 1, "folder: a folder; give a file, ORG/NAME"),
    ("data prepare wrong.jsonl --out x.jsonl", 1, "the row has q, a (map names with --fields question=NAME)"),
    ("data prepare broken.jsonl --out x.jsonl", 1, "broken.jsonl, line 1: not JSON"),
    ("data prepare empty.jsonl --out x.jsonl", 1, "empty.jsonl: no problems"),
    ("data lint empty.jsonl", 1, "empty.jsonl: no rows"),
    ("data prepare text.csv --out x.jsonl", 1, "this one has no row below it"),
    ("data prepare short.parquet --out x.jsonl", 1, "truncated or not a Parquet file"),
    ("data prepare a.jsonl --out ./a.jsonl", 1, "this file is also a source; write to another file"),
    ("data prepare nosuchset --out x.jsonl", 1, "no such file; give a file, ORG/NAME on the hub, or one of dapo"),
    ("data synthesize --count 0 --out x.jsonl", 2, "greater than or equal to 1"),
    ("data synthesize --count 3 --out folder", 1, "problems are written as .jsonl or .parquet"),
    # runs
    ("runs show tinyrl", 1, "no run tinyrl in runs/: did you mean tiny-rl? `rstar-lab runs list` shows the runs"),
    ("report tinyrl", 1, "no run tinyrl in runs/: did you mean tiny-rl? `rstar-lab runs list` shows the runs"),
    ("runs list --runs-dir missing", 1, "there is no folder missing; set the folder of the runs with --runs-dir"),
    ("report runs", 1, "runs is a folder of runs: give one of them, such as runs/tiny-rl"),
    ("report tiny-rl --runs-dir runs/tiny-rl", 1, "--runs-dir runs/tiny-rl: this is a run, not a folder of runs"),
    ("report tiny-rl --runs-dir missing", 1, "there is no folder missing; set the folder of the runs with --runs-dir"),
    ("report tiny-rl --out folder", 1, "folder is a folder; give the name of a file"),
    ("report tiny-rl --out a.jsonl/x.html", 1, "is a file, not a folder"),
    ("ablation report runs --figure folder", 1, "folder is a folder; give the name of a file"),
    ("report unknown", 1, "`rstar-lab runs list` shows the runs"),
    ("rewind unknown 1 out", 1, "unknown"),
    ("explain a b", 1, "`rstar-lab runs list` shows the runs"),
    ("audit nomod:x --problems a.jsonl", 1, "no module nomod"),
    ("doctor nowhere", 2, "nowhere does not exist: give a run, its folder, such as runs/NAME, or a log"),
    ("doctor tinyrl", 2, "tinyrl does not exist; did you mean tiny-rl?"),
    ("view rns", 1, "rns does not exist; did you mean runs?"),
    ("view half.yaml", 1, "can be shown: give a run, a folder of runs, or a log of another trainer"),
    ("doctor a.jsonl --html folder", 1, "folder is a folder; give the name of a file"),
    # jobs and services
    ("jobs submit tiny_fast --name 'a b' --no-preflight", 1, "name of the run 'a b': use at most 150 letters"),
    ("jobs submit tiny_fast --set rl.lr", 1, "--set rl.lr: expected key=value"),
    ("jobs submit tiny_fast --profile nosuch", 1, "no profile 'nosuch'; choose one of a100x8, h100x8, h100x8_local, laptop"),
    ("jobs submit tiny_fast --host nohost.invalid --no-preflight", 1, "cannot reach nohost.invalid"),
    ("jobs logs unknown", 1, "`rstar-lab jobs list` shows the jobs of a runs folder"),
    ("sandbox serve --host 0.0.0.0", 1, "a token is required: set RSTAR_LAB_SANDBOX_TOKEN, or give --token-file"),
    ("sandbox serve --token-file none", 2, "file 'none' does not exist"),
    ("sandbox worker --redis redis://127.0.0.1:1", 1, "start `redis-server`, or correct --redis"),
    ("bench nothing", 1, "bench nothing: unknown; choose from trainer"),
]  # fmt: skip


def run(
    *arguments: str, cwd: Path, program: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [*(program or CLI), *arguments]
    environment = os.environ | variables
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def one_line(text: str) -> str:
    """Return the one line of an error output. Fails if there are more or it is no error line."""
    (line,) = text.splitlines()
    assert line.startswith("error: ") and "Traceback" not in line
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("line", "code", "message"), MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_a_mistake_is_one_line_with_the_remedy(line, code, message, folder, monkeypatch, capfd):
    for name in ("RSTAR_LAB_SANDBOX_TOKEN", "RSTAR_LAB_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(folder)
    ended = exit_code(*shlex.split(line))
    output, errors = capfd.readouterr()
    assert message in one_line(errors) and ended == code
    assert not output
    changed = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert sorted(changed) == sorted(FILES)


def test_a_port_in_use_is_one_line(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("sandbox", "serve", "--port", port, cwd=folder)
        assert done.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in one_line(done.stderr)
        assert "Try another --port" in done.stderr


def test_a_full_disk_is_one_line(tmp_path):
    disk = SmallDisk(tmp_path, "size")
    try:
        disk.fill()
        done = run("data", "synthesize", "--count", "300", "--out", str(disk.folder / "x.jsonl"), cwd=tmp_path)
        assert done.returncode == 1 and disk.reason in one_line(done.stderr) and "free disk space" in done.stderr
    finally:
        disk.unmount()


def test_a_second_start_at_once_is_one_line(tmp_path):
    hold = (
        "import sys; from pathlib import Path; from rstar_lab.runs.lock import RunLock\n"
        "lock = RunLock(Path('runs/tiny_fast-sft')); print('held', flush=True); sys.stdin.read()"
    )
    (tmp_path / "runs" / "tiny_fast-sft").mkdir(parents=True)
    first = subprocess.Popen(
        [sys.executable, "-c", hold], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "held\n"
        done = run("sft", "tiny_fast", cwd=tmp_path)
        assert done.returncode == 1 and f"is being written by process {first.pid}" in one_line(done.stderr)
    finally:
        first.communicate()


@pytest.mark.parametrize(
    ("package", "line", "extra"),
    [
        ("plotly", "report tiny-rl", "analysis"),
        ("torch", "serve folder", "cpu"),
        ("fastapi", "sandbox serve --port 0", "sandbox"),
        ("mcp", "mcp --runs-dir runs", "mcp"),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(package, line, extra, folder):
    program = f"import sys; sys.modules[{package!r}] = None; from rstar_lab.cli import main; sys.argv[0] = 'rstar-lab'; main()"
    done = run(*line.split(), cwd=folder, program=(sys.executable, "-c", program))
    assert done.returncode == 1 and f"pip install '.[{extra}]'" in one_line(done.stderr)


@pytest.mark.parametrize("on_path", [True, False])
def test_commands_in_messages_and_help_are_those_of_this_shell(on_path, folder):
    own = Path(sys.executable).with_name("rstar-lab")
    environment = os.environ | {"PATH": f"{own.parent}:/usr/bin:/bin" if on_path else "/usr/bin:/bin"}
    shown = "rstar-lab" if on_path else str(own)
    for arguments in (("runs", "show", "nothing"), ("train", "--help")):
        done = subprocess.run([own, *arguments], cwd=folder, capture_output=True, text=True, env=environment)
        expected = f"`{shown} runs list`" if arguments[0] == "runs" else f"{shown} train tiny_fast"
        assert expected in " ".join((done.stdout + done.stderr).split()), done


def test_every_quoting_that_bash_passes_on_is_understood(tmp_path):
    for written in (
        "rl.lr=1e-4", "'rl.lr=1e-4'", '"rl.lr = 1e-4"', "rl.lr='1e-4'", 'rl.lr="1e-4"', "rl.lr=0.0001",
    ):  # fmt: skip
        assert parse_overrides(bash_words(written)) == {"rl.lr": 1e-4}, written
    assert parse_overrides(bash_words("name=\\'010\\'")) == {"name": "010"}  # quotes that reach us keep the text
    for written in (
        "rl.tools=[m:f]", "'rl.tools=[m:f]'", "\"rl.tools=['m:f']\"", "'rl.tools=[\"m:f\"]'", 'rl.tools="[m:f]"',
    ):  # fmt: skip
        assert parse_overrides(bash_words(written)) == {"rl.tools": ["m:f"]}, written
    with pytest.raises(UserError, match="the value is not YAML"):
        parse_overrides(bash_words("'rl.tools=[m:f'"))


def bash_words(written: str) -> list[str]:
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {written}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]
