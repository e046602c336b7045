"""The `rl` section of a recipe: defaults of all RL stages, combinations of keys that are not allowed, and the methods that it selects."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from rstar_lab.rl.algorithm.config import Correction, LossConfig
from rstar_lab.rl.algorithm.hooks import MethodHooks
from rstar_lab.rl.methods import AnyMethod, Grpo
from rstar_lab.rl.methods.samplers import Sampler
from rstar_lab.rl.methods.user_functions import user_correction, user_loss
from rstar_lab.rl.plugins import NAME
from rstar_lab.rl.recipe.correction import AnyCorrection, NoCorrection, RatioCorrection
from rstar_lab.rl.recipe.environments import EnvironmentEntry
from rstar_lab.rl.recipe.limits import LimitsSection
from rstar_lab.rl.recipe.lora import Lora
from rstar_lab.rl.recipe.prompt import PROGRAM_INSTRUCTION, AnyPrompt, ModelPrompt, OpenPrompt, PaperPrompt
from rstar_lab.rl.recipe.schedule import AnySchedule, Async, OffPolicy, Sync
from rstar_lab.rl.renderers.base import PromptStyle
from rstar_lab.rl.section import TESTS, Function, NotNegative, Positive, Reward, Section, is_user_function
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
        return next((part.branch_entropy for part in self.method.parts if part.branch_entropy is not None), None)

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
        if self.correction.type != "none" and self.old_log_probs == "engine":
            raise ValueError(
                "correction requires old_log_probs: trainer (with engine, the importance ratio already corrects the difference)"
            )
        for part in self.method.parts:
            part.check(self)
        if self.sync.carry_over and self.old_log_probs != "engine":
            raise ValueError(
                "schedule.carry_over requires old_log_probs: engine (the trainer does not keep older policy versions)"
            )
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
