"""Answer verification: extraction, comparison, the 5 s limit, and the life of the worker processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from helpers.cases import read_cases

from rstar_lab.common.errors import UserError
from rstar_lab.verify import Undecided, extract_answer, last_boxed, same_answer, verify, verify_many, warm_up
from rstar_lab.verify import pool as pool_module
from rstar_lab.verify import worker as worker_module
from rstar_lab.verify.comparison import canonical_integer

# An answer is decided within 5 s on a free core. CPU time is what counts, so a loaded machine takes longer.
DEADLINE_S = 5.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

CASES = read_cases(__file__)
pytestmark = pytest.mark.usefixtures("warm")


def response(answer: str) -> str:
    return f"some thought</reason>\n<answer>The result is \\boxed{{{answer}}}.</answer>"


@pytest.mark.parametrize(("text", "content"), CASES["last box"])
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(("text", "content"), CASES["tagged answer"])
def test_extract_answer(text, content):
    assert extract_answer(text) == content


@pytest.mark.parametrize("number", [0, 7, 12, 123, 1234, 12_345, 123_456, 1_234_567])
def test_integers_have_one_form_whatever_their_separators(number):
    for sign, prefix in (("", ""), ("+", ""), ("-", "-" if number else "")):
        for written in (f"{number}", f"{number:,}", f"00{number}"):
            assert canonical_integer(sign + written) == f"{prefix}{number}"


def test_answers_inside_a_response_verify_as_they_compare():
    equal, different = (CASES[f"{name} inside a response"] for name in ("equal", "different"))
    assert [pair for pair in [*equal, ("9" * 5000, "9" * 5000)] if not verify(response(pair[0]), pair[1])] == []
    assert [pair for pair in [*different, ("9" * 5000, "9" * 4999)] if verify(response(pair[0]), pair[1])] == []


@pytest.mark.parametrize(("text", "boxed", "number"), CASES["boxed and last number"])
def test_boxed_and_last_number_formats_read_the_complete_response(text, boxed, number):
    assert extract_answer(text, "boxed") == boxed
    assert extract_answer(text, "last_number") == number


def test_answer_format_decides_whether_a_response_verifies():
    text = r"so \boxed{42}, as computed in 3 steps"
    assert not verify(text, "42")
    assert verify(text, "42", answer_format="boxed")
    assert verify(text, "3", answer_format="last_number")
    assert verify_many([(text, "42"), (text, "3")], answer_format="boxed") == [True, False]
    with pytest.raises(ValueError, match="unknown answer format 'tag'; expected one of tagged, boxed, last_number"):
        extract_answer(text, "tag")  # type: ignore[arg-type]


def test_long_text_after_the_box_does_not_hide_the_answer():
    assert verify(r"<answer>\boxed{25}" + "so it is. " * 50_000 + "</answer>", "25")


HOSTILE = {
    "power tower": "9^{9^{9^9}}",
    "factorials": "1000000!!!",
    "integral": r"\int_0^1 x^{x^{x}} dx",
    "sum": r"\sum_{n=1}^{10^{9}} n!",
    "exponent": "1e999999999999",
    "polynomial": "x^{1000000}+(x+1)^{100000}",
    "braces": "{" * 900 + "}" * 900,
    "parentheses": "(" * 900 + ")" * 900,
    "roots": r"\sqrt{" * 300 + "2" + "}" * 300,
    "nulls": "\0" * 100,
    "surrogate": "\ud800",
    "exit": '__import__("os")._exit(0)',
}


@pytest.mark.slow
def test_hostile_answers_fail_within_the_limit():
    """All are verified at once, together with one correct answer."""
    warm_up()
    results: dict[str, tuple[bool, float]] = {}

    def verify_one(name: str, given: str) -> None:
        start = time.monotonic()
        results[name] = verify(response(given), "5"), time.monotonic() - start

    threads = [
        threading.Thread(target=verify_one, args=item) for item in [*HOSTILE.items(), ("correct", r"\frac{10}{2}")]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(HOSTILE) + 1
    assert {name for name, (correct, _) in results.items() if correct} == {"correct"}
    assert not {name: seconds for name, (_, seconds) in results.items() if seconds > DEADLINE_S}


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 300_000,
        "<answer>" * 300_000 + "</answer>" * 300_000,
        "<answer>" + r"\boxed{" * 200_000 + "}" * 200_000 + "</answer>",
        "<answer>" + "{" * 1_000_000 + r"\boxed{5}" + "</answer>",
        "<answer>" + "\\" * 1_000_001 + "</answer>",
        response("1" * 1_000_000),
    ],
)
def test_huge_responses_are_verified_within_the_limit(text):
    start = time.monotonic()
    verify(text, "7")
    assert time.monotonic() - start < DEADLINE_S


async def test_verify_works_from_a_running_event_loop():
    assert verify(response(r"\frac{1}{2}"), "0.5")
    results = await asyncio.gather(
        *(asyncio.to_thread(verify, response(rf"\frac{{{n}}}{{2}}"), "1.5") for n in range(8))
    )
    assert results == [n == 3 for n in range(8)]


def test_verify_many_keeps_the_order():
    pairs = [(response(rf"\frac{{{n}}}{{2}}"), str(n / 2 if n % 3 else 99.5)) for n in range(60)]
    assert verify_many(pairs) == [n % 3 != 0 for n in range(60)]
    assert verify_many([]) == []


def worker_processes() -> list[psutil.Process]:
    processes = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended
            if worker_module.__file__ in process.cmdline():
                processes.append(process)
    return processes


@pytest.mark.slow
@pytest.mark.parametrize("server", [True, False])
def test_killed_workers_are_replaced_and_the_comparison_repeated(server):
    """server: the process that starts the workers is killed too."""
    for number in range(4):
        assert same_answer(rf"\frac{{{2 * number}}}{{2}}", f"{number}.0")
        for process in worker_processes():
            if server or process.pid != pool_module.workers._process.pid:
                process.kill()
        if server:
            warm_up()


@pytest.mark.slow
def test_forked_process_starts_its_own_workers():
    assert same_answer(r"\frac{10}{2}", "5.0")
    child = os.fork()
    if child == 0:
        try:
            warm_up()
            os._exit(0 if same_answer(r"\frac{12}{2}", "6.0") else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same_answer(r"\frac{14}{2}", "7.0")


SCRIPT = """
import sys, threading, time
import rstar_lab.verify
from rstar_lab.verify import pool as module
from rstar_lab.common.errors import UserError
assert not {"sympy", "math_verify", "numpy"} & set(sys.modules), "importing verify must stay light"
# Start from a thread that ends: the fork server must outlive that thread.
thread = threading.Thread(target=module.workers.warm_up); thread.start(); thread.join()
time.sleep(0.3)
assert module.workers.compare(r"\\frac{10}{2}", "5.0")
print(module.workers._process.pid, flush=True)
threading.Thread(target=module.workers.compare, args=(r"\\int_0^1 x^{x^{x}} dx", "5"), daemon=True).start()
time.sleep(0.5)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "SIGKILL"])
def test_workers_end_with_the_caller(end):
    wait = "time.sleep(60)" if end == "SIGKILL" else "sys.exit(0)"
    # Reading the pipe to its end would block if a worker inherited it.
    caller = subprocess.Popen([sys.executable, "-c", SCRIPT + wait], stdout=subprocess.PIPE, text=True)
    assert caller.stdout
    server = psutil.Process(int(caller.stdout.readline()))
    time.sleep(0.3)
    processes = [server, *server.children(recursive=True)]
    assert len(processes) >= 2, "expected the fork server and a worker that hangs"
    if end == "SIGKILL":
        caller.send_signal(signal.SIGKILL)
    start = time.monotonic()
    caller.stdout.read()
    caller.wait(timeout=10)
    assert time.monotonic() - start < DEADLINE_S
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_missing_sympy_names_the_extra_to_install(monkeypatch, tmp_path):
    (tmp_path / "sympy.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = pool_module.WorkerPool()
    try:
        with pytest.raises(UserError, match=r"\[sandbox\]"):
            pool.compare(r"\lim_{x\to0}\frac{\sin x}{x}", "1", 30)
    finally:
        pool.close()


@pytest.mark.slow
def test_a_comparison_can_stop_after_a_slice_of_cpu_time():
    hang, started = HOSTILE["integral"], time.monotonic()
    with pytest.raises(Undecided):
        same_answer(hang, "1/3", slice_s=0.1)
    assert same_answer("\\frac{2}{6}", "1/3", slice_s=0.1)
    assert not same_answer(hang, "1/3"), "it uses all of its CPU time"
    assert time.monotonic() - started >= worker_module.CPU_S / 2


@pytest.mark.slow
def test_workers_do_not_get_the_environment_of_the_caller():
    code = (
        "import os, pathlib; os.environ['SECRET_TOKEN'] = 'x'\n"
        "from rstar_lab.verify.pool import workers\n"
        "workers.warm_up()\n"
        "print('SECRET' in pathlib.Path(f'/proc/{workers._process.pid}/environ').read_text())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
