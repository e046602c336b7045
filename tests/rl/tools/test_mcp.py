"""Tools of real MCP servers, over standard streams and over HTTP."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import INFRASTRUCTURE_FAILURES, Outcome
from rstar_lab.hardware.processes import free_port
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.renderers.paper import PaperRenderer
from rstar_lab.rl.rollout.agent_loop import execute_call
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.tool_calls import ToolCall

pytest.importorskip("mcp")
SERVER = Path(__file__).parents[2] / "helpers" / "mcp_server.py"
STDIO = f"mcp+stdio:{sys.executable} {SERVER}"


@pytest.fixture(scope="module")
def http_server():
    port = free_port()
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        for _ in range(300):
            try:
                httpx.get(url)
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        yield f"mcp+{url}"
    finally:
        process.kill()
        process.wait()


async def call(tools, name, traj_id="t", **arguments):
    result = await execute_call(
        ToolCall(name, arguments, None, ""),
        tools,
        PaperRenderer(PromptStyle()),
        seed=0,
        traj_id=traj_id,
        max_chars=1000,
    )
    return result.outcome, result.text


def children() -> int:
    found = psutil.Process().children(recursive=True)
    # A child of an earlier test may be a zombie, which has no command line.
    return sum(str(SERVER) in process.as_dict(["cmdline"], ad_value=[])["cmdline"] for process in found)


@pytest.mark.slow
def test_all_tools_of_a_server_have_their_schemas():
    tools = make_tools([STDIO], None)
    assert sorted(tools) == ["count", "die", "divide", "hang"]
    function = tools["count"].schema["function"]
    assert "Add to a counter" in function["description"]
    assert function["parameters"]["properties"]["step"]["type"] == "integer"
    assert tools["hang"].schema["function"]["parameters"]["properties"] == {}
    assert RlSection(tools=("python", STDIO)).tools[1] == STDIO
    assert children() == 0


@pytest.mark.slow
async def test_each_rollout_has_its_own_state_and_process():
    tools = make_tools([STDIO], None)
    assert await call(tools, "count", "a") == (Outcome.OK, "1")
    assert await call(tools, "count", "a", step=5) == (Outcome.OK, "6")
    assert await call(tools, "count", "b") == (Outcome.OK, "1")
    assert children() == 2
    for tool in tools.values():
        await tool.close("a")
    assert children() == 1
    assert await call(tools, "count", "a") == (Outcome.OK, "1")
    for traj_id in ("a", "b"):
        await tools["count"].close(traj_id)
    assert children() == 0


@pytest.mark.slow
async def test_wrong_arguments_and_errors_of_a_tool_count_against_the_model():
    tools = make_tools([STDIO], None)
    outcome, text = await call(tools, "count", step="many")
    assert outcome is Outcome.INVALID_ARGUMENTS and "'step'" in text
    outcome, text = await call(tools, "divide", a=1.0)
    assert outcome is Outcome.EXCEPTION and "divide" in text
    assert await call(tools, "divide", a=1.0, b=4.0) == (Outcome.OK, "0.25")
    await tools["count"].close("t")


@pytest.mark.slow
async def test_a_server_that_dies_is_not_the_models_fault():
    tools = make_tools([STDIO], None)
    assert await call(tools, "count") == (Outcome.OK, "1")
    outcome, text = await call(tools, "die")
    assert outcome in INFRASTRUCTURE_FAILURES and "state is lost" in text
    assert await call(tools, "count") == (Outcome.OK, "1")  # a new session
    await tools["count"].close("t")
    assert children() == 0


@pytest.mark.slow
async def test_a_tool_that_hangs_ends_with_a_timeout():
    tools = make_tools([STDIO], None, user_timeout_s=5.0)
    outcome, text = await asyncio.wait_for(call(tools, "hang"), 30)
    assert outcome is Outcome.TIMEOUT and "time limit" in text
    await tools["count"].close("t")
    assert children() == 0


async def test_tools_over_http(http_server):
    tools = make_tools([http_server], None)
    assert await call(tools, "divide", a=9.0, b=3.0) == (Outcome.OK, "3.0")
    outcome, text = await call(tools, "divide", a=1.0)
    assert outcome is Outcome.EXCEPTION and "divide" in text
    await tools["divide"].close("t")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("mcp+stdio:", "a command is missing"),
        ("mcp+stdio:/no/such/program", "its tools could not be listed: FileNotFoundError"),
        (f"mcp+stdio:{sys.executable} -c pass", "its tools could not be listed"),
        ("mcp+http://127.0.0.1:9/mcp", "its tools could not be listed"),
    ],
)
def test_a_server_that_cannot_be_reached_is_an_error(address, message):
    with pytest.raises(UserError, match=message):
        make_tools([address], None, user_timeout_s=10.0)
