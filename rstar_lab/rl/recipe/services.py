"""The `engine`, `sandbox` and `evaluate` sections of a recipe."""

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rstar_lab.rl.recipe.data import Problems
from rstar_lab.rl.section import Function, NotNegative, Positive, Section


class EngineSection(Section):
    """The inference engines that generate rollouts."""

    kind: Literal["vllm", "transformers", "server"] = "vllm"
    """`vllm`: vLLM processes. `transformers`: for machines without vLLM. `server`: vLLM servers at `urls`, for example from
    `rstar-lab serve`."""
    urls: tuple[str, ...] = ()
    """URLs of the servers. Their token is in the environment variable RSTAR_LAB_API_KEY."""
    teacher_url: str | None = None
    """URL of a vLLM server with the teacher of the method `opd`, which must have the tokenizer of the trained model."""
    deadline_s: float = Field(3600.0, gt=0)
    """Time limit of one request to a server in seconds."""
    count: Positive | None = None
    """Number of engines. Default: one per GPU; on a CPU one per core, at most four."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights in the engine."""
    kv_cache_gb: float | None = Field(None, gt=0)
    """Size of the KV cache of one engine in GB. CPU only; on a GPU see `gpu_memory_utilization`."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory that an engine takes."""
    max_num_seqs: Positive = 256
    """Maximum sequences that an engine generates at once."""
    scheduler: Literal["least-in-flight", "kv", "adaptive"] | Function = "adaptive"
    """Policy that assigns turns to engines (docs/scheduler.md), or your own `module:Class` (docs/extending.md). Ignored with
    `lockstep`."""
    stall_s: float = Field(300.0, gt=0)
    """Seconds without progress after which an engine is restarted."""
    mismatch_limit: float | None = Field(None, ge=0)
    """Mean absolute difference between the log-probs of engine and trainer above which the run stops. Default: 0.001 in float32,
    0.1 in bfloat16."""

    def mismatch_limit_of(self, dtype: str = "") -> float:
        """Return `mismatch_limit`, or its default for engines of a dtype. dtype: default: that of the section."""
        if self.mismatch_limit is None:
            return 1e-3 if (dtype or self.dtype) == "float32" else 0.1
        return self.mismatch_limit

    @model_validator(mode="after")
    def _check_urls(self) -> "EngineSection":
        if (self.kind == "server") != bool(self.urls):
            raise ValueError(
                "kind: server requires urls, and urls require kind: server: --set engine.kind=server --set engine.urls=[URL, ...]"
            )
        for key, url in (("teacher_url", self.teacher_url), *(("urls", url) for url in self.urls)):
            if url is not None and not url.startswith(("http://", "https://")):
                raise ValueError(f"{key}: {url!r} does not begin with http:// or https://")
        return self


class SandboxSection(Section):
    """Where the code of tool calls runs, and its limits."""

    url: str = "local"
    """`local`, or the URL of `rstar-lab sandbox serve`, whose token is in the environment variable RSTAR_LAB_SANDBOX_TOKEN."""
    isolation: Literal["namespaces", "gvisor"] = "namespaces"
    """Isolation of a local sandbox. `gvisor`: a container with gVisor's kernel for each call; slower; requires `runsc`
    (docs/sandbox-boundary.md)."""
    workers: Positive | None = None
    """Processes of a local sandbox. Default: depends on the number of cores."""
    timeout_s: float = Field(4.0, gt=0)
    """Time limit of one call in seconds. Default: MAX_EXECUTION_TIME in the release's README."""
    memory_mb: Positive = 512
    """Memory limit of one call in MB."""
    fault_share: float = Field(0.0, ge=0, le=1)
    """Random share of the calls of code tools that fail as `sandbox_error`, to measure what that costs (docs/ablation.md)."""

    @model_validator(mode="after")
    def _check_isolation(self) -> "SandboxSection":
        if self.isolation != "namespaces" and self.url != "local":
            raise ValueError(
                f"isolation: {self.isolation} is for url: local; start the server at {self.url} with "
                f"`rstar-lab sandbox serve --isolation {self.isolation}`"
            )
        return self


class DuringSection(Section):
    """Evaluation during RL. Other defaults: those of `evaluate`."""

    every: NotNegative = 0
    """RL steps between evaluations; 0: never. The results are the metrics `eval/<set>/pass1`; the rollouts are separate runs."""
    sets: tuple[str, ...] = ()
    """Names of the sets of `evaluate.sets`. Default: all."""
    samples: Positive | None = None
    """Rollouts per problem."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling threshold."""
    max_turns: Positive | None = None
    """Maximum model turns of a rollout."""
    max_response_tokens: Positive | None = None
    """Maximum tokens of a response."""


class EvaluateSection(Section):
    """Evaluation: problem sets and how they are sampled."""

    sets: dict[str, Problems] = Field({})
    """Problem sets by name. `rstar-lab run` evaluates all models on each."""
    during: DuringSection = DuringSection()
    """Evaluation during RL."""
    samples: Positive = 16
    """Rollouts per problem. Default: paper, section 5."""
    temperature: float = Field(0.6, ge=0)
    """Sampling temperature. Default: paper, section 5."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus sampling threshold."""
    max_turns: Positive = 30
    """Maximum model turns of a rollout. Default: paper, section 5."""
    max_response_tokens: Positive = 30_000
    """Maximum tokens of a response, with all turns and tool responses. Default: paper, section 5."""

    @field_validator("sets")
    @classmethod
    def _check_names(cls, sets: dict[str, Problems]) -> dict[str, Problems]:
        if wrong := [name for name in sets if not re.fullmatch(r"[A-Za-z0-9._-]+", name)]:
            raise ValueError(f"{wrong[0]!r} is a part of run ids: use letters, digits, '.', '_' and '-'")
        return sets

    @model_validator(mode="after")
    def _check_during(self) -> "EvaluateSection":
        if unknown := [name for name in self.during.sets if name not in self.sets]:
            raise ValueError(f"during.sets: {unknown[0]} is not one of sets: {', '.join(self.sets) or 'none'}")
        return self

    def in_training(self) -> "EvaluateSection":
        """Return the settings of the evaluations during RL."""
        changes = self.during.model_dump(exclude={"every", "sets"}, exclude_none=True)
        sets = {name: section for name, section in self.sets.items() if name in (self.during.sets or self.sets)}
        return self.model_copy(update={**changes, "sets": sets})
