"""Chat with a model that runs Python in the sandbox. Each question runs the agent loop, and its events are streamed.

    async with open_chat("runs/tiny-rl/checkpoints/step=000034") as chat:
        reply = await chat.ask("How many primes are below 1000?")

`Chat.stream` yields events while the model generates; `view.show` prints them in a terminal or in a notebook.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rstar_lab.common.errors import UserError
from rstar_lab.rl.chat.events import Event, Kind, TurnSplitter
from rstar_lab.rl.engine import Completion, EngineError, Sampling
from rstar_lab.rl.engines.devices import visible_gpus
from rstar_lab.rl.engines.server import ServerEngine
from rstar_lab.rl.models.model import load_tokenizer
from rstar_lab.rl.models.model_folder import model_folder
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import LimitsSection
from rstar_lab.rl.renderers.base import PromptFormat, PromptStyle
from rstar_lab.rl.rollout.agent_loop import check_call, run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.rollout.records import TrainingLabels, call_rows, trajectory_row, transcript_row
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.serving.serve import ServeOptions, serving
from rstar_lab.rl.session import vocabulary
from rstar_lab.rl.tools.base import Tool, ToolResult
from rstar_lab.rl.tools.registry import make_tools
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.runs.writer import RunWriter
from rstar_lab.sandbox import Limits, LocalSandbox, SandboxClient
from rstar_lab.untrusted.files import read_json, reading

SLOW_ENGINE_TOKENS = 2048  # default limit of a reply with transformers, which needs minutes for more


class StreamingEngine(Protocol):
    """An engine that reports new tokens while it generates."""

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, on_tokens: Callable[[list[int]], None] | None = None
    ) -> Completion: ...


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Sampling and limits of a chat.

    max_tokens: limit of one reply, including tool responses; None: 30,000, or the rest of the context if that is less;
    2,048 with transformers on a CPU. seed: None: the time. tools: names as in the recipe key rl.tools. prompt_format: as the
    recipe key rl.prompt.format.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int | None = None
    max_turns: int = 30
    seed: int | None = None
    tools: tuple[str, ...] = ("python",)
    prompt_format: PromptFormat = "paper"


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to one question."""

    events: tuple[Event, ...]
    trajectory: Trajectory
    seconds: float

    @property
    def answer(self) -> str | None:
        """The content of the last box in the last answer."""
        return self.trajectory.answer

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that `chat --json` prints."""
        calls = [
            {"tool": call.tool, "code": call.code, "outcome": str(call.outcome), "response": call.response}
            for call in self.trajectory.calls
        ]
        return {
            "text": self.trajectory.text,
            "answer": self.answer,
            "said": "".join(event.text for event in self.events if event.kind in (Kind.ANSWER, Kind.TEXT)).strip(),
            "calls": calls,
            "turns": len(self.trajectory.turns),
            "stop_reason": str(self.trajectory.stop_reason),
            "response_tokens": len(self.trajectory.response_ids),
            "seconds": round(self.seconds, 3),
        }


class ConversationCodec(Codec):
    """A codec whose prompts continue the conversation so far."""

    def __init__(self, tokenizer: Any, tools: Mapping[str, Tool], prompt_format: PromptFormat):
        super().__init__(tokenizer, tools, PromptStyle(prompt_format))
        self.history_ids: list[int] = []  # tokens of the conversation so far

    def prompt_ids(self, question: str) -> list[int]:
        if not self.history_ids:
            return super().prompt_ids(question)
        return self.history_ids + self.next_question_ids(question, self.history_ids[-1])

    def append(self, trajectory: Trajectory) -> None:
        self.history_ids = trajectory.prompt_ids + trajectory.response_ids
        if self.history_ids[-1] not in self.stop_token_ids:
            self.history_ids.append(self.end_id)


class _EventEmittingEngine:
    """An engine that emits events while it generates."""

    def __init__(self, engine: StreamingEngine, codec: Codec, on_event: Callable[[Event], None]):
        self.engine, self.codec, self.on_event = engine, codec, on_event
        self.error: EngineError | None = None

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        renderer, ids, emitted = self.codec.renderer, list[int](), ""
        splitter = TurnSplitter(Kind.REASON if renderer.thinks_first else Kind.TEXT, renderer.syntax)

        def on_tokens(new: list[int]) -> None:
            nonlocal emitted
            ids.extend(new)
            text = self.codec.decode(ids)
            if not text.endswith("�"):  # the last token ends within a character
                self._emit(splitter.feed(text[len(emitted) :]))
                emitted = text

        try:
            completion = await self.engine.generate(prompt_ids, sampling, on_tokens)
        except EngineError as error:
            self.error = error
            raise
        text = self.codec.decode(completion.token_ids)
        self._emit(splitter.feed(text[len(emitted) :]))
        self._emit(splitter.end(self.codec.calls(text)))
        return completion

    def _emit(self, events: Sequence[Event]) -> None:
        for event in events:
            self.on_event(event)


@dataclass(frozen=True, slots=True)
class _EventEmittingTool:
    """A tool that emits its result as an event."""

    tool: Tool
    on_event: Callable[[Event], None]

    @property
    def schema(self) -> dict[str, Any]:
        return self.tool.schema

    async def __call__(self, arguments: dict[str, Any], *, seed: int, traj_id: str) -> ToolResult:
        result = await self.tool(arguments, seed=seed, traj_id=traj_id)
        self.on_event(Event(Kind.RESULT, result.text, self.schema["function"]["name"], str(result.outcome)))
        return result

    async def close(self, traj_id: str) -> None:
        await self.tool.close(traj_id)


@dataclass(slots=True)
class Chat:
    """One conversation: the agent loop of training and evaluation, one rollout per question. `open_chat` creates it."""

    engine: StreamingEngine
    codec: ConversationCodec
    tools: Mapping[str, Tool]
    options: ChatOptions
    name: str
    log: RunWriter | None = None
    replies: list[Reply] = field(default_factory=list)

    async def stream(self, question: str) -> AsyncIterator[Event]:
        """Yield the events of a reply while it is generated, STOP last. Then append the reply to `replies`."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        events: list[Event] = []
        started = time.monotonic()
        task = asyncio.create_task(self._reply(question, queue.put_nowait))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while event := await queue.get():
                events.append(event)
                yield event
            trajectory = replace(task.result(), truth="")
        finally:
            task.cancel()
        stop = Event(Kind.STOP, str(trajectory.stop_reason))
        self.replies.append(Reply((*events, stop), trajectory, time.monotonic() - started))
        if self.log:
            _write_reply(self.log, trajectory)
        yield stop

    async def _reply(self, question: str, on_event: Callable[[Event], None]) -> Trajectory:
        options, number = self.options, len(self.replies)
        engine = _EventEmittingEngine(self.engine, self.codec, on_event)
        context = RolloutContext(
            self.codec,
            {name: _EventEmittingTool(tool, on_event) for name, tool in self.tools.items()},
            lambda text, answer: 0.0,
            LimitsSection(max_response_tokens=options.max_tokens or 30_000, max_turns=options.max_turns),
            options.temperature,
            options.top_p,
        )

        def report_invalid_calls(text: str, last: bool) -> None:
            """Emit the error responses of calls that reach no tool; `_EventEmittingTool` emits the other results."""
            for call in () if last else self.codec.calls(text):
                if error := check_call(call, self.tools, self.codec.renderer):
                    on_event(Event(Kind.RESULT, error.text, call.name or "", str(error.outcome)))

        seed = derive_seed(options.seed if options.seed is not None else time.time_ns(), "chat", number)
        problem = Problem(problem_id=f"{self.name}-{number}", question=question, answer="-")
        task = RolloutTask(problem, f"{self.name}-{number:03d}", group_id=self.name, sample=number, seed=seed)
        trajectory = await run_rollout(task, engine, context, on_turn=report_invalid_calls)
        if engine.error:
            raise UserError(str(engine.error))
        self.codec.append(trajectory)
        return trajectory

    async def ask(self, question: str) -> Reply:
        """Return the complete reply."""
        async for _ in self.stream(question):
            pass
        return self.replies[-1]

    def reset(self) -> None:
        """Start a new conversation; earlier replies stay in `replies` and in the run."""
        self.codec.history_ids = []


@asynccontextmanager
async def open_chat(
    model_or_url: str,
    options: ChatOptions = ChatOptions(),
    *,
    tokenizer: str | Path | None = None,
    engine: str = "auto",
    sandbox: str = "local",
    save: bool = False,
    name: str | None = None,
    runs_dir: str | Path = "runs",
) -> AsyncIterator[Chat]:
    """Open a chat with a model folder, the last model of a run, or a vLLM server.

    Args:
        model_or_url: folder, run, or URL of a vLLM server, which is called with token ids.
        options: sampling and limits.
        tokenizer: folder of the tokenizer; default: the model's folder.
        engine: engine for a model folder: vllm, transformers, or auto (vLLM on a GPU, else transformers, which starts faster).
        sandbox: "local", or the URL of `rstar-lab sandbox serve`.
        save: store the chat as run `name` in `runs_dir`.
        name: run id. Default: made from the time.
        runs_dir: folder of runs.

    Raises UserError if the server or the model cannot be used.
    """
    runs_dir, name = Path(runs_dir), name or time.strftime("chat-%Y%m%d-%H%M%S")
    async with AsyncExitStack() as stack:
        sandbox_client: Any = LocalSandbox(Limits(), 1) if sandbox == "local" else SandboxClient(sandbox)
        client = await stack.enter_async_context(sandbox_client)
        tools = make_tools(options.tools, client, prompt_format=options.prompt_format)
        if model_or_url.startswith(("http://", "https://")):
            server = await _server(stack, model_or_url)
            inference: StreamingEngine = server
            folder, label = tokenizer or server.folder, server.model
            if folder is None:
                raise UserError(
                    f"{server.url}: the folder of its model {label} is not on this machine; give its tokenizer with --tokenizer FOLDER"
                )
        else:
            folder = model_folder(model_or_url, runs_dir)
            label = str(folder)
            if engine == "vllm" or (engine == "auto" and visible_gpus()):
                replicas = await stack.enter_async_context(serving(ServeOptions(folder, port=0)))
                inference = await _server(stack, replicas[0].url)
            else:
                inference = await _transformers(stack, folder)
                options = replace(options, max_tokens=options.max_tokens or SLOW_ENGINE_TOKENS)
        folder = Path(tokenizer or folder)
        with reading(folder, "; give another --tokenizer", UserError):
            codec = ConversationCodec(load_tokenizer(folder), tools, options.prompt_format)
        writer = None
        if save:
            recipe, seed = {"model": label, "chat": asdict(options)}, options.seed or 0
            writer = stack.enter_context(RunWriter.open(runs_dir, name, kind="chat", recipe=recipe, seed=seed))
            writer.write_vocabulary(vocabulary(codec.tokenizer))
        yield Chat(inference, codec, tools, options, name, writer)
        if writer is not None:
            writer.finish("finished")


def _write_reply(writer: RunWriter, trajectory: Trajectory) -> None:
    """Write one question and its reply."""
    labels = TrainingLabels(True)
    writer.write_step(
        "chat",
        (writer.last_step or 0) + 1,
        trajectories=[trajectory_row(trajectory, labels) | {"reward": None}],
        calls=call_rows(trajectory),
        transcripts=[transcript_row(trajectory, labels, arrays=True)],
        metrics={"response_tokens": len(trajectory.response_ids), "calls": len(trajectory.calls)},
    )


async def _server(stack: AsyncExitStack, url: str) -> ServerEngine:
    engine = await stack.enter_async_context(aclosing(ServerEngine(url)))
    await engine.start()
    return engine


async def _transformers(stack: AsyncExitStack, folder: Path) -> StreamingEngine:
    from rstar_lab.rl.engines.hf import HfEngine

    config = read_json(folder / "config.json", dict)
    engine = await stack.enter_async_context(aclosing(HfEngine()))
    await engine.start(folder, {"dtype": config.get("dtype") or config.get("torch_dtype") or "float32"})
    return engine
