"""A recipe: everything that describes a run, in one YAML file. Unknown keys are refused with the nearest known name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rstar_lab.errors import UserError
from rstar_lab.rl.algorithm.config import Aggregation, LossConfig, SelectionConfig, Variant
from rstar_lab.rl.algorithm.roc import Penalty, SelectionRule
from rstar_lab.rl.plugins import NAME
from rstar_lab.verify import AnswerFormat

CODE_TOOLS = ("python", "python_released", "jupyter")


class RecipeError(UserError):
    """A recipe that cannot be used; the message names the key."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


class Synthetic(Section):
    """Problems made on the spot by the tiny recipe's families."""

    count: Positive
    seed: int = 0
    levels: tuple[int, ...] | None = None
    families: tuple[str, ...] | None = None


class Problems(Section):
    """Where problems come from: a file (parquet, JSON, JSONL), or `synthetic`."""

    file: Path | None = None
    fields: dict[Literal["problem_id", "question", "answer", "source", "difficulty"], str] = {}
    synthetic: Synthetic | None = None
    limit: Positive | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "Problems":
        if (self.file is None) == (self.synthetic is None):
            raise ValueError("give either file or synthetic")
        return self


class MixEntry(Section):
    """`count` conversations of a file that `rstar-lab data convert` wrote; None: all of them."""

    file: Path
    count: Positive | None = None


class SftConfig(Section):
    """How to fine-tune; the defaults are the paper's."""

    epochs: float = Field(3, gt=0)
    batch_size: int = Field(128, ge=1, description="conversations a step")
    lr: float = Field(5e-6, gt=0, description="of AdamW")
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon: Muon on the matrices, AdamW on the rest")
    muon_lr: float = Field(1e-2, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup: float = Field(0.04, ge=0, lt=1, description="share of the steps")
    schedule: Literal["cosine", "linear_tail"] = Field(
        "cosine", description="linear_tail: constant, then down to 0 over the second half"
    )
    grad_clip: float = Field(1.0, gt=0)
    max_tokens: int = Field(8192, ge=2, description="longer conversations are left out and counted")
    packing: bool = Field(
        True, description="several conversations in a row, each seeing itself alone; else rows of like length, padded"
    )
    micro_batch_tokens: int = Field(8192, ge=2, description="tokens in one forward pass")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="of the products; weights are fp32. auto: bf16 where the hardware has it"
    )
    gradient_checkpointing: bool = False
    checkpoint_every: int = Field(200, ge=1, description="steps")
    seed: int = 0


class SftSection(SftConfig):
    """Non-reasoning SFT: instruction following, JSON tool calls, the form of the answer (paper, section 4.1)."""

    problems: Problems | None = Field(
        None, description="their traces are made in the sandbox; only the synthetic families have any"
    )
    mix: dict[str, float] = Field({}, description="shares of the kinds of trace (traces.TraceMix)")
    conversations: tuple[MixEntry, ...] = Field(
        (), description="files that `rstar-lab data convert` wrote, and how many of each (none: all)"
    )

    @model_validator(mode="after")
    def _something_to_imitate(self) -> "SftSection":
        if self.problems is None and not self.conversations:
            raise ValueError("give problems, conversations or both")
        return self


class RlSection(Section):
    """What every stage starts from; a stage may change any key."""

    problems_per_step: Positive = 512
    group_size: Positive = 16
    oversample: Positive = 2
    roc: SelectionRule = Field(
        "paper",
        description="which of the oversampled rollouts are kept; random is a control, none rolls out group_size",
    )
    roc_penalties: tuple[Penalty, ...] = ("errors", "format")
    clip_low: float = 0.2
    clip_high: float = 0.28
    variant: Variant = "grpo"
    aggregation: Aggregation = "token-mean"
    normalise_std: bool = True
    max_response_tokens: Positive = 8192
    max_turns: Positive = 10
    max_calls_per_turn: Positive = Field(
        8, description="Tool calls of one turn that are executed; further ones are answered with an error."
    )
    max_tool_chars: Positive = 4096
    time_limit_s: float | None = Field(None, gt=0, description="of one rollout, in the middle of a turn too")
    step_time_s: float | None = Field(None, gt=0, description="of a step's rollouts: what has not ended by then is cut")
    carry_over: bool = Field(False, description="a cut rollout, with its group, goes on in the next step")
    temperature: float = Field(1.0, gt=0)
    lr: float = 1e-6
    warmup_steps: NotNegative = 20
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    mini_batches: Positive = 1
    micro_batch_tokens: Positive = Field(
        16384, description="tokens in one forward pass; a CPU takes at most 1,024, for its caches"
    )
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    rollout: Literal["async", "lockstep"] = "async"
    token_arrays: Literal["all", "kept", "sampled"] = "kept"
    checkpoint_every: Positive = 10
    keep_checkpoints: Positive = 2
    tools: tuple[str, ...] = Field(
        ("python",),
        description="python, python_released, jupyter; own ones: module:function, module:Class, or a URL (docs/own-tools.md)",
    )
    tool_timeout_s: float = Field(30.0, gt=0, description="of a call of an own tool; code has sandbox.timeout_s")
    reward: str = Field("verify", description="verify: 1 for a right answer, else 0; or module:function")
    answer: AnswerFormat = Field(
        "tagged",
        description="where reward: verify reads the answer. tagged: the last \\boxed{} in the last <answer>; "
        "boxed: the last \\boxed{} of the response; last_number: the last number of the response",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="of the update's products; weights are fp32. auto: bf16 on a GPU, else fp32"
    )
    gradient_checkpointing: bool = False
    # Published additions, each off (docs/algorithm.md).
    importance_cap: float | None = Field(
        None, gt=0, description="truncated importance sampling: cap of a token's trainer / engine probability"
    )
    kl_coefficient: float = Field(0.0, ge=0, description="of the KL to the model the stage started from")
    overlong_buffer: NotNegative = Field(
        0, description="tokens before the limit over which the reward falls by 1, for advantages only"
    )
    drop_void_turns: bool = Field(False, description="leave out rollouts with a turn of neither call nor answer")
    fp32_head: bool = Field(False, description="LM head in fp32 where the rest runs in bf16")
    dynamic_sampling: NotNegative = Field(
        0, description="most further rounds of problems in place of groups without signal"
    )
    retire_from: float | None = Field(
        None, gt=0, le=1, description="pass rate in a step from which a problem is not drawn again"
    )

    @property
    def loss_config(self) -> LossConfig:
        """The options of the training loss."""
        return LossConfig(
            variant=self.variant,
            aggregation=self.aggregation,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            horizon=self.max_response_tokens,
            importance_cap=self.importance_cap,
            kl_coefficient=self.kl_coefficient,
        )

    @property
    def selection_config(self) -> SelectionConfig:
        """The options of the selection of rollouts."""
        return SelectionConfig(
            rule=self.roc,
            group_size=self.group_size,
            penalties=self.roc_penalties,
            normalise_std=self.normalise_std,
            max_response_tokens=self.max_response_tokens,
            overlong_buffer=self.overlong_buffer,
            drop_void_turns=self.drop_void_turns,
        )

    @property
    def rollouts_per_group(self) -> int:
        """Rollouts generated per group, before selection."""
        return self.group_size * (1 if self.roc == "none" else self.oversample)

    @field_validator("tools")
    @classmethod
    def _tools_have_names(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        for tool in tools:
            if tool not in CODE_TOOLS and not NAME.fullmatch(tool) and not tool.startswith(("http://", "https://")):
                raise ValueError(f"{tool!r} is none of {', '.join(CODE_TOOLS)}, no module:function and no URL")
        return tools

    @field_validator("reward")
    @classmethod
    def _reward_has_a_name(cls, reward: str) -> str:
        if reward != "verify" and not NAME.fullmatch(reward):
            raise ValueError(f"{reward!r} is neither verify nor module:function")
        return reward

    @model_validator(mode="after")
    def _options_fit(self) -> "RlSection":
        if self.importance_cap is not None and self.old_log_probs == "engine":
            raise ValueError("importance_cap needs old_log_probs: trainer (with engine the ratio holds the correction)")
        if self.step_time_s is not None and self.rollout == "lockstep":
            raise ValueError("step_time_s needs rollout: async (where a clock cuts batches, no two runs are the same)")
        if self.carry_over:
            if self.step_time_s is None:
                raise ValueError("carry_over needs step_time_s, which says when rollouts are cut")
            if self.old_log_probs != "engine":
                raise ValueError(
                    "carry_over needs old_log_probs: engine (the trainer has forgotten the older policies)"
                )
            if self.dynamic_sampling:
                raise ValueError(
                    "carry_over and dynamic_sampling exclude each other: which groups have signal shows late"
                )
        if self.overlong_buffer > self.max_response_tokens:
            raise ValueError(f"overlong_buffer must be at most max_response_tokens, {self.max_response_tokens}")
        return self


class HandOff(Section):
    """What ends a stage before its `steps`: any of these, looked at after each step."""

    solved_groups: float | None = Field(
        None, gt=0, le=1, description="share of groups solved by all their rollouts, mean over `window` steps"
    )
    truncation_plateau: float | None = Field(
        None, ge=0, description="largest change of the truncated share from one `window` of steps to the next"
    )
    window: Positive = 10

    @model_validator(mode="after")
    def _has_a_trigger(self) -> "HandOff":
        if self.solved_groups is None and self.truncation_plateau is None:
            raise ValueError("give solved_groups, truncation_plateau or both")
        return self


class DifficultyFilter(Section):
    """Before a stage: roll out its problems with the newest policy, drop what it can do (paper: stage 3, 8 of 8)."""

    samples: Positive = 8
    drop_from: float = Field(1.0, gt=0, le=1, description="pass rate from which a problem is dropped")


class Stage(Section):
    """One stage of RL: its problems, its length in steps, and any key of `rl`."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    problems: Problems
    steps: Positive = Field(description="with hand_off: at most so many")
    hand_off: HandOff | None = None
    filter: DifficultyFilter | None = None
    reset_optimizer: bool = Field(False, description="forget AdamW's moments at the start")
    rl: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "rl" in data:
            return data
        own = {key: value for key, value in data.items() if key not in RlSection.model_fields}
        return own | {"rl": {key: value for key, value in data.items() if key in RlSection.model_fields}}


class EngineSection(Section):
    """The inference engines. count None: one a core on a CPU (two at the most useful), one a GPU elsewhere."""

    kind: Literal["vllm", "transformers", "server"] = Field(
        "vllm", description="server: vLLM servers at `urls`, such as `rstar-lab serve` starts"
    )
    urls: tuple[str, ...] = Field((), description="of servers; their token is the environment's RSTAR_LAB_API_KEY")
    deadline_s: float = Field(3600.0, gt=0, description="of one request to a server")
    count: Positive | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    kv_cache_gb: float | None = Field(None, gt=0, description="CPU only")
    memory_share: float = Field(0.85, gt=0, le=1, description="GPU only: share of its memory")
    max_batch: Positive = 256
    scheduler: Literal["turn-barrier", "static", "least-in-flight", "kv", "adaptive"] = Field(
        "adaptive",
        description="which turn goes to which engine, and when (docs/scheduler.md); lockstep has a split of its own",
    )
    stall_s: float = Field(300.0, gt=0)
    mismatch_limit: float | None = Field(
        None,
        description="largest mean |log-prob difference| to the trainer; none: 0.001 in float32, no limit in bfloat16",
    )

    @property
    def resolved_mismatch_limit(self) -> float | None:
        """`mismatch_limit`, or its default for the dtype; None: no limit."""
        if self.mismatch_limit is None and self.dtype == "float32":
            return 1e-3
        return self.mismatch_limit

    @model_validator(mode="after")
    def _urls_for_servers(self) -> "EngineSection":
        if (self.kind == "server") != bool(self.urls):
            raise ValueError(
                "urls and kind: server belong together: --set engine.kind=server --set engine.urls=[URL, ...]"
            )
        if wrong := next((url for url in self.urls if not url.startswith(("http://", "https://"))), None):
            raise ValueError(f"urls: {wrong!r} does not begin with http:// or https://")
        return self


class SandboxSection(Section):
    """Where code runs: `local`, or the URL of `rstar-lab sandbox serve` (its token in RSTAR_LAB_SANDBOX_TOKEN)."""

    url: str = "local"
    workers: Positive | None = None
    timeout_s: float = Field(4.0, gt=0)
    memory_mb: Positive = 512


class EvaluateSection(Section):
    """Evaluation: sets of problems by name, and how they are sampled (the paper's settings by default)."""

    sets: dict[str, Problems] = {}
    samples: Positive = 16
    temperature: float = Field(0.6, ge=0)
    top_p: float = Field(0.95, gt=0, le=1)
    max_turns: Positive = 30
    max_response_tokens: Positive = 30_000


class Recipe(Section):
    """A whole run. `model`: a folder in Hugging Face format, or `tiny` to build one from nothing."""

    name: str = Field("recipe", pattern=r"^[A-Za-z0-9._-]+$")
    label: str = Field("", description="what the run is called in comparisons; runs that share one are its seeds")
    model: str
    vocabulary: Positive = Field(1024, description="of the tokenizer, where the model is tiny")
    seed: int = 0
    processes: Positive = Field(
        1, description="on a CPU: processes of one thread each that share the batches of SFT and the updates of RL"
    )
    runs: Path = Path("runs")
    sft: SftSection | None = None
    rl: RlSection = RlSection()
    stages: tuple[Stage, ...] = ()
    engine: EngineSection = EngineSection()
    sandbox: SandboxSection = SandboxSection()
    evaluate: EvaluateSection = EvaluateSection()

    def settings(self, stage: Stage) -> RlSection:
        """The keys of `rl` as they hold in a stage."""
        return RlSection(**(self.rl.model_dump() | stage.rl))

    @model_validator(mode="after")
    def _stages_hold(self) -> "Recipe":
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError("stages: two have the same name")
        if self.engine.kind == "server" and "lockstep" in {
            rl.rollout for rl in (self.rl, *map(self.settings, self.stages))
        }:
            raise ValueError("rl.rollout: servers make their own batches: async with engine.kind: server, not lockstep")
        for stage in self.stages:
            settings = self.settings(stage)
            for key in ("tools", "reward", "answer"):
                if getattr(settings, key) != getattr(self.rl, key):
                    raise ValueError(f"stages.{stage.name}.{key}: it is one for the whole run; set rl.{key}")
        return self
