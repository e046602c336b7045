"""Rewards that were written for other libraries: reward functions of TRL, scorers of Inspect, rubrics of verifiers."""

import asyncio
import inspect
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.rl.problems import Problem
from rstar_lab.verify import AnswerFormat, extract_answer

# Arguments that only TRL's trainer can supply.
TRAINER_ONLY = ("completion_ids", "environments", "trainer_state")
LOGGING = ("log_extra", "log_metric")  # functions with which a reward of TRL adds columns and metrics to its log
# Names of the true answer in rewards of TRL and verl, and of what a problem has.
ANSWER_NAMES = ("answer", "answers", "solution", "ground_truth", "target", "label", "gold", "gt")
COLUMNS = (*ANSWER_NAMES, "reward_model", "prompts", "completions", "question", "problem_id", "source", "difficulty")
TEXT_LISTS = ("list[str]", "typing.List[str]", "List[str]")
ANSWER_BLOCK = re.compile(r"<answer>.*", re.DOTALL)


def adapt_foreign(
    name: str, target: Any, answer_format: AnswerFormat, info: Collection[str] | None = None
) -> Callable[..., Any] | None:
    """Return a reward of another library as `reward(text, answer, *, problem)`; None for any other object.

    target: a function with a parameter `completions` (TRL) or with `solution_str` and `ground_truth` (verl), a scorer
    of Inspect or a `@scorer` function without required
    parameters, or a `Rubric` of verifiers (up to 0.1). The text is the only turn after the question.
    info: names in the `info` of the problems, if they are known. Raises UserError if it needs more than that.
    """
    if is_scorer(target):
        return _inspect_scorer(name, target, answer_format)
    if "verifiers" in sys.modules and isinstance(target, getattr(sys.modules["verifiers"], "Rubric", ())):
        return _verifiers_rubric(target)
    parameters = parameters_of(target)
    names = {p.name for p in parameters}
    if {"solution_str", "ground_truth"} <= names:
        return _verl_reward(name, target, parameters)
    return _trl_reward(name, target, parameters, info) if "completions" in names else None


def parameters_of(target: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function; none for an object without a signature."""
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return []


def required_of(parameters: list[inspect.Parameter]) -> list[str]:
    """Return the names of the parameters that have no default."""
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _verl_reward(name: str, function: Callable[..., Any], parameters: list[inspect.Parameter]) -> Callable[..., Any]:
    """Adapt `compute_score(data_source, solution_str, ground_truth, extra_info)` of verl, which returns a number or a dict."""
    supplied = ("data_source", "solution_str", "ground_truth", "extra_info")
    if unknown := sorted(set(required_of(parameters)).difference(supplied)):
        raise UserError(f"rl.reward: {name}: nothing supplies the parameter {unknown[0]}")
    accepted = {p.name for p in parameters}

    def reward(text: str, answer: str, *, problem: Problem) -> tuple[float, dict[str, float]]:
        values = dict(zip(supplied, (problem.source, text, answer, problem.info), strict=True))
        found = function(**{key: value for key, value in values.items() if key in accepted})
        if not isinstance(found, Mapping):
            return float(found), {}
        return float(found["score"]), {key: float(v) for key, v in found.items() if isinstance(v, int | float)}

    return reward


def _trl_reward(
    name: str, function: Callable[..., Any], parameters: list[inspect.Parameter], info: Collection[str] | None
) -> Callable[..., Any]:
    """Adapt a reward function of TRL, which is called with lists of length 1.

    Its columns are the true answer (ANSWER_NAMES, and `reward_model` as verl has it), `question`, `problem_id`,
    `source`, `difficulty` and the entries
    of the problem's `info`; if a name occurs twice, the entry of `info` is used. Prompts and completions are lists of chat
    messages, or strings if the parameter `completions` has the annotation `list[str]`. None as a reward counts as 0, as in TRL.
    Raises UserError for an async function and for arguments that only TRL's trainer can supply.
    """
    required = set(required_of(parameters))
    if unknown := sorted(required.intersection(TRAINER_ONLY)):
        raise UserError(f"rl.reward: {name}: parameter {unknown[0]} is supplied by TRL's trainer only")
    missing = sorted(required - {*COLUMNS, *LOGGING, *info}) if info is not None else []
    if missing:
        raise UserError(
            f"rl.reward: {name}: nothing supplies the parameter {missing[0]}; columns are {', '.join(COLUMNS)} and the "
            "entries of the problems' `info`"
        )
    if inspect.iscoroutinefunction(function):
        raise UserError(f"rl.reward: {name}: async reward functions are not supported; write a plain function")
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    accepted = {p.name for p in parameters}
    annotation = next(p.annotation for p in parameters if p.name == "completions")
    as_text = str(annotation) in TEXT_LISTS

    def reward(text: str, answer: str, *, problem: Problem) -> float:
        columns: dict[str, Any] = {
            **dict.fromkeys(ANSWER_NAMES, answer),
            "reward_model": {"ground_truth": answer},
            "question": problem.question,
            "problem_id": problem.problem_id,
            "source": problem.source,
            "difficulty": problem.difficulty,
        }
        columns |= problem.info
        columns["prompts"] = problem.question if as_text else [{"role": "user", "content": problem.question}]
        columns["completions"] = text if as_text else [{"role": "assistant", "content": text}]
        values = {key: [value] for key, value in columns.items() if takes_any or key in accepted}
        rewards = function(**values, **{name: _ignore for name in LOGGING if takes_any or name in accepted})
        if len(rewards) != 1:
            raise ValueError(f"it returned {len(rewards)} rewards for one completion")
        return 0.0 if rewards[0] is None else float(rewards[0])

    return reward


def _ignore(*_: Any, **__: Any) -> None:
    """Log nothing."""


def is_scorer(target: Any) -> bool:
    """Return whether an object is a scorer of Inspect, or a `@scorer` function."""
    if "inspect_ai" not in sys.modules:  # if inspect_ai was not imported, the object cannot be of it
        return False
    from inspect_ai.util import registry_info

    try:
        return registry_info(target).type == "scorer"
    except ValueError:
        return False


def _inspect_scorer(name: str, target: Any, answer_format: AnswerFormat) -> Callable[..., Any]:
    if not inspect.iscoroutinefunction(target):  # a @scorer function, which makes the scorer
        if required := required_of(parameters_of(target)):
            raise UserError(f"rl.reward: {name} requires the argument {required[0]}; name the scorer that it returns")
        target = target()

    def reward(text: str, answer: str, *, problem: Problem) -> tuple[float, dict[str, float]]:
        from inspect_ai.dataset import Sample

        sample = Sample(id=problem.problem_id, input=problem.question, target=answer, metadata=problem.info or None)
        state = scored_state(sample, with_answer_line(text, extract_answer(text, answer_format)))
        values = asyncio.run(scored_values(target, state))
        return next(iter(values.values())), values

    return reward


def scored_state(sample: Any, completion: str) -> Any:
    """Return the state of Inspect in which the model has answered a sample."""
    from inspect_ai.model import ChatMessageAssistant, ModelName, ModelOutput
    from inspect_ai.scorer import Target
    from inspect_ai.solver import TaskState

    return TaskState(
        model=ModelName("rstar_lab/policy"), sample_id=sample.id or 0, epoch=1, input=sample.input,
        messages=[*as_messages(sample), ChatMessageAssistant(content=completion)], target=Target(sample.target),
        choices=sample.choices, output=ModelOutput.from_content("policy", completion), completed=True,
        metadata=dict(sample.metadata or {}),
    )  # fmt: skip


async def scored_values(scorer: Any, state: Any) -> dict[str, float]:
    """Return the values of a scorer of Inspect by name: one, or one per entry of a dict."""
    from inspect_ai.scorer import value_to_float
    from inspect_ai.util import registry_info

    score = await scorer(state, state.target)
    value = 0.0 if score is None else score.value
    name = registry_info(scorer).name.rpartition("/")[2]
    named = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
    return {key: value_to_float()(part) for key, part in named.items()}


def with_answer_line(text: str, answer: str | None) -> str:
    """Return a response in the format that Inspect's scorers read: `ANSWER: x` at the end replaces our answer block."""
    return text if answer is None else f"{ANSWER_BLOCK.sub('', text).rstrip()}\n\nANSWER: {answer}"


def as_messages(sample: Any) -> list[Any]:
    """Return the input of a sample as chat messages of Inspect."""
    from inspect_ai.model import ChatMessageUser

    return [ChatMessageUser(content=sample.input)] if isinstance(sample.input, str) else list(sample.input)


def _verifiers_rubric(rubric: Any) -> Callable[..., Any]:
    def reward(text: str, answer: str, *, problem: Problem) -> tuple[float, dict[str, float]]:
        from verifiers.types import State

        prompt = [{"role": "user", "content": problem.question}]
        state = State(
            prompt=prompt, completion=[{"role": "assistant", "content": text}], answer=answer, info=problem.info,
            task=problem.source or "default", trajectory=[], is_completed=True,
        )  # fmt: skip
        asyncio.run(rubric.score_group([state]))
        return float(state["reward"]), {key: float(value) for key, value in (state.get("metrics") or {}).items()}

    return reward
