"""Tests of programs that start processes which do not inherit their memory, and of how code and files are read."""

import asyncio

import pytest
import pytest_asyncio

from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox import Call, Limits, LocalSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox():
    async with LocalSandbox(Limits(timeout_s=10.0), workers=2) as sandbox:
        yield sandbox


POOL = """
import multiprocessing as mp
{before}
def f(x): return x * x
if __name__ == "__main__":
    {inside}
    with {pool} as pool:
        print(list(pool.map(f, [3])))
"""
EXECUTOR = "__import__('concurrent.futures').futures.ProcessPoolExecutor(1, mp_context=mp.get_context('{}'))"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize(
    ("before", "inside", "pool"),
    [
        ("", "", "mp.get_context('{method}').Pool(1)"),
        ("mp.set_start_method('{method}')", "", "mp.Pool(1)"),
        ("", "mp.set_start_method('{method}')", "mp.Pool(1)"),
        ("", "", EXECUTOR.replace("{}", "{method}")),
    ],
)
async def test_every_start_method_of_multiprocessing_works(sandbox, method, before, inside, pool):
    parts = {
        name: text.format(method=method) for name, text in (("before", before), ("inside", inside), ("pool", pool))
    }
    result = await sandbox.run(POOL.format(**parts))
    assert (result.outcome, result.stdout) == (Outcome.OK, "[9]\n"), result.stderr


async def test_the_file_of_a_program_holds_its_code(sandbox):
    code = "# ü\nprint(open(__file__, encoding='utf-8').read() == '# ü\\n' + 'x', __file__)"
    assert (await sandbox.run(code)).stdout == "False /box/main.py\n"
    assert (await sandbox.run("print(len(open(__file__).read()))")).stdout == "33\n"
    assert (await sandbox.run("import os\nprint(os.listdir('.'))")).stdout == "[]\n"


@pytest.mark.parametrize(
    "code", ["\ufeffprint(1)", "\ufefffrom __future__ import annotations\nprint(1)", "\ufeff\r\nprint(1)"]
)
async def test_a_byte_order_mark_is_not_part_of_the_code(sandbox, code):
    assert (await sandbox.run(code)).stdout == "1\n"
    cell = await sandbox.run_call(Call(code, session="marked"))
    assert (cell.outcome, cell.stdout) == (Outcome.OK, "1\n")


async def test_a_byte_order_mark_elsewhere_is_an_error(sandbox):
    assert (await sandbox.run("x = 1\n\ufeffprint(x)")).outcome == Outcome.SYNTAX_ERROR


async def test_programs_cannot_read_the_launchers_arguments(sandbox):
    """Programs are forks of the launcher, so they have its command line: it holds neither the caller's process id nor paths."""
    result = await sandbox.run("print(open('/proc/self/cmdline').read().split(chr(0))[1:])")
    assert result.stdout == "['-I', '-', '']\n"


async def test_ignored_and_blocked_signals_are_not_inherited(tmp_path):
    """A service that `nohup` started, or a thread that blocks signals, must not change how programs end."""
    script = tmp_path / "embed.py"
    script.write_text(
        "import asyncio, signal\n"
        "for number in (signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1): signal.signal(number, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])\n"
        "from rstar_lab.sandbox import LocalSandbox\n"
        "async def main():\n"
        "    async with LocalSandbox(workers=1) as sandbox:\n"
        "        for name in ('QUIT', 'HUP', 'USR1', 'USR2', 'TERM'):\n"
        "            result = await sandbox.run(f'import os, signal\\nos.kill(os.getpid(), signal.SIG{name})\\nprint(1)')\n"
        "            print(name, result.outcome, repr(result.stdout))\n"
        "asyncio.run(main())\n"
    )
    import sys

    process = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert output.decode() == "".join(f"{name} killed ''\n" for name in ("QUIT", "HUP", "USR1", "USR2", "TERM"))
