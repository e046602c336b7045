"""Environments served by OpenEnv (openenv-core): each action of the model is a call of the tool `act`.

Copy this file beside your tasks, and write a module that a recipe names (docs/environments.md):

    from openenv_environment import OpenEnv

    game = OpenEnv("http://127.0.0.1:8000")

Protocol: OpenEnv 0.3, JSON messages on the WebSocket /ws, with one session per connection. The package openenv-core is not
required.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from rstar_lab.common.errors import UserError
from rstar_lab.common.http_answers import limit_answers
from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.environments.base import Environment, ModelMessage, Observation
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.tools.base import ToolResult
from rstar_lab.untrusted.files import answer_json, reading

MAX_MESSAGE_BYTES = 16 * 2**20
CAPACITY_WAIT_S = 1.0  # pause before the next request if all sessions of the server are in use


class OpenEnv:
    """An OpenEnv server. Calling it creates the environment of one rollout, which opens its own session.

    url: URL of the server. timeout_s: time limit of each response in seconds. The first message starts with the
    problem's question. The problem's `info` entry `reset` has the parameters of the server's reset.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0):
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._schema: dict[str, Any] | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the tool `act`: its arguments are the fields of the server's action. Raises UserError."""
        if self._schema is None:
            with reading(f"OpenEnv server {self.url} returned no schema", error=UserError, errors=(httpx.HTTPError,)):
                with limit_answers(httpx.Client(timeout=self.timeout_s), max_s=self.timeout_s) as client:
                    answer = client.get(f"{self.url}/schema").raise_for_status()
                action = dict(answer_json(answer, dict)["action"])
            fields = {name: field for name, field in action.get("properties", {}).items() if name != "metadata"}
            about = " ".join(action.get("description", "").split()) or "Act in the environment."
            parameters = {"type": "object", "properties": fields, "required": action.get("required", [])}
            parameters |= {"$defs": action["$defs"]} if "$defs" in action else {}
            self._schema = {
                "type": "function",
                "function": {"name": "act", "description": about, "parameters": parameters},
            }
        return self._schema

    def __call__(self) -> "OpenEnvEnvironment":
        return OpenEnvEnvironment(self)


class OpenEnvEnvironment(Environment):
    """A session of an OpenEnv server. The rewards of its steps are the rewards of the turns; `done` ends the rollout."""

    def __init__(self, server: OpenEnv):
        self.server = server
        self.act = Act(self)
        self.connection: Any = None
        self.reward: float | None = None  # rewards of the actions since the last turn
        self.done = False

    @property
    def tools(self) -> Sequence[Any]:
        return (self.act,)

    async def reset(self, problem: Problem, seed: int) -> str:
        request = {"seed": seed % 2**31, **problem.info.get("reset", {})}
        while True:
            await self._connect()
            try:
                observed = await self.send("reset", request)
                break
            except ServerError as error:
                if error.code != "CAPACITY_REACHED":
                    raise
                await self.close()
                await asyncio.sleep(CAPACITY_WAIT_S)
        return f"{problem.question}\n\n{text_of(observed)}"

    async def step(self, message: ModelMessage) -> Observation:
        reward, self.reward = self.reward, None
        return Observation(reward=reward, done=self.done)

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()
            self.connection = None

    async def send(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the observation in the response. Raises ServerError, TimeoutError or ConnectionError."""
        from websockets.exceptions import ConnectionClosed

        if self.connection is None:
            raise ConnectionError(f"the session at {self.server.url} has ended")
        try:
            async with asyncio.timeout(self.server.timeout_s):
                # If the server closed the connection, `recv` returns the reason that it sent before.
                with contextlib.suppress(ConnectionClosed):
                    await self.connection.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self.connection.recv())
        except TimeoutError:
            await self.close()  # a late answer would be taken for the answer to the next message
            raise
        except ConnectionClosed as error:
            raise ConnectionError(f"OpenEnv server {self.server.url} closed the connection: {error}") from error
        if answer["type"] == "error":
            raise ServerError(answer["data"])
        observed = answer["data"]
        self.done = bool(observed.get("done"))
        if observed.get("reward") is not None and kind == "step":
            self.reward = (self.reward or 0.0) + float(observed["reward"])
        return observed

    async def _connect(self) -> None:
        try:
            from websockets.asyncio.client import connect
        except ModuleNotFoundError:
            raise UserError("environments of OpenEnv require websockets: pip install websockets") from None
        address = f"ws{self.server.url.removeprefix('http')}/ws"
        self.connection = await connect(address, max_size=MAX_MESSAGE_BYTES, proxy=None)


class ServerError(Exception):
    """An error that the server reports. code: OpenEnv's error code, such as VALIDATION_ERROR. fields: fields of the
    message `error`."""

    def __init__(self, fields: dict[str, Any]):
        self.code = fields.get("code", "")
        wrong = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in fields.get("errors", [])]
        super().__init__("; ".join([f"{self.code}: {fields.get('message', '')}", *wrong]))


class Act:
    """The tool of one environment: sends an action to the server and returns the observation as text."""

    def __init__(self, environment: OpenEnvEnvironment):
        self.environment = environment

    @property
    def schema(self) -> dict[str, Any]:
        return self.environment.server.schema

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        began, code = time.monotonic(), json.dumps(arguments, sort_keys=True)
        if self.environment.done:
            return ToolResult(Outcome.INVALID_ARGUMENTS, "The episode has ended.", code)
        try:
            outcome, text = Outcome.OK, text_of(await self.environment.send("step", arguments))
        except ServerError as error:
            invalid = error.code == "VALIDATION_ERROR"
            outcome, text = Outcome.INVALID_ARGUMENTS if invalid else Outcome.EXCEPTION, str(error)
        except TimeoutError:
            outcome = Outcome.TIMEOUT
            text = "TimeoutError: the environment did not answer in time; its session has ended."
        except OSError:
            outcome, text = Outcome.SANDBOX_ERROR, "The environment's server ended. This is no fault of the call."
        return ToolResult(outcome, text, code, run_s=time.monotonic() - began)

    async def close(self, traj_id: str) -> None:
        """Do nothing: the environment closes its session."""


def text_of(observed: dict[str, Any]) -> str:
    """Return an observation as text for the model: its only field if that is a text, else JSON without empty metadata."""
    fields = {name: value for name, value in observed["observation"].items() if name != "metadata" or value}
    values = list(fields.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, ensure_ascii=False)
