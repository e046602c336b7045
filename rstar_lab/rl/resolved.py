"""A recipe with what it names: functions, problems and environments. Made once, before anything is started, so that a wrong name
is an error of the first second."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.rl.data.sources import load_problems
from rstar_lab.rl.environments.loading import EnvironmentClass
from rstar_lab.rl.environments.mixture import Mixture, load_environments
from rstar_lab.rl.methods.samplers import check_difficulty
from rstar_lab.rl.methods.user_functions import user_chat_template, user_metric
from rstar_lab.rl.models.sources import get_model
from rstar_lab.rl.problems import Problem, ProblemError, without_copies
from rstar_lab.rl.recipe import CODE_TOOLS, Problems, Recipe, RlSection, Stage
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.reward.hidden_tests import Runner, hidden_tests_of
from rstar_lab.rl.scheduling.lengths import LengthPredictor
from rstar_lab.rl.scheduling.policies import make_policy
from rstar_lab.rl.section import REWARDS, TESTS
from rstar_lab.rl.synthetic import families
from rstar_lab.rl.tools.registry import make_tools


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe whose names are resolved; see `resolve`.

    Attributes:
        recipe: the recipe.
        held_out: problems of its evaluation sets, which training must not use.
        problems: problems of each stage that is run, by its name.
        environments: entries of `rl.environments`, by name.
    """

    recipe: Recipe
    held_out: Mapping[str, Sequence[Problem]]
    problems: Mapping[str, Sequence[Problem]]
    environments: Mapping[str, EnvironmentClass]

    @property
    def excluded(self) -> list[Problem]:
        """Problems of all evaluation sets."""
        return [problem for problems in self.held_out.values() for problem in problems]

    def reward(self, run: Runner) -> Any:
        """Return the reward of the recipe. run: runs the programs that it checks."""
        rl = self.recipe.rl
        return make_reward(rl.reward, rl.answer, rl.reward_timeout_s, run)


def resolve(recipe: Recipe, *, stages: Sequence[Stage] | None = None, model: bool = False) -> ResolvedRecipe:
    """Return a recipe with what it names.

    Args:
        recipe: The recipe.
        stages: The stages that will be run, whose problems are read. Default: all.
        model: Whether to find the model, and to download one that is named.

    Raises:
        UserError: If a function, a file or an environment does not exist or does not fit, or if a problem is also in an
            evaluation set.
    """
    chosen = recipe.stages if stages is None else stages
    load_functions(recipe)
    if model and recipe.model != "tiny":
        get_model(recipe.model)
    held_out = {
        name: without_copies(read_problems(section, key=f"evaluate.sets.{name}: "))
        for name, section in recipe.evaluate.sets.items()
    }
    excluded = [problem for problems in held_out.values() for problem in problems]
    check_answers(excluded, recipe.rl)
    problems = {stage.name: read_stage_problems(recipe, stage, excluded) for stage in chosen}
    first = next((problem for part in problems.values() for problem in part if not problem.environment), None)
    make_reward(recipe.rl.reward, recipe.rl.answer, info=first.info if first else None)  # it may read names in `info`
    return ResolvedRecipe(recipe, held_out, problems, load_environments(recipe.rl))


def load_functions(recipe: Recipe) -> dict[str, str]:
    """Load the user functions that a recipe names. Return their names by recipe key.

    Raises UserError if a function does not exist or does not accept the arguments of its key.
    """
    make_reward(recipe.rl.reward, recipe.rl.answer)
    named = [*recipe.rl.tools, *(tool for entry in recipe.rl.environments for tool in entry.tools)]
    own_tools = list(dict.fromkeys(name for name in named if name not in CODE_TOOLS))
    make_tools(own_tools, None, user_timeout_s=recipe.rl.limits.tool_timeout_s)
    for entry in recipe.rl.environments:
        make_reward(entry.reward or "verify", recipe.rl.answer)
    load_environments(recipe.rl)
    if template := recipe.rl.prompt_style.chat_template:
        user_chat_template(template)
    make_policy(recipe.engine.scheduler, max_context=1, predictor=LengthPredictor(1))
    for rl in (recipe.rl, *map(recipe.settings, recipe.stages)):
        _ = rl.loss_config, [user_metric(name) for name in rl.metrics]
    for stage in recipe.stages:
        for section in recipe.stage_problems(stage):
            if spec := section.synthetic:
                own = [name for name in spec.families or () if name not in (*families.FAMILIES, *families.WORDS)]
                families.synthesize(spec.seed, len(own), levels=spec.levels, families=own)
    return recipe.functions


def read_problems(section: Problems, exclude: Sequence[Problem] = (), key: str = "") -> list[Problem]:
    """Return the problems that a recipe section names.

    exclude: problems of evaluation sets. Synthetic problems with such a question are not generated; in a file, such a
    problem raises UserError. key: prefix of error messages, such as `stages.a.problems: `.
    """
    if section.synthetic:
        spec = section.synthetic
        problems = families.synthesize(
            spec.seed, spec.count, levels=spec.levels, families=spec.families, exclude=exclude
        )
    else:
        assert section.file is not None
        fields = {str(ours): theirs for ours, theirs in section.fields.items()}
        try:
            problems = load_problems(section.file, fields=fields, answers=section.environment is None)
        except ProblemError as error:
            raise ProblemError(f"{key}{error}") from None
    if section.environment is not None:
        problems = [problem.model_copy(update={"environment": section.environment}) for problem in problems]
    if section.file is not None:
        held_out = {_content(problem) for problem in exclude}
        if clash := next((p for p in problems if _content(p) in held_out), None):
            raise UserError(
                f"{key}{section.file}: problem {clash.problem_id} is also in an evaluation set; remove it from one of the two"
            )
    return problems[: section.limit] if section.limit else problems


def _content(problem: Problem) -> tuple[str, ...]:
    """Return the fields by which two problems count as the same. Problems of an environment may differ only in their metadata."""
    question = problem.question.strip()
    if not problem.environment:
        return (question,)
    return (question, problem.environment, problem.answer, json.dumps(problem.info, sort_keys=True))


def check_answers(problems: Sequence[Problem], rl: RlSection) -> None:
    """Raise UserError for a problem without the answer, or the test cases, that its built-in reward requires."""
    rewards = {"": rl.reward} | {e.name: e.reward or rl.reward for e in rl.environments if not e.environment}
    for problem in problems:
        reward, name = rewards.get(problem.environment), problem.environment
        if reward == TESTS:
            hidden_tests_of(problem)
        elif reward in REWARDS and not problem.answer:
            where = f"the reward of rl.environments.{name}" if name else f"rl.reward: {reward}"
            raise UserError(f"problem {problem.problem_id} has no answer, which {where} requires")


def read_stage_problems(recipe: Recipe, stage: Stage, exclude: Sequence[Problem] = ()) -> Sequence[Problem]:
    """Return the problems of a stage; with `rl.environments`, a mixture of the problems of its environments.

    Raises UserError for two problems with one id, and for an unknown environment.
    """
    key = f"stages.{stage.name}.problems: "
    problems = [problem for section in recipe.stage_problems(stage) for problem in read_problems(section, exclude, key)]
    entries = recipe.settings(stage).environments
    if unknown := {problem.environment for problem in problems} - {"", *(entry.name for entry in entries)}:
        raise UserError(f"stages.{stage.name}.problems: rl.environments has no entry {min(unknown)!r}")
    check_answers(problems, recipe.rl)
    sampler = recipe.settings(stage).sampler
    if sampler is not None and sampler.needs_difficulty and stage.filter is None:
        check_difficulty(problems, sampler.name)
    if not entries:
        return problems
    twice = [name for name, count in Counter(problem.problem_id for problem in problems).items() if count > 1]
    if twice:
        raise UserError(f"stages.{stage.name}: two problems have the id {twice[0]!r}")
    return Mixture(problems, {entry.name: entry.weight for entry in entries})
