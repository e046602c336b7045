"""The `rl` section of a recipe: defaults of all RL stages."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rstar_lab.rl.algorithm.config import (
    CORRECTION_BOUNDS,
    Aggregation,
    Correction,
    LossConfig,
    Variant,
)
from rstar_lab.rl.algorithm.hooks import MethodHooks
from rstar_lab.rl.algorithm.roc import Penalty, SelectionRule
from rstar_lab.rl.plugins import NAME
from rstar_lab.rl.recipe.environments import EnvironmentEntry
from rstar_lab.rl.recipe.functions import own_correction, own_loss
from rstar_lab.rl.recipe.hooks import method_hooks
from rstar_lab.rl.recipe.lora import Lora
from rstar_lab.rl.recipe.rl_checks import check_combinations
from rstar_lab.rl.renderers.base import PromptFormat, PromptStyle, TruncateSide
from rstar_lab.rl.section import Function, NotNegative, Positive, Reward, Section, is_own
from rstar_lab.verify import AnswerFormat

Mode = Literal["sync", "one_step_off", "async"]
WhenStale = Literal["wait", "drop", "trim"]
TOOL_ADDRESSES = ("http://", "https://", "mcp+stdio:", "mcp+http://", "mcp+https://")
CODE_TOOLS = ("python", "python_released", "jupyter")
PROMPT_KEYS = (
    "prompt_format",
    "system_prompt",
    "question_wrapper",
    "answer_instruction",
    "template_options",
    "chat_template",
)


class RlSection(Section):
    """Defaults of all RL stages. A stage may change any key except `tools`, `reward`, `answer`, `lora`, `environments` and
    the keys of the prompt."""

    problems_per_step: Positive = 512
    """Problems (groups) per step. Default: paper, section 4.2."""
    group_size: Positive = 16
    """Rollouts per problem that are trained on. Default: paper, section 4.2."""
    oversample: Positive = 2
    """Each problem gets `group_size * oversample` rollouts, of which `group_size` are trained on. Default: paper, section
    3.2 (GRPO-RoC)."""
    roc: SelectionRule | Function = "paper"
    """How `group_size` rollouts are selected from a group. `paper`: failed rollouts uniformly, successful ones with
    probability inversely proportional to their penalty (section 3.2). `released`: the rule of microsoft/rStar. `random`: uniformly,
    as a control. `none`: no oversampling (plain GRPO). Or your own `module:function` (docs/extending.md)."""
    roc_penalties: tuple[Penalty | Function, ...] = ("errors", "format")
    """Penalties of a successful rollout that RoC adds up: `errors` (tool errors), `format` (answer tags), or your
    own `module:function` of a trajectory. Default: paper, section 3.2."""
    roc_min_positive: NotNegative = 0
    """Minimum number of successful rollouts that RoC keeps, if the group has that many. Default: our choice; the release's
    script uses 2."""
    roc_min_negative: NotNegative = 0
    """Minimum number of failed rollouts that RoC keeps, if the group has that many. Default: our choice; the release's
    script uses 2."""
    clip_low: float = 0.2
    """Lower clip range of the importance ratio. Default: paper, section 3.1. Has no effect on the first
    mini-batch, whose ratio is 1."""
    clip_high: float = 0.28
    """Upper clip range of the importance ratio (clip-higher of DAPO). Default: paper, section 3.1."""
    variant: Variant | Function = "grpo"
    """Policy loss. Default: paper. `gspo`: arXiv 2507.18071. `cispo`: 2506.13585. `clip_cov`, `kl_cov`: 2505.22617. Or your own
    `module:function` (docs/extending.md)."""
    aggregation: Aggregation = "token-mean"
    """How token losses are averaged. `token-mean`: over all tokens of the batch (verl's default). `group-token-mean`:
    over the tokens of each group (the paper's objective). `seq-mean-token-sum-norm`: Dr.GRPO. Default: our choice."""
    advantage: Literal["group", "maxrl", "otb"] | Function = "group"
    """`group`: reward minus the mean of its group (GRPO). `maxrl`: that divided by the mean, which weights hard problems
    more (MaxRL, arXiv 2602.02710; `normalise_std` has no effect). `otb`: reward minus a separate baseline for each
    token, in which rollouts with large gradients have more weight (OTB in its variant for tool calls, arXiv 2602.07078;
    local trainer only, requires one more forward pass, ignores `normalise_std`). Or your own `module:function` (docs/extending.md)."""
    normalise_std: bool = True
    """Divide advantages by the standard deviation of rewards in the group. Default: paper. `false`: Dr.GRPO."""
    max_response_tokens: Positive = 8192
    """Maximum tokens of a response: all turns and tool responses together. Default: paper, stage 1."""
    max_turns: Positive = 10
    """Maximum model turns of a rollout. Default: paper, stages 1 and 2."""
    max_calls_per_turn: Positive = 8
    """Tool calls of one turn that are executed; each further call gets an error as its response. Default: our choice."""
    max_tool_chars: Positive = 4096
    """Maximum characters of a tool response; the middle of longer responses is removed. Default: our choice; the release uses
    256."""
    tool_truncate_side: TruncateSide = "middle"
    """How a long tool response is truncated; only with `prompt_format: released`. As in the release, `left` keeps the start
    and `right` keeps the end. Default: as the release."""
    prompt_format: PromptFormat = "paper"
    """Format of prompts, tool schemas and tool responses. `paper`: as the paper describes it. `released`: exactly as
    microsoft/rStar renders them, for the released rStar2-Agent-14B. `model`: by the model's own chat template, with its own
    syntax of tool calls, for any chat model (docs/recipes.md). SFT supports `paper` and `released`. Cannot differ between
    stages."""
    system_prompt: str | None = None
    """System prompt; "" for none. Not with `prompt_format: released`. Default: that of the prompt format."""
    question_wrapper: str | None = None
    """Template of the user message: a text that contains `{question}` and optionally `{answer_instruction}`. Not with
    `prompt_format: released`. Default: the question, an empty line, the instruction."""
    answer_instruction: str | None = None
    """How the model is asked to write its answer. Not with `prompt_format: released`. Default: `<answer>` tags with a
    box; with `prompt_format: model`, what `answer` reads."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking: false`. Requires `prompt_format: model`."""
    chat_template: Function | None = None
    """Your own `module:function` that renders conversations in place of the model's chat template (docs/extending.md).
    Requires `prompt_format: model`."""
    time_limit_s: float | None = Field(None, gt=0)
    """Wall-clock limit of one rollout in seconds; it also interrupts a turn. Default: none."""
    step_time_s: float | None = Field(None, gt=0)
    """Wall-clock limit of a step's rollouts in seconds. Unfinished rollouts are cut off and count as truncated, unless
    `carry_over` is set. Requires `rollout: async`. Default: none."""
    carry_over: bool = False
    """Continue rollouts that `step_time_s` cut off in the next step, with their groups (arXiv 2501.12599). Requires
    `step_time_s` and `old_log_probs: engine`."""
    mode: Mode = "sync"
    """`sync`: generate, then update. `one_step_off`: generate the next step's rollouts during the update, with the weights
    before it. `async`: generation never stops; requests in flight continue under new weights (docs/async.md). The last
    two require `rollout: async` and a `correction`."""
    max_staleness: NotNegative = 1
    """`mode: async`: maximum number of updates between the weights with which a group starts and the weights that are
    trained on it. Default: our choice."""
    when_stale: WhenStale = "wait"
    """`mode: async`: how `max_staleness` is enforced. `wait`: the generator delays new groups, and
    the trainer waits for slow groups; nothing is dropped. `drop`: drop groups that exceed the limit. `trim`: mask the
    tokens that exceed it."""
    buffer_groups: Positive | None = None
    """`mode: async`: maximum number of groups, in progress or complete, that no update has used yet. Default:
    `problems_per_step * (max_staleness + 1)`."""
    allow_uncorrected: bool = False
    """Allow `mode: one_step_off` and `async` without a `correction`."""
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
    rollout: Literal["async", "lockstep"] = "async"
    """`async`: every rollout proceeds on its own. `lockstep`: turns in fixed batches; the same machine, versions and
    seed give the same bits."""
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
    tool_timeout_s: float = Field(30.0, gt=0)
    """Time limit of one call of your own tool in seconds. Code tools use `sandbox.timeout_s`. Default: our choice."""
    environments: tuple[EnvironmentEntry, ...] = ()
    """Several tasks in one run, mixed by weight in every step (docs/environments.md). Problems that name no environment
    use `tools` and `reward`. Default: none. Cannot differ between stages."""
    reward: Reward = "verify"
    """`verify`: 1 for a correct final answer, else 0 (paper, section 2). `released`: graded by prime_math and math-verify, as
    in microsoft/rStar. Or your own `module:function` of (text of the model, true answer), or one written for TRL
    (docs/own-tools.md). Cannot differ between stages."""
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
    """Precision of the matrix products of the update; weights, gradients and optimizer states are fp32. `auto`: bf16 on
    a GPU if the engine has `dtype: bfloat16`, else fp32. Default: our choice."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more computation."""
    importance_cap: float | None = Field(None, gt=0)
    """Equivalent to `correction: tis` with this upper bound. Default: off."""
    correction: Correction | Function = "none"
    """Off-policy correction by the ratio of trainer to engine probability: `tis` and `seq_tis` truncate it per token or
    sequence, `token_mask`, `seq_mask`, `geo_mask` and `icepop` leave tokens or sequences out (formulas and sources in
    docs/algorithm.md). Or your own `module:function` (docs/extending.md). Requires `old_log_probs: trainer`. Default:
    none."""
    correction_bounds: tuple[float, float] | None = None
    """Lower and upper bound of that ratio. Default: the bounds of the correction's source (docs/algorithm.md)."""
    max_corrected_share: float = Field(0.5, gt=0, le=1)
    """Stop the run if the correction truncates or drops more than this share of the tokens in 5 consecutive updates:
    the rollouts then come from too different a policy. Default: our choice."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Coefficient of the KL divergence (k3 estimator) to the model at the start of the stage. Default: 0 (paper)."""
    teacher_weight: float = Field(0.0, ge=0)
    """On-policy distillation: weight of log p_teacher - log p_student, which is added to the advantage of each token (arXiv
    2306.13649). Groups with equal rewards are then kept. Requires `engine.teacher_url`. Local trainer only. Default: 0, off."""
    self_distillation: float = Field(0.0, ge=0)
    """Weight of self-distillation: a failed rollout is scored again with a successful rollout of its group in the prompt, the
    one with the lowest RoC penalty and without tool errors; weight * (log p with it - log p) is added to the advantage of each
    token (after SDPO, arXiv 2601.20802). Local trainer only, one more forward pass. Default: 0, off."""
    tool_output_loss: float = Field(0.0, ge=0)
    """Weight of the cross-entropy of the tokens of tool responses, which is added to the loss: the model learns to predict
    what its code prints (ECHO, arXiv 2605.24517). Local trainer only. Default: 0, off."""
    overlong_buffer: NotNegative = 0
    """Soft overlong penalty (arXiv 2503.14476, equation 13): the reward falls linearly by 1 over this many tokens
    before the limit. Used for advantages only. Default: 0, off."""
    tool_budget: float = Field(0.0, ge=0)
    """Weight of a penalty on the tool calls of successful rollouts of easy problems, sin(pi/2 * calls / max_turns). It changes an
    advantage by at most half of its size, so it never changes the sign (after AdaTIR, arXiv 2601.14696; the bound is ours).
    Requires `advantage: group`. Default: 0, off."""
    tool_budget_from: float = Field(0.5, gt=0, le=1)
    """A problem is easy for `tool_budget` if the pass rate of its group is at least this value. Default: our choice."""
    drop_void_turns: bool = False
    """Exclude rollouts with a turn that has neither a tool call nor an answer from the loss (arXiv 2509.02479)."""
    drop_control_tokens: bool = False
    """Exclude rollouts from the loss in which the model writes a control token that does not belong there: a role marker, a tag
    of tool responses, or a `<tool_call>` tag without its counterpart. Such tokens precede collapse (arXiv 2606.26027)."""
    fp32_head: bool = False
    """Compute the LM head in fp32 when the rest is bf16 (arXiv 2510.13786)."""
    branching: float | None = None
    """Branch a rollout after a tool response if the entropy at the start of the next turn exceeds that of its first turn by more
    than this many nats per token. Branches replace up to half of the rollouts of a group (after ARPO, arXiv 2507.19849). Requires
    `rollout: async`. Local trainer only. Default: off."""
    dynamic_sampling: NotNegative = 0
    """Maximum number of extra rounds in which new problems replace groups with equal rewards (arXiv 2503.14476).
    Default: 0, off."""
    retire_from: float | None = Field(None, gt=0, le=1)
    """Do not draw a problem again after a step with at least this pass rate (arXiv 2510.13786). Default: off."""

    @property
    def resolved_buffer_groups(self) -> int:
        """Maximum number of groups, in progress or complete, that no update has used yet."""
        return self.buffer_groups or self.problems_per_step * (self.max_staleness + 1)

    @property
    def loss_config(self) -> LossConfig:
        """The options of the training loss. Loads the functions that it names."""
        correction, bounds = self.resolved_correction
        config = LossConfig(
            variant=own_loss(self.variant) if is_own(self.variant) else self.variant,  # type: ignore[arg-type]
            aggregation=self.aggregation,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            horizon=self.max_response_tokens,
            correction=own_correction(correction) if is_own(correction) else correction,  # type: ignore[arg-type]
            correction_bounds=bounds,
            kl_coefficient=self.kl_coefficient,
        )
        for method in self.hooks:
            config = method.loss(config)
        return config

    @property
    def resolved_correction(self) -> tuple[Correction | Function, tuple[float, float]]:
        """The off-policy correction and its bounds."""
        if self.importance_cap is not None:
            return "tis", (0.0, self.importance_cap)
        if self.correction == "none" or is_own(self.correction):
            return self.correction, (0.0, 1.0)
        return self.correction, self.correction_bounds or CORRECTION_BOUNDS[self.correction]  # type: ignore[index]

    @property
    def hooks(self) -> tuple[MethodHooks, ...]:
        """The methods of the section, see `hooks.method_hooks`. Loads the functions that it names."""
        return method_hooks(self)

    @property
    def rollouts_per_group(self) -> int:
        """Rollouts generated per group, before selection."""
        return self.group_size * (1 if self.roc == "none" else self.oversample)

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

    @property
    def prompt_style(self) -> PromptStyle:
        """How the prompts of the run are written."""
        return PromptStyle(
            self.prompt_format,
            self.system_prompt,
            self.question_wrapper,
            self.answer_instruction,
            self.answer,
            self.template_options,
            self.chat_template,
        )
