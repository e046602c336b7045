"""The top level of a recipe, and one entry of its `stages`."""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from rstar_lab.rl.plugins import NAME
from rstar_lab.rl.recipe.data import Problems
from rstar_lab.rl.recipe.explain import explain
from rstar_lab.rl.recipe.rl import RlSection
from rstar_lab.rl.recipe.services import EngineSection, EvaluateSection, SandboxSection
from rstar_lab.rl.recipe.sft import SftSection
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.section import Positive, Section, merged

# Keys whose values may be functions of the user.
FUNCTION_KEYS = (
    "chat_template", "environment", "families", "loss", "metrics", "penalties", "reward", "roc_penalties", "rule", "scheduler", "tools",
    "type",
)  # fmt: skip

# Keys of `rl` that a stage cannot change, because all stages share the objects that use them.
SAME_IN_ALL_STAGES = (
    "prompt", "tools", "environments", "reward", "reward_timeout_s", "answer", "lora", "limits.tool_truncate_side", "limits.tool_timeout_s",
)  # fmt: skip


class HandOff(Section):
    """Conditions that end a stage before `steps`. One is enough."""

    solved_groups: float | None = Field(None, gt=0, le=1)
    """End when the share of groups with only correct rollouts, averaged over `window` steps, reaches this value."""
    truncation_plateau: float | None = Field(None, ge=0)
    """End when the share of truncated rollouts, averaged over `window` steps, differs by at most this value from its average over the
    `window` steps before."""
    window: Positive = 10
    """Number of steps in these averages."""

    @model_validator(mode="after")
    def _check_condition(self) -> "HandOff":
        if self.solved_groups is None and self.truncation_plateau is None:
            raise ValueError("give at least one of solved_groups and truncation_plateau")
        return self


class DifficultyFilter(Section):
    """Before a stage, sample rollouts of its problems from the newest policy and drop problems that are too easy (paper, stage 3)
    or too hard."""

    samples: Positive = 8
    """Rollouts per problem. Default: paper, stage 3."""
    drop_from: float = Field(1.0, gt=0, le=1)
    """Drop problems with at least this pass rate. Default: paper, stage 3 (8 of 8)."""
    drop_below: float = Field(0.0, ge=0, lt=1)
    """Drop problems with a lower pass rate; any small value drops those that are never solved."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "DifficultyFilter":
        if self.drop_below >= self.drop_from:
            raise ValueError("drop_below must be less than drop_from")
        return self


class Stage(Section):
    """One stage of RL. It also accepts the keys of `rl`, except those that cannot differ between stages. A section such as
    `limits` changes only the keys that it names; if it names another `type`, it replaces the section."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the stage, unique in the recipe."""
    problems: Problems | None = None
    """Training problems. Required unless entries of `rl.environments` have problems."""
    steps: Positive
    """Number of steps; with `hand_off` the maximum."""
    hand_off: HandOff | None = None
    """Conditions that end the stage early."""
    filter: DifficultyFilter | None = None
    """Difficulty filter that runs before the stage."""
    reset_optimizer: bool = False
    """Reset the moments of AdamW at the start of the stage (paper: stage 3)."""
    rl: dict[str, Any] = Field({})
    """Keys of `rl` that the stage changes; they may also stand beside `steps`."""

    @model_validator(mode="before")
    @classmethod
    def _collect_rl_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(data.get("rl", {}), Mapping):
            return data
        keys = {key: value for key, value in data.items() if key in RlSection.model_fields}
        own = {key: value for key, value in data.items() if key not in keys}
        return own | {"rl": merged(data.get("rl", {}), keys)}


class Recipe(Section):
    """A run: model, SFT, RL stages, engines, sandbox and evaluation."""

    name: str = Field("recipe", pattern=r"^[A-Za-z0-9._-]+$")
    """Prefix of the run ids. Default: the name of the recipe file."""
    label: str = ""
    """Name in comparisons. Runs with the same label are seeds of one setting."""
    model: str
    """The base model: a folder in Hugging Face format; `ORG/NAME` or `ORG/NAME@REVISION` on the Hugging Face Hub; `smollm2-135m`;
    or `tiny`, a 1.8M-parameter Qwen3 with random weights."""
    vocabulary: Positive = 1024
    """Vocabulary size of the tokenizer that is trained for `model: tiny`."""
    seed: int = 0
    """Seed of data order, initial weights and sampling."""
    processes: Positive = 1
    """Training processes on a CPU, with one thread each."""
    runs: Path = Path("runs")
    """Folder of runs."""
    log_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Experiment trackers that also receive the metrics of each RL step; install their packages. Under verl set
    `verl.trainer.logger`."""
    sft: SftSection | None = None
    """SFT before RL."""
    rl: RlSection = RlSection()
    """Defaults of all RL stages."""
    stages: tuple[Stage, ...] = ()
    """RL stages, in order."""
    engine: EngineSection = EngineSection()
    """Inference engines."""
    sandbox: SandboxSection = SandboxSection()
    """Sandbox for tool calls."""
    evaluate: EvaluateSection = EvaluateSection()
    """Evaluation."""

    def settings(self, stage: Stage) -> RlSection:
        """Return the keys of `rl` with the changes of a stage. `precision: auto` is fp32 for an engine in float32.

        A mapping changes only the keys that it names, unless it names another type (or prompt format). Raises ValueError that
        names the key.
        """
        try:
            rl = RlSection(**merged(self.rl.model_dump(), stage.rl))
        except ValidationError as error:
            raise ValueError(f"stages.{stage.name}.{explain(error, RlSection)}") from None
        if rl.precision == "auto" and self.engine.dtype == "float32":
            return rl.model_copy(update={"precision": "fp32"})  # bf16 exceeds the engine's mismatch limit
        return rl

    @property
    def functions(self) -> dict[str, str]:
        """Return the user functions that the recipe names (`module:function`), by recipe key."""
        stages = {stage.name: stage.model_dump() | self.settings(stage).model_dump() for stage in self.stages}
        functions: dict[str, str] = {}
        for section in ({"engine": self.engine.model_dump()}, {"rl": self.rl.model_dump()}, {"stages": stages}):
            for key, name in _functions_in(section):
                if name not in functions.values():
                    functions[key] = name
        return functions

    def stage_problems(self, stage: Stage) -> list[Problems]:
        """Return the problem sets of a stage: its own, and those of its environments with the name of each."""
        sections = [stage.problems] if stage.problems is not None else []
        for entry in self.settings(stage).environments:
            if entry.problems is not None:
                sections.append(entry.problems.model_copy(update={"environment": entry.name}))
        return sections

    @model_validator(mode="after")
    def _check_stages(self) -> "Recipe":
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError("stages: two stages have the same name")
        prompt_format = self.rl.prompt.format
        if self.sft is not None and prompt_format == "model":
            raise ValueError("rl.prompt.format: sft supports only paper and released; set sft=null or another format")
        default = PromptStyle(prompt_format, answer=self.rl.answer)
        if self.sft is not None and self.sft.problems is not None and self.rl.prompt_style != default:
            raise ValueError(
                "rl.prompt: system_prompt and answer_instruction are not supported with sft.problems, whose traces have the default "
                "prompt; remove the keys, or set sft.problems=null"
            )
        if self.engine.kind == "server" and any(rl.sync.lockstep for rl in (self.rl, *map(self.settings, self.stages))):
            raise ValueError(
                "rl.schedule.lockstep is not supported with engine.kind: server; set rl.schedule.lockstep=false"
            )
        for stage in self.stages:
            settings = self.settings(stage)
            if stage.problems is None and not any(entry.problems for entry in settings.environments):
                raise ValueError(f"stages.{stage.name}.problems: required, unless rl.environments have problems")
            if (settings.precision, self.engine.dtype, self.engine.mismatch_limit) == ("bf16", "float32", None):
                raise ValueError(
                    f"stages.{stage.name}: rl.precision: bf16 exceeds the mismatch limit of engine.dtype: float32; set "
                    "rl.precision=auto, engine.dtype=bfloat16, or engine.mismatch_limit"
                )
            try:
                for part in settings.method.parts:
                    part.check_recipe(self, settings)
            except ValueError as error:
                raise ValueError(f"stages.{stage.name}.{error}") from None
            if self.engine.kind == "server" and settings.schedule.type == "async":
                raise ValueError(
                    "rl.schedule.type: async is not supported with engine.kind: server, which does not report the weights of "
                    "each token; set rl.schedule={type: one_step_off}"
                )
            for key in SAME_IN_ALL_STAGES:
                if attrgetter(key)(settings) != attrgetter(key)(self.rl):
                    raise ValueError(f"stages.{stage.name}.{key}: cannot differ between stages; set rl.{key}")
        return self


def _functions_in(value: Any, path: str = "", key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (recipe key, name) of the user functions in a value. path: dotted key of the value. key: its last name."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _functions_in(item, f"{path}.{name}".lstrip("."), name)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            name = item.get("name", place) if isinstance(item, Mapping) else item
            yield from _functions_in(item, path if len(value) == 1 and item is name else f"{path}.{name}", key)
    elif isinstance(value, str) and key in FUNCTION_KEYS and NAME.fullmatch(value):
        yield path, value
