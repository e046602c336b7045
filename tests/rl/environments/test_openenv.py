"""The adapter for OpenEnv (examples/openenv_environment.py), against a server of the real library, which is installed in an
environment of its own."""

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from helpers.scripted_engine import ScriptedEngine

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.hardware.processes import free_port
from rstar_lab.rl.environments.loading import load_environment
from rstar_lab.rl.environments.mixture import RunEnvironment
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.plugins import source_hash
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import LimitsSection
from rstar_lab.rl.renderers.paper import render_tool_call
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.trajectory import StopReason

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from openenv_environment import OpenEnv

VERSION = "0.3.0"
SERVER = Path(__file__).parents[2] / "helpers" / "openenv_server.py"
TOKENIZER = train_tokenizer(["guess a number, higher or lower"], 300)
PROBLEM = Problem(problem_id="seven", question="Play.", answer="7", info={"reset": {"secret": 7}}, environment="game")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The URL of a server with two sessions."""
    folder = tmp_path_factory.mktemp("openenv") / "venv"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", folder / "bin" / "python", f"openenv-core=={VERSION}"]
    subprocess.run(install, check=True, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    port = free_port()
    server = subprocess.Popen([folder / "bin" / "python", SERVER, str(port), "2"])
    deadline = time.monotonic() + 60
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/schema", trust_env=False).raise_for_status()
            break
        except httpx.HTTPError:
            assert server.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.mark.soak
def test_rewards_of_openenv_steps_become_rewards_of_the_turns(url, tmp_path, monkeypatch):
    (tmp_path / "my_openenv.py").write_text(f"from openenv_environment import OpenEnv\n\ngame = OpenEnv({url!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    guesses = [3, 9, 7, 0]
    engine = ScriptedEngine(
        TOKENIZER, lambda _, turn: f"</reason>\n{render_tool_call('act', {'number': guesses[turn]})}"
    )
    environment = load_environment("game", "my_openenv:game", time_limit_s=30)
    own = RunEnvironment(environment.tools, lambda text, answer: 0.0, environment, {})
    context = RolloutContext(
        Codec(TOKENIZER, {}), {}, lambda text, answer: 0.0, LimitsSection(max_response_tokens=4000)
    )
    task = RolloutTask(PROBLEM, "t-0", "g", 0, seed=1)
    trajectory = asyncio.run(run_rollout(task, engine, context.with_environments({"game": own})))
    assert trajectory.stop_reason == StopReason.DONE
    assert [call.outcome for call in trajectory.calls] == [Outcome.OK] * 3
    assert trajectory.reward == pytest.approx(-0.1 - 0.1 + 1.0)
    first, _, third = (TOKENIZER.decode(prompt) for prompt in engine.prompts)
    assert "Play.\n\nGuess a number from 0 to 9." in first
    assert '"number"' in first and "Guess the secret number." in first  # the schema of the server's action
    assert re.findall("higher|lower", third.rpartition("Guess a number")[2]) == ["higher", "lower"]


@pytest.mark.soak
def test_the_same_seed_is_the_same_episode(url):
    async def secret_of(seed):
        environment = OpenEnv(url)()
        await environment.reset(PROBLEM.model_copy(update={"info": {}}), seed)
        answers = [(await environment.act({"number": n}, seed=0, traj_id="t")).text for n in range(10)]
        await environment.close()
        return answers.index("Right.")

    async def secrets():
        return [await secret_of(seed) for seed in (4, 4, 2**40 + 6)]

    first, again, third = asyncio.run(secrets())
    assert first == again == 4
    assert third == 6


@pytest.mark.soak
def test_every_failure_of_a_call_has_its_outcome(url):
    async def outcomes():
        server = OpenEnv(url, timeout_s=2.0)
        environment = server()
        await environment.reset(PROBLEM, 1)
        found = [await environment.act({"number": n}, seed=0, traj_id="t") for n in ("x", 666, 7, 7)]
        await environment.close()
        slow = server()
        await slow.reset(PROBLEM, 1)
        found += [await slow.act({"number": n}, seed=0, traj_id="t") for n in (99, 7)]
        return found

    malformed, raised, right, after, late, lost = asyncio.run(outcomes())
    assert (
        malformed.outcome == Outcome.INVALID_ARGUMENTS and "number: Input should be a valid integer" in malformed.text
    )
    assert raised.outcome == Outcome.EXCEPTION and "no such number" in raised.text
    assert (right.outcome, right.text) == (Outcome.OK, "Right.")
    assert (after.outcome, after.text) == (Outcome.INVALID_ARGUMENTS, "The episode has ended.")
    assert late.outcome == Outcome.TIMEOUT
    assert lost.outcome == Outcome.SANDBOX_ERROR


@pytest.mark.soak
def test_a_rollout_waits_for_a_free_session(url):
    async def wait():
        server = OpenEnv(url)
        playing = [server() for _ in range(2)]
        for environment in playing:
            await environment.reset(PROBLEM, 1)
        waiting = server()
        opening = asyncio.create_task(waiting.reset(PROBLEM, 1))
        done, _ = await asyncio.wait([opening], timeout=3.0)
        assert not done
        await playing[0].close()
        text = await asyncio.wait_for(opening, 20)
        await asyncio.gather(playing[1].close(), waiting.close())
        return text

    assert asyncio.run(wait()) == "Play.\n\nGuess a number from 0 to 9."


def test_a_missing_server_is_a_clear_error():
    with pytest.raises(UserError, match="returned no schema"):
        OpenEnv("http://127.0.0.1:9/").schema  # noqa: B018


def test_a_run_depends_on_the_file_that_makes_the_object(tmp_path, monkeypatch):
    """The hash of the file is part of a run's identity; the class OpenEnv is in another file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    hashes = []
    for i, port in enumerate((8000, 8001)):
        (tmp_path / f"openenv_{i}.py").write_text(
            f"from openenv_environment import OpenEnv\n\ngame = OpenEnv('http://127.0.0.1:{port}')\n"
        )
        hashes.append(source_hash(f"openenv_{i}:game", "rl.environments"))
    assert hashes[0] != hashes[1]
