"""The `rl` section of a recipe, with its sections `environments`, `limits`, `prompt`, `schedule` and `correction`."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rstar_lab.rl.algorithm.config import CORRECTION_BOUNDS, TRUNCATED, Correction, LossConfig
from rstar_lab.rl.algorithm.hooks import MethodHooks
from rstar_lab.rl.algorithm.roc import Penalty
from rstar_lab.rl.methods import AnyMethod, Grpo
from rstar_lab.rl.methods.samplers import Sampler
from rstar_lab.rl.methods.user_functions import user_correction, user_loss
from rstar_lab.rl.plugins import NAME
from rstar_lab.rl.recipe.data import Problems
from rstar_lab.rl.recipe.sft import Lora
from rstar_lab.rl.renderers.base import PromptStyle, TruncateSide
from rstar_lab.rl.section import TESTS, ByType, Function, NotNegative, Positive, Reward, Section, is_user_function
from rstar_lab.verify import AnswerFormat

TOOL_ADDRESSES = ("mcp+stdio:", "mcp+http://", "mcp+https://")
CODE_TOOLS = ("python", "python_released", "jupyter")


class NoCorrection(Section):
    """No correction (paper)."""

    type: Literal["none"] = "none"
    """Name of the correction."""


class LimitedCorrection(Section):
    """An off-policy correction whose effect is limited."""

    max_share: float = Field(0.5, gt=0, le=1)
    """Stop the run if the correction truncates or drops more than this share of the tokens in 5 updates in a row."""


class RatioCorrection(LimitedCorrection):
    """By the ratio of trainer to engine probability. Requires `old_log_probs: trainer`."""

    type: Literal["tis", "seq_tis", "token_mask", "seq_mask", "geo_mask", "icepop"]
    """Formulas and sources: docs/algorithm.md."""
    bounds: tuple[float, float] | None = None
    """Lower and upper bound of the ratio. Default: those of the source."""

    @property
    def resolved_bounds(self) -> tuple[float, float]:
        """`bounds`, or those of the correction's source."""
        return self.bounds or CORRECTION_BOUNDS[self.type]

    @model_validator(mode="after")
    def _check_bounds(self) -> "RatioCorrection":
        low, high = self.resolved_bounds
        if not 0 <= low < high:
            raise ValueError(f"bounds must be 0 <= low < high, got {low:g}, {high:g}")
        if self.type in TRUNCATED and low > 0:
            raise ValueError(f"{self.type} has no lower bound: set bounds to [0, {high:g}]")
        return self


class UserCorrectionSection(LimitedCorrection):
    """Your own function (docs/extending.md). Requires `old_log_probs: trainer`."""

    type: Function
    """`module:function` of (trainer_log_probs, engine_log_probs, mask) that returns a weight per token."""


AnyCorrection = Annotated[NoCorrection | RatioCorrection | UserCorrectionSection, ByType()]


Mode = Literal["sync", "one_step_off", "async"]
WhenStale = Literal["wait", "drop", "trim"]


class Sync(Section):
    """Generate the rollouts of a step, then update (paper)."""

    type: Literal["sync"] = "sync"
    """Name of the schedule."""
    lockstep: bool = False
    """Generate turns in fixed batches: the same machine, versions and seed give the same bits."""
    dynamic_sampling: NotNegative = 0
    """Maximum rounds in which new problems replace groups with equal rewards (arXiv 2503.14476). 0: off."""


class OffPolicy(Section):
    """A schedule that trains on rollouts of older weights."""

    allow_uncorrected: bool = False
    """Allow the schedule without a `correction`."""


class OneStepOff(OffPolicy):
    """Generate the next step's rollouts during the update, with the weights before it. Requires a `correction`."""

    type: Literal["one_step_off"] = "one_step_off"
    """Name of the schedule."""


class Async(OffPolicy):
    """Generation never stops; requests in flight continue under new weights (docs/async.md). Requires a `correction`."""

    type: Literal["async"] = "async"
    """Name of the schedule."""
    max_staleness: NotNegative = 1
    """Maximum updates between the weights that start a group and the weights that are trained on it."""
    when_stale: WhenStale = "wait"
    """How `max_staleness` is enforced. `wait`: delay new groups and wait for slow ones. `drop`: drop groups that exceed the
    limit. `trim`: mask the tokens that exceed it."""
    buffer_groups: Positive | None = None
    """Maximum number of groups that no update has used yet. Default: `problems_per_step * (max_staleness + 1)`."""

    def groups(self, problems_per_step: int) -> int:
        """Return `buffer_groups`, or its default."""
        return self.buffer_groups or problems_per_step * (self.max_staleness + 1)


AnySchedule = Annotated[Sync | OneStepOff | Async, ByType()]


PROGRAM_INSTRUCTION = (
    "Put the final program between <answer> and </answer>, in one block that starts with ```python (or ```cpp) and ends with "
    "```. It is run on hidden test cases."
)


class OpenPrompt(Section):
    """A prompt whose texts can be replaced."""

    system_prompt: str | None = None
    """System prompt; "" for none. Default: that of the prompt format."""
    answer_instruction: str | None = None
    """How the model is asked to write its answer. Default: `<answer>` tags with a box; with `format: model`, as `answer` reads
    it; with `reward: tests`, a program in the tags."""


class PaperPrompt(OpenPrompt):
    """The format that the paper describes (section 2), in our words."""

    format: Literal["paper"] = "paper"
    """Name of the format."""


class ReleasedPrompt(Section):
    """Exactly as in microsoft/rStar, for the released rStar2-Agent-14B."""

    format: Literal["released"] = "released"
    """Name of the format."""


class ModelPrompt(OpenPrompt):
    """The model's own chat template and syntax of tool calls, for any chat model (docs/recipes.md). Not for SFT."""

    format: Literal["model"] = "model"
    """Name of the format."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking: false`."""
    chat_template: Function | None = None
    """Your own `module:function` in place of the model's chat template (docs/extending.md)."""

    @model_validator(mode="after")
    def _check_template(self) -> "ModelPrompt":
        if self.template_options and self.chat_template:
            raise ValueError("template_options cannot be combined with chat_template, which has no variables")
        return self


AnyPrompt = Annotated[PaperPrompt | ReleasedPrompt | ModelPrompt, ByType("format")]


class LimitsSection(Section):
    """Limits of a rollout."""

    max_response_tokens: Positive = 8192
    """Maximum tokens of a response, with all turns and tool responses. Default: paper, stage 1."""
    max_turns: Positive = 10
    """Maximum model turns of a rollout. Default: paper, stages 1 and 2."""
    max_calls_per_turn: Positive = 8
    """Tool calls of a turn that are executed; further calls get an error (`malformed_call`) as their response."""
    max_tool_chars: Positive = 4096
    """Maximum characters of a tool response; the middle of longer responses is removed. The release uses 256."""
    tool_truncate_side: TruncateSide = "middle"
    """How a long tool response is truncated with `prompt: {format: released}`. As in the release, `left` keeps the start and
    `right` the end."""
    time_limit_s: float | None = Field(None, gt=0)
    """Wall-clock limit of one rollout in seconds; it also interrupts a turn. Default: none."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """Time limit of one call of your own tool in seconds. Code tools use `sandbox.timeout_s`."""


class EnvironmentLimits(Section):
    """Limits of the rollouts in one environment. A key that is not set has the value of `rl.limits`."""

    max_turns: Positive | None = None
    """Maximum model turns of a rollout."""
    max_response_tokens: Positive | None = None
    """Maximum tokens of a response, at most `rl.limits.max_response_tokens`."""
    max_tool_chars: Positive | None = None
    """Maximum characters of a tool response."""


class EnvironmentEntry(Section):
    """One of several tasks of a run: an environment, or tools and a reward."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the environment, unique in the recipe."""
    environment: str | None = None
    """`module:name` of your environment class (docs/environments.md). Without it, `tools` and `reward` define the entry."""
    problems: Problems | None = None
    """Training problems. Default: the problems of the stage that name this environment."""
    tools: tuple[str, ...] = ()
    """Tools in addition to those of `environment`, as in `rl.tools`."""
    reward: Reward | None = None
    """Reward of an entry without `environment`. Default: `rl.reward`."""
    weight: float = Field(1.0, gt=0)
    """Share of the groups of a step, relative to the other entries."""
    limits: EnvironmentLimits = EnvironmentLimits()
    """Limits of its rollouts."""
    roc_penalties: tuple[Penalty | Function, ...] | None = None
    """Penalties by which RoC ranks its successful rollouts. Default: `rl.method.roc.penalties`."""

    @model_validator(mode="after")
    def _check_task(self) -> "EnvironmentEntry":
        if self.environment is not None and self.reward is not None:
            raise ValueError("reward: cannot be combined with environment, which computes the reward; remove reward")
        if self.environment is not None and not NAME.fullmatch(self.environment):
            raise ValueError(f"environment: {self.environment!r} is not module:name")
        return self


class RlSection(Section):
    """Defaults of all RL stages. A stage cannot change `prompt`, `tools`, `environments`, `reward`, `reward_timeout_s`, `answer`,
    `lora`, `limits.tool_truncate_side` and `limits.tool_timeout_s`."""

    problems_per_step: Positive = 512
    """Problems (groups) per step. Default: paper, section 4.3."""
    group_size: Positive = 16
    """Rollouts per problem that are trained on. Default: paper, section 4.3."""
    method: AnyMethod = Grpo()
    """Selection, advantages and loss: one published method, with its keys. Default: GRPO-RoC (paper)."""
    correction: AnyCorrection = NoCorrection()
    """Off-policy correction. Default: none (paper)."""
    schedule: AnySchedule = Sync()
    """How generation and updates follow each other. Default: sync (paper)."""
    prompt: AnyPrompt = PaperPrompt()
    """Format of prompts, tool schemas and tool responses."""
    limits: LimitsSection = LimitsSection()
    """Limits of a rollout."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of training rollouts. Default: paper, section 5.1."""
    lr: float = Field(1e-6, ge=0)
    """Learning rate of AdamW, constant after warm-up. Default: paper, section 5.1."""
    warmup_steps: NotNegative = 20
    """Steps of linear learning-rate warm-up. Default: paper; at the start of every stage: ours."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay of AdamW."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum norm of the gradient."""
    mini_batches: Positive = 1
    """Mini-batches of a step; each is one optimizer update."""
    micro_batch_tokens: Positive = 16384
    """Maximum tokens in one forward pass; at most 1,024 on a CPU. Changes memory and speed, not the result."""
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    """Log-probs of the old policy in the importance ratio: recomputed by the trainer, or those of the engine."""
    token_arrays: Literal["all", "kept", "sampled"] = "kept"
    """Rollouts whose token ids, log-probs and entropies are stored: `all`, those trained on (`kept`), or the first of each group
    (`sampled`)."""
    checkpoint_every: Positive = 10
    """Steps between checkpoints."""
    keep_checkpoints: Positive = 2
    """Number of checkpoints that are kept."""
    tools: tuple[str, ...] = ("python",)
    """Tools of the model: `python` (the paper's), `python_released`, `jupyter`, your own `module:function` or `module:Class`, or
    an MCP server, `mcp+stdio:COMMAND` (docs/own-tools.md)."""
    environments: tuple[EnvironmentEntry, ...] = ()
    """Several tasks in one run, mixed by weight in every step (docs/environments.md). Problems that name no environment use
    `tools` and `reward`."""
    reward: Reward = "verify"
    """`verify`: 1 for a correct final answer, else 0 (paper, section 2). `released`: graded by prime_math and math-verify, as in
    microsoft/rStar. `tests`: 1 if the final program passes the hidden test cases of its problem, else 0 (docs/data.md). Or your
    own `module:function`, also one written for TRL (docs/own-tools.md)."""
    reward_timeout_s: float = Field(60.0, gt=0)
    """Time limit of one call of your own reward function in seconds; exceeding it stops the run."""
    answer: AnswerFormat = "tagged"
    """Where `reward: verify` reads the answer. `tagged`: the last `\\boxed{}` in the last `<answer>` (paper, section 2). `boxed`:
    the last `\\boxed{}` of the response. `last_number`: the last number of the response."""
    metrics: tuple[Function, ...] = ()
    """Further metrics of a step, as `module:function` of its trajectories. A function `f` appears as `metrics/f`."""
    lora: Lora | None = None
    """Train adapters only (keys: `sft.lora`). Checkpoints contain the merged model and, in `adapter/`, the adapters."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of matrix products; weights, gradients and optimizer states are fp32. `auto`: bf16 if the engine has `dtype:
    bfloat16` and the device is faster in bf16, else fp32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more computation."""
    fp32_head: bool = False
    """Compute the LM head in fp32 when the rest is bf16 (arXiv 2510.13786)."""
    on_infrastructure_failure: Literal["retry", "mask", "keep"] = "retry"
    """What happens to a rollout in which a tool call failed through no fault of the model (`sandbox_error`, `queue_timeout`).
    `retry`: generate it once more, then `mask`; also after failures of an engine or environment; the run pauses while half of the
    rollouts fail. `mask`: leave it out of the loss and of the statistics of its group. `keep`: train on it; the failed call
    counts in no penalty."""
    retire_from: float | None = Field(None, gt=0, le=1)
    """Do not draw a problem again after a step with at least this pass rate (arXiv 2510.13786). Default: off."""

    @property
    def sync(self) -> Sync:
        """The keys of the schedule `sync`; under another schedule their defaults."""
        return self.schedule if isinstance(self.schedule, Sync) else Sync()

    @property
    def asynchronous(self) -> Async:
        """The keys of the schedule `async`; under another schedule their defaults."""
        return self.schedule if isinstance(self.schedule, Async) else Async()

    @property
    def rollout_mode(self) -> Literal["lockstep", "async"]:
        """How the engines generate turns: in fixed batches, or every rollout on its own."""
        return "lockstep" if self.sync.lockstep else "async"

    @property
    def sampler(self) -> Sampler | None:
        """The sampler that chooses the problems of a step; None: a random order."""
        return self.method.added(Sampler)  # type: ignore[type-abstract]  # used for isinstance only

    @property
    def loss_config(self) -> LossConfig:
        """The options of the training loss. Loads the functions that it names."""
        method, (correction, bounds) = self.method, self.resolved_correction
        config = LossConfig(
            variant=user_loss(method.loss) if is_user_function(method.loss) else method.loss,  # type: ignore[arg-type]
            aggregation=method.aggregation,
            clip_low=method.clip_low,
            clip_high=method.clip_high,
            horizon=self.limits.max_response_tokens,
            correction=user_correction(correction) if is_user_function(correction) else correction,  # type: ignore[arg-type]
            correction_bounds=bounds,
            kl_coefficient=method.kl_coefficient,
        )
        for hooks in self.hooks:
            config = hooks.loss_options(config)
        return config

    @property
    def resolved_correction(self) -> tuple[Correction | Function, tuple[float, float]]:
        """The off-policy correction and its bounds."""
        bounds = self.correction.resolved_bounds if isinstance(self.correction, RatioCorrection) else (0.0, 1.0)
        return self.correction.type, bounds

    @property
    def hooks(self) -> tuple[MethodHooks, ...]:
        """The hooks of all methods of the section, in the order in which they are called. Loads the functions that it names."""
        return tuple(part.bound(self) for part in self.method.parts)

    @property
    def rollouts_per_group(self) -> int:
        """Rollouts generated per group, before selection."""
        return self.group_size * (1 if self.method.roc.rule == "none" else self.method.roc.oversample)

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        for tool in tools:
            if tool not in CODE_TOOLS and not NAME.fullmatch(tool) and not tool.startswith(TOOL_ADDRESSES):
                raise ValueError(f"{tool!r} is not one of {', '.join(CODE_TOOLS)}, a module:function or an MCP server")
        return tools

    @field_validator("environments")
    @classmethod
    def _check_environments(cls, environments: tuple[EnvironmentEntry, ...]) -> tuple[EnvironmentEntry, ...]:
        names = [entry.name for entry in environments]
        if len(set(names)) < len(names):
            raise ValueError("two entries have the same name")
        return environments

    @model_validator(mode="after")
    def _check_combinations(self) -> "RlSection":
        if self.correction.type != "none" and self.old_log_probs == "engine":
            raise ValueError(
                "correction requires old_log_probs: trainer (with engine, the importance ratio already corrects the difference)"
            )
        for part in self.method.parts:
            part.check(self)
        schedule = self.schedule
        if isinstance(schedule, OffPolicy) and self.correction.type == "none" and not schedule.allow_uncorrected:
            raise ValueError(
                "this schedule trains on rollouts of older weights: set correction (for example {type: tis}, with "
                "old_log_probs: trainer), or schedule.allow_uncorrected: true"
            )
        if isinstance(schedule, Async) and schedule.groups(self.problems_per_step) < self.problems_per_step:
            raise ValueError(f"schedule.buffer_groups must be at least problems_per_step, {self.problems_per_step}")
        if len({name.partition(":")[2] for name in self.metrics}) < len(self.metrics):
            raise ValueError("metrics: two functions have the same name; rename one")
        if self.environments and self.prompt.format == "released":
            raise ValueError("environments requires prompt: {format: paper} or {format: model}")
        longest = self.limits.max_response_tokens
        for entry in self.environments:
            if (entry.limits.max_response_tokens or 0) > longest:
                raise ValueError(
                    f"environments.{entry.name}.limits.max_response_tokens: at most limits.max_response_tokens, {longest}"
                )
        return self

    def instruction(self, reward: str) -> str | None:
        """Return how prompts ask for an answer that `reward` can grade; None: as is the default of the format."""
        if not isinstance(self.prompt, OpenPrompt):
            return None
        default = PROGRAM_INSTRUCTION if reward == TESTS else None
        return default if self.prompt.answer_instruction is None else self.prompt.answer_instruction

    @property
    def prompt_style(self) -> PromptStyle:
        """How the prompts of the run are written."""
        keys = self.prompt.model_dump()
        return PromptStyle(
            self.prompt.format, keys.get("system_prompt"), self.instruction(self.reward), self.answer,
            keys.get("template_options", {}), keys.get("chat_template"), self.limits.tool_truncate_side,
        )  # fmt: skip
