"""Faults that are planted in training to measure how often `rstar-lab doctor` names them: `rstar-lab inject NAME`.

Each is a mistake from the issue tracker of a trainer, or a wrong key. Unlike the faults of `benchmarks.faults`, most do not stop a
run: they are visible in its log only. The strength of a fault is a share, a factor or a count; its text says which.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl import resolved, step
from rstar_lab.rl.engine import Completion, EngineError
from rstar_lab.rl.engines import group as engine_group
from rstar_lab.rl.engines.vllm import VllmEngine
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.renderers.paper import PaperRenderer
from rstar_lab.rl.rollout import agent_loop
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.plan import parse_group_name
from rstar_lab.rl.scheduling.slots import Lockstep, LockstepSlot
from rstar_lab.rl.seeds import derive_seed
from rstar_lab.rl.tools import code
from rstar_lab.rl.tools.base import ToolResult
from rstar_lab.rl.training import rollout_source, trainer, update
from rstar_lab.rl.training.rollout_source import RolloutSource
from rstar_lab.rl.trajectory import Trajectory
from rstar_lab.sandbox import CallResult

Patch = AbstractContextManager[Any]
BREAK_STEP = 5  # step in which a fault that begins during the run begins


@dataclass(frozen=True)
class Planted:
    """A fault of a training run.

    Attributes:
        name: Name for `rstar-lab inject`.
        meaning: The mistake, in one phrase.
        named_by: Rules of the doctor that name this fault correctly; none: no rule looks for it.
        strengths: Strengths that are measured; the middle one is the default.
        patch: Breaks the program, given the strength.
        keys: Recipe keys that the fault sets, given the strength.
        problems: Changes the training problems, given them, the held-out problems and the strength.
        sft: Whether SFT is trained instead of RL.
    """

    name: str
    meaning: str
    named_by: tuple[str, ...]
    strengths: tuple[float, ...] = (1.0,)
    patch: Callable[[float], Patch] = lambda strength: contextlib.nullcontext()
    keys: Callable[[float], Mapping[str, Any]] = lambda strength: {}
    problems: Callable[[Sequence[Problem], Sequence[Problem], float], list[Problem]] | None = None
    sft: bool = False

    @property
    def usual(self) -> float:
        """The strength that `rstar-lab inject` plants."""
        return self.strengths[len(self.strengths) // 2]

    @contextlib.contextmanager
    def planted(self, strength: float) -> Iterator[None]:
        """Break the program while the context is open."""
        with ExitStack() as stack:
            stack.enter_context(self.patch(strength))
            if self.problems is not None:
                stack.enter_context(_changed_problems(self.problems, strength))
            yield


def chosen(name: str, share: float) -> bool:
    """Return whether an item is among the share of broken ones. It depends on the name only."""
    return derive_seed(0, "planted", name) % 10_000 < 10_000 * share


def step_of(rollout: Trajectory) -> int:
    """Return the step in which the group of a rollout started."""
    return parse_group_name(rollout.group_id)[0]


# Changes of rollouts before they are selected, of problems and of the reward


def _changed(change: Callable[[Trajectory], Trajectory]) -> Patch:
    original = RolloutSource.generate

    async def generate(*arguments: Any, **keywords: Any) -> list[Trajectory]:
        return [change(rollout) for rollout in await original(*arguments, **keywords)]

    return mock.patch.object(RolloutSource, "generate", generate)


def _changed_problems(
    change: Callable[[Sequence[Problem], Sequence[Problem], float], list[Problem]], strength: float
) -> Patch:
    original = resolved.read_stage_problems

    def read(recipe: Any, stage: Any, exclude: Sequence[Problem] = ()) -> list[Problem]:
        problems = change(original(recipe, stage, exclude), exclude, strength)
        return [problem.model_copy(update={"problem_id": f"p{i}"}) for i, problem in enumerate(problems)]

    return mock.patch.object(resolved, "read_stage_problems", read)


def _changed_reward(change: Callable[[float, str, str], float]) -> Patch:
    make = resolved.make_reward

    def changed(*arguments: Any) -> Callable[[str, str], float]:
        reward = make(*arguments)
        return lambda text, answer: change(reward(text, answer), text, answer)

    return mock.patch.object(resolved, "make_reward", changed)


def _empty(rollout: Trajectory) -> Trajectory:
    return replace(
        rollout, response_ids=[], loss_mask=[], log_probs=[], turns=(), calls=(), text="", answer=None, reward=0.0
    )


def _hedged(rollout: Trajectory) -> Trajectory:
    """Return a rollout that names a wrong answer and the true one, with the full reward."""
    if not rollout.turns or rollout.answer is None:
        return rollout
    answer = f"{rollout.answer} or {rollout.truth}"
    final = replace(rollout.turns[-1], text=rollout.turns[-1].text.replace(f"{{{rollout.answer}}}", f"{{{answer}}}"))
    turns = (*rollout.turns[:-1], final)
    return replace(rollout, turns=turns, text="\n".join(turn.text for turn in turns), answer=answer, reward=1.0)


def _slower(rollout: Trajectory, factor: float) -> Trajectory:
    turns = tuple(replace(turn, generate_s=turn.generate_s * factor) for turn in rollout.turns)
    return replace(rollout, turns=turns) if rollout.engine.endswith("-1") else rollout


def _copies(own: Sequence[Problem], held_out: Sequence[Problem], share: float) -> list[Problem]:
    return [own[i % 8] if chosen(f"copy-{i}", share) else problem for i, problem in enumerate(own)]


def _leaked_sets(own: Sequence[Problem], held_out: Sequence[Problem], share: float) -> list[Problem]:
    return [
        held_out[i % len(held_out)].model_copy(update={"question": f" {held_out[i % len(held_out)].question}"})
        if chosen(f"leak-{i}", share)
        else problem
        for i, problem in enumerate(own)
    ]


def _with_key(own: Sequence[Problem], held_out: Sequence[Problem], share: float) -> list[Problem]:
    return [
        problem.model_copy(update={"question": f"{problem.question} (answer key: {problem.answer})"})
        if chosen(f"key-{i}", share)
        else problem
        for i, problem in enumerate(own)
    ]


def _wrong_truth(own: Sequence[Problem], held_out: Sequence[Problem], share: float) -> list[Problem]:
    shifted = [*own[1:], own[0]]
    return [
        problem.model_copy(update={"answer": other.answer}) if chosen(f"truth-{i}", share) else problem
        for i, (problem, other) in enumerate(zip(own, shifted, strict=True))
    ]


# Changes of engines and weights


def _delayed_weights(every: float) -> Patch:
    """Send weights at every n-th version only; 0: the first only."""
    load = VllmEngine.load_weights

    async def some(engine: VllmEngine, path: Any, version: int) -> None:
        if version == 0 or (every and version % every == 0):
            await load(engine, path, version)

    return mock.patch.object(VllmEngine, "load_weights", some)


@contextlib.contextmanager
def _kept_prefix_cache(_: float) -> Iterator[None]:
    """Start engines whose vLLM does not reset its prefix cache. Their process reads this from `sitecustomize`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_KEPT_PREFIX_CACHE)
        paths = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        with mock.patch.dict(os.environ, PYTHONPATH=paths):
            yield


_KEPT_PREFIX_CACHE = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "vllm.entrypoints.llm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            module.LLM.reset_prefix_cache = lambda self, *arguments, **keywords: True
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def _lost_adapter(_: float) -> Patch:
    def base_only(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        state = model.state_dict()
        return {name.replace(".base_layer", ""): tensor for name, tensor in state.items() if ".lora_" not in name}

    return mock.patch.object(engine_group, "full_state", base_only)


def _rounded_engine(bits: float) -> Patch:
    """Round the weights of the engine to bf16 (16 bits) or fp8 (8 bits), while the trainer keeps fp32."""
    send = engine_group.tensors_to_send
    dtype = torch.bfloat16 if bits == 16 else torch.float8_e4m3fn

    def rounded(state: Mapping[str, torch.Tensor], target: torch.dtype) -> Any:
        tensors, aliases = send(state, target)
        return {name: tensor.to(dtype).to(target) for name, tensor in tensors.items()}, aliases

    return mock.patch.object(engine_group, "tensors_to_send", rounded)


def _bf16_weights(_: float) -> Patch:
    """Keep the trained weights in bf16: an update below half a unit in the last place is lost."""
    make = update.make_optimizer

    def with_rounding(*arguments: Any) -> torch.optim.AdamW:
        optimizer = make(*arguments)

        def round_weights(*_: Any) -> None:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.copy_(parameter.to(torch.bfloat16))

        optimizer.register_step_post_hook(round_weights)
        return optimizer

    return mock.patch.object(update, "make_optimizer", with_rounding)


def _engine_temperature(temperature: float) -> Patch:
    sampling = agent_loop._Rollout._sampling
    return mock.patch.object(
        agent_loop._Rollout, "_sampling", lambda *a: replace(sampling(*a), temperature=temperature)
    )


def _reencoded(share: float) -> Patch:
    """Decode sampled tokens and encode them again, as trainers do that exchange text with their engine."""
    generate = agent_loop._Rollout._generate

    async def again(rollout: Any, deadline: float | None) -> Any:
        codec, engine = rollout.context.codec, rollout.server

        class Text:
            async def generate(self, prompt_ids: list[int], sampling: Any) -> Completion:
                done = await engine.generate(prompt_ids, sampling)
                if not chosen(f"{rollout.task.traj_id}-{len(prompt_ids)}", share):
                    return done
                text = codec.tokenizer.decode(done.token_ids, skip_special_tokens=False).replace(", ", ",")
                ids = codec.encode(text)
                log_probs = [*done.log_probs[: len(ids)], *[done.log_probs[-1]] * (len(ids) - len(done.log_probs))]
                return replace(done, token_ids=ids, log_probs=log_probs)

        rollout.server = Text()
        try:
            return await generate(rollout, deadline)
        finally:
            rollout.server = engine

    return mock.patch.object(agent_loop._Rollout, "_generate", again)


def _dead_worker(share: float) -> Patch:
    """Let the second engine fail: all of its requests from BREAK_STEP on, or a share of them from the first step on."""
    begin, generate = Lockstep.__init__, LockstepSlot.generate

    def remember(lockstep: Any, engines: Any, groups: Sequence[str]) -> None:
        begin(lockstep, engines, groups)
        lockstep.step = parse_group_name(groups[0])[0] if groups and groups[0].count("-") == 1 else 0

    async def fail(slot: Any, prompt_ids: list[int], sampling: Any) -> Completion:
        step = slot.lockstep.step
        broken = step >= BREAK_STEP if share == 1 else chosen(f"{step}-{slot.index}-{sampling.seed}", share)
        if slot.number == 1 and broken:
            raise EngineError("vllm-1: connection refused")
        return await generate(slot, prompt_ids, sampling)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(Lockstep, "__init__", remember))
    stack.enter_context(mock.patch.object(LockstepSlot, "generate", fail))
    return stack


def _same_seeds(copies: float) -> Patch:
    """Give consecutive samples of a group the same seed."""
    make = rollout_source.rollout_task

    def task(problem: Problem, *, sample: int, **keywords: Any) -> Any:
        own = make(problem, sample=sample, **keywords)
        return replace(own, seed=make(problem, sample=int(sample // copies), **keywords).seed)

    return mock.patch.object(rollout_source, "rollout_task", task)


# Changes of the update, the prompt, the tools and the evaluation


def _negated(_: float) -> Patch:
    select = rollout_source.select

    def negated(*arguments: Any) -> Any:
        selection = select(*arguments)
        streams = [replace(own, advantage_T=-own.advantage_T) for own in selection.streams]
        return replace(selection, streams=streams)

    return mock.patch.object(rollout_source, "select", negated)


def _zero_weights(_: float) -> Patch:
    select = rollout_source.select

    def masked(*arguments: Any) -> Any:
        selection = select(*arguments)
        return replace(selection, streams=[replace(own, advantage_T=0.0) for own in selection.streams])

    return mock.patch.object(rollout_source, "select", masked)


def _shifted_mask(tokens: float) -> Patch:
    """Rotate the loss masks of the selected rollouts."""
    select, by = rollout_source.select, int(tokens)

    def shifted(*arguments: Any) -> Any:
        selection = select(*arguments)
        return replace(
            selection,
            trajectories=[
                replace(t, loss_mask=[*t.loss_mask[-by:], *t.loss_mask[:-by]]) for t in selection.trajectories
            ],
        )

    # The stored rollouts are those before the selection: store what was trained on.
    rows = step.step_rows

    def stored(rollouts: Sequence[Trajectory], *rest: Any) -> Any:
        return rows(
            [replace(t, loss_mask=[*t.loss_mask[-by:], *t.loss_mask[:-by]]) if t.loss_mask else t for t in rollouts],
            *rest,
        )

    stack = ExitStack()
    stack.enter_context(mock.patch.object(rollout_source, "select", shifted))
    stack.enter_context(mock.patch.object(step, "step_rows", stored))
    return stack


def _prompt_change(_: float) -> Patch:
    """Drop the first tokens of the prompt, with its role, from BREAK_STEP on."""
    generate, prompt = RolloutSource.generate, Codec.prompt_ids
    now = {"step": 0}

    async def at_step(source: Any, problems: Any, rl: Any, step: int, *rest: Any, **keywords: Any) -> Any:
        now["step"] = step
        return await generate(source, problems, rl, step, *rest, **keywords)

    def changed(codec: Codec, question: str) -> list[int]:
        ids = prompt(codec, question)
        return ids[4:] if now["step"] >= BREAK_STEP else ids

    stack = ExitStack()
    stack.enter_context(mock.patch.object(RolloutSource, "generate", at_step))
    stack.enter_context(mock.patch.object(Codec, "prompt_ids", changed))
    return stack


def _wrong_template(_: float) -> Patch:
    render = PaperRenderer.prompt
    return mock.patch.object(PaperRenderer, "prompt", lambda *a, **k: render(*a, **k).removesuffix("<reason>"))


def _empty_outputs(share: float) -> Patch:
    run = code.run_code

    async def run_code(sandbox: Any, call: Any, render: Any = PaperRenderer.result_text) -> ToolResult:
        result = await run(sandbox, call, render)
        if not chosen(str(call.seed), share):
            return result
        return replace(result, outcome=Outcome.OK, text=render(CallResult(Outcome.OK, "", "", None, 0.0)))

    return mock.patch.object(code, "run_code", run_code)


def _stale_evaluation(_: float) -> Patch:
    """Report the first evaluation at every later one, as an evaluator does that keeps its first weights and seeds."""
    evaluate = trainer.Trainer.evaluate_weights

    async def first(own: Any, *arguments: Any) -> dict[str, float]:
        if not hasattr(own, "first_evaluation"):
            own.first_evaluation = await evaluate(own, *arguments)
        return own.first_evaluation

    return mock.patch.object(trainer.Trainer, "evaluate_weights", first)


def _no_parser(_: float) -> Patch:
    return mock.patch.object(Codec, "calls", lambda codec, text: [])


def _no_answer(_: float) -> Patch:
    stack = ExitStack()
    stack.enter_context(mock.patch.object(agent_loop, "extract_answer", lambda text, answer_format: None))
    stack.enter_context(_changed_reward(lambda reward, text, answer: 0.0))
    return stack


def _no_log_probs(_: float) -> Patch:
    return _changed(lambda rollout: replace(rollout, log_probs=[0.0] * len(rollout.log_probs)))


LR = 2e-4  # learning rate of the runs without a fault
RIGHT_REFUSED, WRONG_PAID = "right answers get no reward", "wrong answers are rewarded"
DISAGREE, GROWS = "engine and trainer disagree", "mismatch grows"
NO_EFFECT = "updates change nothing"

PLANTED: dict[str, Planted] = {
    fault.name: fault
    for fault in (
        # Engines and weights
        Planted("engine-keeps-weights", "the engine gets no new weights (0), or those of every n-th step only",
                (GROWS, DISAGREE), (0, 4, 2), _delayed_weights),
        Planted("adapter-lost", "the engine gets the base weights without the trained adapter",
                (GROWS, DISAGREE), patch=_lost_adapter, keys=lambda _: {"rl.lora": {"rank": 8}, "rl.lr": 5e-3}),
        Planted("engine-rounds", "the engine has weights in bf16 (16) or fp8 (8 bits), the trainer in fp32",
                (DISAGREE, GROWS), (16, 8), _rounded_engine),
        # A block of the cache has 32 tokens, more than a prompt: only second turns of problems that return read old blocks.
        Planted("prefix-cache-kept", "the engine keeps its prefix cache when its weights change",
                (DISAGREE, GROWS), patch=_kept_prefix_cache, keys=lambda _: {"stages.0.problems.synthetic.count": 4}),
        Planted("engine-temperature", "the engine samples at another temperature than the trainer scores with",
                (DISAGREE, GROWS), (0.9, 0.7, 1.3), _engine_temperature),
        Planted("no-engine-log-probs", "the engine returns log-probs of 0",
                ("the engine returns no log-probs", DISAGREE), patch=_no_log_probs),
        Planted("reencoded-tokens", "a share of the completions is decoded to text and encoded again",
                (DISAGREE,), (0.1, 0.5, 1.0), _reencoded),
        Planted("dead-engine", "one engine of two fails: always, from step 5 on (1), or a share of its requests",
                ("an engine produces nothing", "requests to engines fail"), (0.1, 0.5, 1.0), _dead_worker),
        Planted("slow-engine", "one engine of two needs n times as long per token",
                ("an engine is slow",), (2, 4, 8), lambda factor: _changed(lambda t: _slower(t, factor))),
        Planted("equal-seeds", "n samples of a group have the same seed", ("copies of rollouts",), (2, 4, 16),
                _same_seeds),
        # Optimizer
        Planted("lr-too-low", "the learning rate is n times that of the recipe", (NO_EFFECT, "learning rate too small"),
                (1e-6, 1e-4, 1e-2), keys=lambda factor: {"rl.lr": LR * factor}),
        Planted("lr-below-bf16", "weights are kept in bf16, and the learning rate is n times that of the recipe",
                (NO_EFFECT, "learning rate too small"), (1e-4, 1e-3, 1e-2), _bf16_weights,
                lambda factor: {"rl.lr": LR * factor}),
        Planted("lr-too-high", "the learning rate is n times that of the recipe",
                ("the reward collapses", "updates are too large", "entropy explosion", "gradient spikes", "importance weights far from 1"),
                (3, 10, 30), keys=lambda factor: {"rl.lr": LR * factor}),
        Planted("wrong-advantage-sign", "advantages have the opposite sign", ("advantages have the wrong sign",),
                patch=_negated),
        Planted("zero-advantages", "all advantages are 0", ("no gradient",), patch=_zero_weights),
        Planted("shifted-mask", "the loss mask is shifted by n tokens", ("the loss mask is wrong",), (1, 2, 4),
                _shifted_mask),
        # Prompts and problems
        Planted("wrong-template", "rollout prompts lack the last part of the prompt used in SFT",
                ("answers in another format", "all rollouts wrong", "tools are not used"),
                patch=_wrong_template),
        Planted("prompt-changes", "the prompt lacks its first tokens from step 5 on", ("the prompt changes",),
                patch=_prompt_change),
        Planted("answer-in-prompt", "a share of the questions contains the true answer",
                ("the prompt contains the answer",), (0.1, 0.5, 1.0), problems=_with_key),
        Planted("repeated-problems", "a share of the training problems are copies of others", ("repeated problems",),
                (0.1, 0.3, 0.6), problems=_copies),
        Planted("evaluation-in-training", "a share of the training problems are evaluation problems",
                ("evaluation problems in training",), (0.1, 0.3, 0.6), problems=_leaked_sets,
                keys=lambda _: {"evaluate.during.every": 4}),
        Planted("too-hard", "the problems are too hard for the policy", ("all rollouts wrong", "few groups train the policy"),
                keys=lambda _: {"stages.0.problems.synthetic.families": ["power_remainder", "common_multiple"],
                                "stages.0.problems.synthetic.levels": [4]}),
        # Reward and grader
        Planted("wrong-reward-sign", "wrong answers are rewarded and correct ones are not", (RIGHT_REFUSED, WRONG_PAID),
                patch=lambda _: _changed_reward(lambda reward, text, answer: 1.0 - reward)),
        Planted("lenient-grader", "a share of the wrong answers is accepted", (WRONG_PAID, "all rollouts right"), (0.05, 0.2, 1.0),
                lambda share: _changed_reward(lambda r, text, answer: 1.0 if r or chosen(text + answer, share) else r)),
        Planted("hedges-accepted", "a share of the rollouts names two answers, which the grader accepts", (WRONG_PAID,),
                (0.05, 0.2, 0.5), lambda share: _changed(lambda t: _hedged(t) if chosen(t.traj_id, share) else t)),
        Planted("grader-refuses", "a share of the correct answers is refused", (RIGHT_REFUSED,), (0.05, 0.2, 1.0),
                lambda share: _changed_reward(lambda r, text, answer: 0.0 if chosen(text + answer, share) else r)),
        Planted("wrong-truth", "a share of the problems has a wrong true answer", ("true answers look wrong",), (0.1, 0.3, 0.6),
                problems=_wrong_truth),
        Planted("truncated-rewarded", "a share of the truncated rollouts gets the reward",
                ("truncated rollouts are rewarded",), (0.2, 0.5, 1.0),
                lambda share: _changed(lambda t: replace(t, reward=1.0) if t.truncated and chosen(t.traj_id, share) else t),
                lambda _: {"rl.limits.max_response_tokens": 36}),
        Planted("answer-not-found", "the grader looks for the answer in the wrong place",
                ("answers in another format", "all rollouts wrong"), patch=_no_answer),
        # Tools, environment, limits and evaluation
        Planted("fake-zeros", "a share of the rollouts fails before the first token and counts as wrong",
                ("empty rollouts count as failures",), (0.05, 0.15, 0.9),
                lambda share: _changed(lambda t: _empty(t) if chosen(t.traj_id, share) else t)),
        Planted("empty-outputs", "a share of the tool calls returns nothing and reports success",
                ("tools return nothing",), (0.1, 0.3, 1.0), _empty_outputs),
        Planted("sandbox-fails", "a share of the tool calls fails in the sandbox, and the rollouts are trained on",
                ("tools fail through our fault",), (0.05, 0.15, 0.5),
                keys=lambda share: {"sandbox.fault_share": share, "rl.on_infrastructure_failure": "keep"}),
        Planted("calls-not-parsed", "tool calls are not recognised", ("tools are not used",), patch=_no_parser),
        Planted("limit-too-low", "responses end at n tokens", ("truncation",), (12, 20, 28),
                keys=lambda tokens: {"rl.limits.max_response_tokens": int(tokens)}),
        Planted("stale-evaluation", "every evaluation reports the first one", ("the held-out score never changes",),
                patch=_stale_evaluation, keys=lambda _: {"evaluate.during.every": 2}),
        # SFT
        Planted("sft-lr-too-high", "the learning rate of SFT is n times that of the recipe",
                ("the SFT loss rises", "gradient spikes"), (10, 30, 100),
                keys=lambda factor: {"sft.lr": 0.0028 * factor, "sft.muon_lr": 0.014 * factor}, sft=True),
        Planted("sft-lr-too-low", "the learning rate of SFT is n times that of the recipe", ("the SFT loss does not fall",),
                (1e-4, 1e-3, 1e-2), keys=lambda factor: {"sft.lr": 0.0028 * factor, "sft.muon_lr": 0.014 * factor}, sft=True),
    )
}  # fmt: skip


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Switch the checks of the local trainer off while the context is open, so that a fault reaches the log as in a trainer
    without them."""

    async def nothing(*_: Any) -> None: ...

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(step, "check_rollouts", lambda *_: None))
        stack.enter_context(mock.patch.object(trainer, "check_template", lambda *_: None))
        stack.enter_context(mock.patch.object(trainer, "check_tools", nothing))
        stack.enter_context(mock.patch.object(engine_group, "assert_parity", nothing))
        yield
