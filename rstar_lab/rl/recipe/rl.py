"""The `rl` section of a recipe: defaults of all RL stages, combinations of keys that are not allowed, and the methods that it selects."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rstar_lab.rl.algorithm.config import Correction, LossConfig
from rstar_lab.rl.algorithm.hooks import MethodHooks
from rstar_lab.rl.methods import AnyMethod, Branching, CrossPolicy, Sampler
from rstar_lab.rl.methods.control_tokens import ControlTokens, ControlTokensHooks
from rstar_lab.rl.methods.echo import Echo, EchoHooks
from rstar_lab.rl.methods.grpo import Grpo, GrpoHooks
from rstar_lab.rl.methods.maxrl import Maxrl, MaxrlHooks
from rstar_lab.rl.methods.opd import Opd, OpdHooks
from rstar_lab.rl.methods.otb import Otb, OtbHooks
from rstar_lab.rl.methods.overlong_buffer import OverlongBuffer, OverlongBufferHooks
from rstar_lab.rl.methods.overlong_filter import OverlongFilter, OverlongFilterHooks
from rstar_lab.rl.methods.own import own_hooks
from rstar_lab.rl.methods.reinforce_pp import ReinforcePP, ReinforcePPHooks
from rstar_lab.rl.methods.repetition import Repetition, RepetitionHooks
from rstar_lab.rl.methods.roc import RocHooks
from rstar_lab.rl.methods.sdpo import Sdpo, SdpoHooks
from rstar_lab.rl.methods.task_normalisation import TaskNormalisation, TaskNormalisationHooks
from rstar_lab.rl.methods.tool_budget import ToolBudget, ToolBudgetHooks
from rstar_lab.rl.methods.void_turns import VoidTurns, VoidTurnsHooks
from rstar_lab.rl.plugins import NAME
from rstar_lab.rl.recipe.correction import AnyCorrection, NoCorrection, RatioCorrection
from rstar_lab.rl.recipe.environments import EnvironmentEntry
from rstar_lab.rl.recipe.functions import own_correction, own_loss, own_penalty, own_rule
from rstar_lab.rl.recipe.limits import LimitsSection
from rstar_lab.rl.recipe.lora import Lora
from rstar_lab.rl.recipe.prompt import PROGRAM_INSTRUCTION, AnyPrompt, ModelPrompt, OpenPrompt, PaperPrompt
from rstar_lab.rl.recipe.schedule import AnySchedule, Async, OffPolicy, Sync
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.section import TESTS, Function, NotNegative, Positive, Reward, Section, is_own
from rstar_lab.verify import AnswerFormat

TOOL_ADDRESSES = ("http://", "https://", "mcp+stdio:", "mcp+http://", "mcp+https://")
CODE_TOOLS = ("python", "python_released", "jupyter")


class RlSection(Section):
    """Defaults of all RL stages. A stage may change any key except `tools`, `reward`, `answer`, `lora`, `environments` and
    `prompt`."""

    problems_per_step: Positive = 512
    """Problems (groups) per step. Default: paper, section 4.2."""
    group_size: Positive = 16
    """Rollouts per problem that are trained on. Default: paper, section 4.2."""
    method: AnyMethod = Grpo()
    """Selection, advantages and loss: one published method, with its keys. Default: GRPO-RoC (paper)."""
    correction: AnyCorrection = NoCorrection()
    """Off-policy correction. Default: none (paper)."""
    schedule: AnySchedule = Sync()
    """How generation and updates follow each other. Default: sync (paper)."""
    prompt: AnyPrompt = PaperPrompt()
    """Format of prompts, tool schemas and tool responses. Cannot differ between stages."""
    limits: LimitsSection = LimitsSection()
    """Limits of a rollout."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of training rollouts. Default: paper, section 4.2."""
    lr: float = Field(1e-6, ge=0)
    """Learning rate of AdamW, constant after warm-up. Default: paper, section 4.2."""
    warmup_steps: NotNegative = 20
    """Steps of linear learning-rate warm-up at the start of every stage. Default: paper; at every stage: ours."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay of AdamW. Default: our choice."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum norm of the gradient. Default: our choice."""
    mini_batches: Positive = 1
    """Mini-batches of a step; each is one optimizer update. Default: our choice."""
    micro_batch_tokens: Positive = 16384
    """Maximum tokens in one forward pass; at most 1,024 on a CPU. Changes memory and speed, not the result. Default:
    our choice."""
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    """Log-probs of the behaviour policy in the importance ratio: recomputed by the trainer, or as the engine returned
    them. Default: our choice."""
    token_arrays: Literal["all", "kept", "sampled"] = "kept"
    """Rollouts whose token ids, log-probs and entropies are stored: `all`, only those trained on (`kept`), or the first
    of each group (`sampled`)."""
    checkpoint_every: Positive = 10
    """Steps between checkpoints. Default: our choice."""
    keep_checkpoints: Positive = 2
    """Number of newest checkpoints that are kept. Default: our choice."""
    tools: tuple[str, ...] = ("python",)
    """Tools of the model. `python` (the paper's), `python_released`, `jupyter`, or your own: `module:function`,
    `module:Class`, a URL, or an MCP server, `mcp+stdio:COMMAND` (docs/own-tools.md). Cannot differ between stages."""
    environments: tuple[EnvironmentEntry, ...] = ()
    """Several tasks in one run, mixed by weight in every step (docs/environments.md). Problems that name no environment
    use `tools` and `reward`. Default: none. Cannot differ between stages."""
    reward: Reward = "verify"
    """`verify`: 1 for a correct final answer, else 0 (paper, section 2). `released`: graded by prime_math and math-verify, as
    in microsoft/rStar. `tests`: 1 if the final program passes the hidden test cases of its problem, else 0 (docs/data.md).
    Or your own `module:function` of (text of the model, true answer), or one written for TRL
    (docs/own-tools.md). Cannot differ between stages."""
    reward_audit: bool = False
    """Try the reward on problems of the first stage before anything else, as `rstar-lab audit` does. A failed check ends the run with
    an error. Cannot differ between stages."""
    reward_timeout_s: float = Field(60.0, gt=0)
    """Time limit of one call of your own reward function in seconds. A call that takes longer stops the run with an error.
    Default: our choice."""
    answer: AnswerFormat = "tagged"
    """Where `reward: verify` reads the answer. `tagged`: the last `\\boxed{}` in the last `<answer>` (paper, section 2).
    `boxed`: the last `\\boxed{}` of the response. `last_number`: the last number of the response. Cannot differ between
    stages."""
    metrics: tuple[Function, ...] = ()
    """Further metrics of a step, as `module:function` of its trajectories. A function `f` appears as `metrics/f`."""
    lora: Lora | None = None
    """Train adapters only. Checkpoints contain the merged model and, in `adapter/`, the adapters alone. Cannot differ between
    stages. Default: all weights are trained."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the matrix products of the update; weights, gradients and optimizer states are fp32. `auto`: bf16 if
    the engine has `dtype: bfloat16` and the device is a GPU or a CPU that is faster in bf16, else fp32. Default: our
    choice."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more computation."""
    fp32_head: bool = False
    """Compute the LM head in fp32 when the rest is bf16 (arXiv 2510.13786)."""
    on_infrastructure_failure: Literal["retry", "mask", "keep"] = "retry"
    """What happens to a rollout in which a tool call failed through no fault of the model (`sandbox_error`, `queue_timeout`).
    `retry`: it is generated once more; if it fails again, as with `mask`. `mask`: it is in neither the loss nor the statistics
    of its group. `keep`: it is trained on, and the failed call counts in no penalty. With `retry`, rollouts that a failure of an
    engine or an environment ended are generated once more too, and the run pauses while half of the rollouts fail."""
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
    def branching(self) -> float | None:
        """The entropy from which rollouts branch; None: they do not."""
        branching = self.method.added(Branching)
        return branching.entropy if branching else None

    @property
    def sampler(self) -> Sampler | None:
        """The sampler that chooses the problems of a step; None: a random order."""
        return self.method.added(Sampler)  # type: ignore[type-abstract]  # used for isinstance only

    @property
    def loss_config(self) -> LossConfig:
        """The options of the training loss. Loads the functions that it names."""
        method, (correction, bounds) = self.method, self.resolved_correction
        config = LossConfig(
            variant=own_loss(method.loss) if is_own(method.loss) else method.loss,  # type: ignore[arg-type]
            aggregation=method.aggregation,
            clip_low=method.clip_low,
            clip_high=method.clip_high,
            horizon=self.limits.max_response_tokens,
            correction=own_correction(correction) if is_own(correction) else correction,  # type: ignore[arg-type]
            correction_bounds=bounds,
            kl_coefficient=method.kl_coefficient,
        )
        for hooks in self.hooks:
            config = hooks.loss(config)
        return config

    @property
    def resolved_correction(self) -> tuple[Correction | Function, tuple[float, float]]:
        """The off-policy correction and its bounds."""
        bounds = self.correction.resolved_bounds if isinstance(self.correction, RatioCorrection) else (0.0, 1.0)
        return self.correction.type, bounds

    @property
    def hooks(self) -> tuple[MethodHooks, ...]:
        """The methods of the section, see `method_hooks`. Loads the functions that it names."""
        return method_hooks(self)

    @property
    def rollouts_per_group(self) -> int:
        """Rollouts generated per group, before selection."""
        return self.group_size * (1 if self.method.roc.rule == "none" else self.method.roc.oversample)

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        for tool in tools:
            if tool not in CODE_TOOLS and not NAME.fullmatch(tool) and not tool.startswith(TOOL_ADDRESSES):
                raise ValueError(
                    f"{tool!r} is not one of {', '.join(CODE_TOOLS)}, a module:function, a URL or an MCP server"
                )
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
        check_combinations(self)
        return self

    def instruction(self, reward: str) -> str | None:
        """Return how prompts ask for an answer that `reward` can grade; None: as is the default of the format."""
        if not isinstance(self.prompt, OpenPrompt) or self.prompt.answer_instruction is not None:
            return self.prompt.answer_instruction if isinstance(self.prompt, OpenPrompt) else None
        return PROGRAM_INSTRUCTION if reward == TESTS else None

    @property
    def prompt_style(self) -> PromptStyle:
        """How the prompts of the run are written."""
        texts = self.prompt if isinstance(self.prompt, OpenPrompt) else PaperPrompt()
        model = self.prompt if isinstance(self.prompt, ModelPrompt) else ModelPrompt()
        return PromptStyle(
            self.prompt.format,
            texts.system_prompt,
            texts.question_wrapper,
            self.instruction(self.reward),
            self.answer,
            model.template_options,
            model.chat_template,
        )


def check_combinations(rl: RlSection) -> None:
    """Raise ValueError for keys that cannot be combined. The message names the key."""
    method, schedule = rl.method, rl.schedule
    if rl.correction.type != "none" and rl.old_log_probs == "engine":
        raise ValueError(
            "correction requires old_log_probs: trainer (with engine, the importance ratio already corrects the difference)"
        )
    if isinstance(method, Otb) and rl.old_log_probs == "engine":
        raise ValueError("method otb requires old_log_probs: trainer, which computes the baselines")
    if method.added(Opd) and rl.temperature != 1.0:
        raise ValueError(
            f"method.add: opd requires temperature: 1, at which the teacher is scored; it is {rl.temperature:g}"
        )
    if method.kl_coefficient and (teacher := method.added(Opd) or method.added(Sdpo)):
        raise ValueError(
            f"method.kl_coefficient cannot be combined with {teacher.type}: a step has one reference model; set it to 0"
        )
    if method.added(ToolBudget) and not isinstance(method, Grpo):
        raise ValueError("method.add: tool_budget requires method: {type: grpo}")
    if method.added(TaskNormalisation) and isinstance(method, Otb):
        raise ValueError(
            "method.add: task_normalisation cannot be combined with method otb, which has advantages of its own"
        )
    if method.roc.min_positive + method.roc.min_negative > rl.group_size:
        raise ValueError(f"method.roc: min_positive + min_negative must be at most group_size, {rl.group_size}")
    if (overlong := method.added(OverlongBuffer)) and overlong.tokens > rl.limits.max_response_tokens:
        raise ValueError(
            f"method.add: tokens of overlong_buffer must be at most limits.max_response_tokens, {rl.limits.max_response_tokens}"
        )
    if method.added(Branching):
        _check_branching(rl)
    if method.added(CrossPolicy):
        _check_cross_policy(rl)
    if rl.sync.carry_over and rl.old_log_probs != "engine":
        raise ValueError(
            "schedule.carry_over requires old_log_probs: engine (the trainer does not keep older policy versions)"
        )
    if isinstance(schedule, OffPolicy) and rl.correction.type == "none" and not schedule.allow_uncorrected:
        raise ValueError(
            "this schedule trains on rollouts of older weights: set correction (for example {type: tis}, with "
            "old_log_probs: trainer), or schedule.allow_uncorrected: true"
        )
    if isinstance(schedule, Async) and schedule.groups(rl.problems_per_step) < rl.problems_per_step:
        raise ValueError(f"schedule.buffer_groups must be at least problems_per_step, {rl.problems_per_step}")
    if len({name.partition(":")[2] for name in rl.metrics}) < len(rl.metrics):
        raise ValueError("metrics: two functions have the same name; rename one")
    if rl.environments and rl.prompt.format == "released":
        raise ValueError("environments requires prompt: {format: paper} or {format: model}")
    for entry in rl.environments:
        if (entry.limits.max_response_tokens or 0) > rl.limits.max_response_tokens:
            raise ValueError(
                f"environments.{entry.name}.limits.max_response_tokens: at most limits.max_response_tokens, "
                f"{rl.limits.max_response_tokens}"
            )


def _check_cross_policy(rl: RlSection) -> None:
    """Raise ValueError for keys with which the turns of a rollout cannot have two policies."""
    if rl.schedule.type != "sync" or rl.sync.lockstep or rl.sync.step_time_s is not None:
        raise ValueError("method.add: cross_policy requires schedule: {type: sync}, without lockstep and step_time_s")
    if rl.correction.type == "none" and rl.old_log_probs != "engine":
        raise ValueError(
            "method.add: cross_policy trains on tokens of an older policy: set correction (for example {type: tis}), or "
            "old_log_probs: engine"
        )


def _check_branching(rl: RlSection) -> None:
    """Raise ValueError for keys with which rollouts cannot branch."""
    if rl.sync.lockstep:
        raise ValueError(
            "method.add: branching cannot be combined with schedule.lockstep (a branch starts in the middle of a batch)"
        )
    if rl.sync.carry_over:
        raise ValueError("method.add: branching cannot be combined with schedule.carry_over: set it to false")
    for entry in rl.environments:
        if entry.environment is not None:
            raise ValueError(
                f"method.add: branching cannot be combined with environments.{entry.name}.environment, whose state cannot be "
                "copied"
            )
    for tool in (*rl.tools, *(tool for entry in rl.environments for tool in entry.tools)):
        if ":" in tool and not NAME.fullmatch(tool):
            raise ValueError(
                f"method.add: branching cannot be combined with the tool {tool}: the state of a server cannot be copied"
            )


def roc_hooks(rl: RlSection) -> RocHooks:
    """Return the selection of rollouts. Loads the functions that the section names."""
    roc = rl.method.roc
    return RocHooks(
        keep=rl.group_size,
        rule=own_rule(roc.rule) if is_own(roc.rule) else roc.rule,  # type: ignore[arg-type]
        penalties=_penalties(roc.penalties),
        min_positive=roc.min_positive,
        min_negative=roc.min_negative,
        masks_failures=rl.on_infrastructure_failure != "keep",
        environment_penalties={
            entry.name: _penalties(entry.roc_penalties) for entry in rl.environments if entry.roc_penalties is not None
        },
    )


def method_hooks(rl: RlSection) -> tuple[MethodHooks, ...]:
    """Return the methods of a section, in the order in which their hooks are called. Loads the functions that it names."""
    roc, method, limits = roc_hooks(rl), rl.method, rl.limits
    methods: list[MethodHooks] = [roc]
    if isinstance(method, Grpo):
        methods.append(GrpoHooks(method.normalise_std))
    elif isinstance(method, Maxrl):
        methods.append(MaxrlHooks())
    elif isinstance(method, Otb):
        methods.append(OtbHooks())
    elif isinstance(method, ReinforcePP):
        methods.append(ReinforcePPHooks(method.baseline))
    else:
        methods.append(own_hooks(method.type, "rl.method.type"))
    if overlong := method.added(OverlongBuffer):
        methods.append(OverlongBufferHooks(overlong.tokens, limits.max_response_tokens))
    if repetition := method.added(Repetition):
        methods.append(RepetitionHooks(repetition.weight, repetition.ngram))
    if budget := method.added(ToolBudget):
        normalise_std = isinstance(method, Grpo) and method.normalise_std
        methods.append(ToolBudgetHooks(budget.weight, budget.easy_from, limits.max_turns, normalise_std))
    if method.added(TaskNormalisation):
        methods.append(TaskNormalisationHooks())
    if method.added(OverlongFilter):
        methods.append(OverlongFilterHooks())
    if method.added(VoidTurns):
        methods.append(VoidTurnsHooks())
    if method.added(ControlTokens):
        methods.append(ControlTokensHooks())
    if echo := method.added(Echo):
        methods.append(EchoHooks(echo.weight))
    if opd := method.added(Opd):
        methods.append(OpdHooks(opd.weight))
    if sdpo := method.added(Sdpo):
        methods.append(SdpoHooks(sdpo.weight, roc))
    return tuple(methods)


def _penalties(names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the penalties; user functions are loaded."""
    return tuple(own_penalty(name) if is_own(name) else name for name in names)
