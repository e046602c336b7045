"""Rehearse a job: run all its phases at small size on this machine. `rstar-lab rehearse RECIPE --profile P`."""

import contextlib
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.rehearsal.coverage import coverage
from benchmarks.rehearsal.data import make_model, read_weights, weights_differ, write_data
from benchmarks.rehearsal.job import RehearsalJob
from benchmarks.rehearsal.key_reads import recorded_reads, recording
from benchmarks.rehearsal.shrink import reads_folder, shrink_profile, shrink_recipe
from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import plain
from rstar_lab.hardware.processes import run_child
from rstar_lab.hardware.profiles import Profile, load_profile
from rstar_lab.jobs.preflight import set_options
from rstar_lab.rl.models.model_folder import model_folder
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.preflight.context import architecture_of
from rstar_lab.rl.preflight.run import Status, preflight
from rstar_lab.rl.recipe import Recipe, Stage
from rstar_lab.rl.training.stages import difficulty_file, stage_model
from rstar_lab.rl.verl.config import PREFIX, split_overrides
from rstar_lab.runs.reader import RunReader

# A rank of verl's trainer, or an engine of the local trainer.
WORKERS = {"verl": r"^ray::WorkerDict", "local": r"rstar_lab\.rl\.engines\.vllm_worker|VLLM::EngineCore"}
# Preflight checks of things that only the cluster has. The rehearsal replaces them.
REPLACED_CHECKS = {"model", "data", "tokens", "devices", "container"}


@dataclass(frozen=True)
class Phase:
    """Result of one phase. status: passed, failed, or "not covered"; `detail` then has the reason."""

    name: str
    status: str
    seconds: float
    detail: str


@dataclass
class RehearsalReport:
    """The result of a rehearsal, and its JSON form."""

    phases: list[Phase] = field(default_factory=list)
    covered: list[str] = field(default_factory=list)
    not_covered: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(phase.status == "failed" for phase in self.phases)

    def as_json(self) -> dict[str, Any]:
        """Return {"phases": [...], "covered": [...], "not_covered": [...]}."""
        return asdict(self)

    def skip(self, name: str, reason: str) -> None:
        """Add a phase that was not run."""
        self.phases.append(Phase(name, "not covered", 0.0, reason))

    def run(self, name: str, action: Callable[[], str], on_phase: Callable[[Phase], None]) -> bool:
        """Run one phase and return whether it passed. Its detail is the text that `action` returns, or the error.

        If an earlier phase failed, the phase is skipped.
        """
        if self.failed:
            self.skip(name, "an earlier phase failed")
            return False
        started = time.monotonic()
        try:
            detail, status = action(), "passed"
        except UserError as error:
            detail, status = str(error), "failed"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            detail, status = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})", "failed"
        phase = Phase(name, status, round(time.monotonic() - started, 1), detail)
        self.phases.append(phase)
        on_phase(phase)
        return status == "passed"


class Rehearsal:
    """One rehearsal in `folder`, which must be empty or absent. Its job is stopped at the end, also after a failed phase."""

    def __init__(
        self, recipe: str, profile: str, overrides: Mapping[str, Any], folder: Path, on_phase: Callable[[Phase], None]
    ):
        self.recipe_name, self.profile_name, self.overrides = recipe, profile, overrides
        self.folder, self.on_phase = folder, on_phase
        self.report = RehearsalReport()
        self.ray: Any = None  # the local Ray cluster, under verl

    def run(self) -> RehearsalReport:
        """Run all phases and return the report. Phases after a failed one are skipped."""
        with ExitStack() as stack:
            self._phase("resolve", self.resolve)
            self._phase("preflight", self.preflight)
            if reason := self._without_dry_run():
                self.report.skip("dry run", reason)
            else:
                self._phase("dry run", self.dry_run)
            self._phase("data", self.data)
            if not self.report.failed:
                stack.enter_context(self.cluster())
                stack.callback(self.job.stop)
            if self._has_sft:
                self._phase("sft", self.sft)
            else:
                self.report.skip("sft", "the recipe has no SFT")
            for number, stage in enumerate(self._stages):
                if stage.filter:
                    self._phase("filter", lambda stage=stage: self.filter(stage))  # type: ignore[misc]
                if number == 0:
                    self._phase("kill of a worker", self.kill_worker)
                if number == len(self._stages) - 1:
                    self._phase("kill of the job and resume", self.kill_job)
                self._phase(f"stage {stage.name}", lambda stage=stage: self.stage(stage))  # type: ignore[misc]
                if number + 1 < len(self._stages):
                    self._phase(f"hand-off after {stage.name}", lambda number=number: self.hand_off(number))  # type: ignore[misc]
            self._phase("end of the job", self.end)
            self._phase("evaluation", self.evaluate)
            self._phase("export to transformers", lambda: self.export("transformers"))
            self._phase("export to vLLM", lambda: self.export("vllm"))
            if hasattr(self, "small"):
                reads, dry = (recorded_reads(reads_folder(self.folder, dry)) for dry in (False, True))
                self.report.covered, self.report.not_covered = coverage(self.recipe, self.profile, reads, dry)
            if self.report.failed:
                covered, missing = self.report.covered, self.report.not_covered
                self.report.covered = []
                self.report.not_covered = [*missing, *(f"{key}: the rehearsal failed" for key in covered)]
        return self.report

    def _phase(self, name: str, action: Callable[[], str]) -> None:
        self.report.run(name, action, self.on_phase)

    @property
    def _stages(self) -> tuple[Stage, ...]:
        return self.small.stages if hasattr(self, "small") else ()

    @property
    def _has_sft(self) -> bool:
        return not hasattr(self, "small") or self.small.sft is not None

    # Phases

    def resolve(self) -> str:
        """Read the recipe and the profile, and write small versions of both."""
        self.profile: Profile = load_profile(self.profile_name)
        self.own_keys, verl_keys = split_overrides(self.overrides, self.profile)
        self.recipe: Recipe = load_recipe(self.recipe_name, self.own_keys, self.profile)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.small = shrink_recipe(self.recipe, self.folder)
        self.small_profile = shrink_profile(self.profile, self.folder)
        recipe_file, profile_file = self.folder / "recipe.yaml", self.folder / "profile.yaml"
        recipe_file.write_text(yaml.safe_dump(_without_none(self.small.model_dump(mode="json")), sort_keys=False))
        profile_file.write_text(yaml.safe_dump(self.small_profile.model_dump(mode="json"), sort_keys=False))
        self.environment = recording(reads_folder(self.folder))
        self.job = RehearsalJob(
            recipe_file, profile_file, self.folder / "runs", self.small.name, self.environment,
            {f"{PREFIX}{key}": value for key, value in verl_keys.items()},
        )  # fmt: skip
        return f"{len(self.small.stages)} stages; trainer {self.profile.trainer}, 2 ranks, 2 engines"

    def preflight(self) -> str:
        """Run preflight of the real job. Checks in REPLACED_CHECKS may fail."""
        findings = list(preflight(self.recipe_name, self.profile_name, self.overrides))
        failed = [
            f"{f.check}: {f.message}" for f in findings if f.status is Status.FAIL and f.check not in REPLACED_CHECKS
        ]
        if failed:
            raise UserError("; ".join(failed))
        passed = [finding for finding in findings if finding.status in (Status.PASS, Status.WARN)]
        other = sorted({finding.check for finding in findings} - {finding.check for finding in passed})
        return f"{len(passed)} of {len(findings)} checks of the real job pass" + (
            f"; not passed or not run on this machine: {', '.join(other)}" if other else ""
        )

    def _without_dry_run(self) -> str | None:
        """Return why an update at full size cannot be run on fake tensors."""
        if not hasattr(self, "profile"):
            return "an earlier phase failed"
        if not (
            self.profile.hardware.gpus and self.profile.hardware.bf16_tflops and self.profile.hardware.hbm_tb_per_s
        ):
            return "the profile has no GPU with peak rates"
        if architecture_of(self.recipe.model) is None:
            return f"the shape of {self.recipe.model} is unknown on this machine"
        return None

    def dry_run(self) -> str:
        """Run one update at full size, on fake tensors and a fake group of all ranks."""
        environment = recording(reads_folder(self.folder, dry=True))
        command = [sys.executable, "-m", "rstar_lab.cli", "preflight", self.recipe_name, "--profile", self.profile_name]
        command += [*set_options(self.own_keys), "--dry-run", "--json"]
        done = run_child(command, env={**os.environ, **environment})
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if not rows:
            raise UserError(f"the dry run failed: {done.stderr.strip()[-400:]}")
        found = "; ".join(f"{row['dry_run']}: {row['with_margin_gb']:.1f} GB per GPU" for row in rows)
        if not all(row["fits"] for row in rows):
            raise UserError(f"does not fit into {self.profile.hardware.hbm_gb:g} GB: {found}")
        return f"{found} with margin"

    def data(self) -> str:
        """Make the data and the model, and run preflight of the small job."""
        details = [write_data(self.small), make_model(self.small, self.folder)]
        self.weights = read_weights(Path(self.small.model))  # of the last part of the job that was checked
        findings = list(preflight(str(self.job.recipe), str(self.job.profile), self.job.overrides))
        failed = [f"{f.check}: {f.message}" for f in findings if f.status is Status.FAIL]
        if failed:
            raise UserError("the small job fails its preflight: " + "; ".join(failed))
        return "; ".join(details)

    @contextlib.contextmanager
    def cluster(self) -> Iterator[None]:
        """Under verl, run a Ray cluster with one node per rank until the end of the block."""
        if self.profile.trainer != "verl":
            yield
            return
        from rstar_lab.hardware.local_ray import LocalRay

        with LocalRay(nodes=self.small_profile.hardware.nodes, cpus=8, gpus=1, dashboard=False) as self.ray:
            yield

    def sft(self) -> str:
        """Submit the job and wait for its SFT."""
        job_id = self.job.submit()
        run = f"{self.small.name}-sft"
        self.job.wait_for(lambda: self.job.status(run) == "finished", "SFT")
        self._check_weights(model_folder(run, self.job.runs_dir), "SFT")
        return f"job {job_id}; {run} finished; it changed the weights"

    def filter(self, stage: Stage) -> str:
        """Wait for the difficulty filter of a stage."""
        self._ensure_submitted()
        path = difficulty_file(self.job.run_dir, stage.name)
        self.job.wait_for(path.exists, f"filter of stage {stage.name}")
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        kept = sum(table["kept"].to_pylist())
        return f"{kept} of {table.num_rows} problems kept before stage {stage.name}"

    def kill_worker(self) -> str:
        """Kill a worker after the first checkpoint of the first stage; the stage must still continue."""
        self._ensure_submitted()
        stage = self._stages[0]
        self.job.wait_for(lambda: self.job.last_checkpoint() >= 1, "first checkpoint")
        attempts = self.job.attempts
        candidates = self.ray.processes if self.ray else self.job.processes
        title = self.job.kill_worker(WORKERS[self.profile.trainer], candidates)
        self.job.wait_for(lambda: len(self.job.lines(stage.name)) > 1, "second step after the kill")
        return f"killed {title!r}; the stage continued (attempt {attempts} -> {self.job.attempts})"

    def kill_job(self) -> str:
        """Kill the whole job after the first checkpoint of the last stage, submit it again, and wait for the next step."""
        self._ensure_submitted()
        stage = self._stages[-1]
        count = 1 if len(self._stages) > 1 else 2
        self.job.wait_for(lambda: len(self.job.lines(stage.name)) >= count, f"step {count} of stage {stage.name}")
        step = self.job.lines(stage.name)[count - 1]["step"]
        self.job.wait_for(lambda: self.job.last_checkpoint() >= step, f"checkpoint of step {step}")
        killed = self.job.kill()
        self.job.submit()
        self.job.wait_for(lambda: len(self.job.lines(stage.name)) > count, "next step after the resume")
        return f"killed {killed} processes after step {step}; the job resumed (attempt {self.job.attempts})"

    def stage(self, stage: Stage) -> str:
        """Wait for all steps of a stage and check their metrics.

        Raises UserError if no update had a gradient, or if the weights are those before the stage.
        """
        self._ensure_submitted()
        self.job.wait_for(
            lambda: len(self.job.lines(stage.name)) >= stage.steps, f"{stage.steps} steps of stage {stage.name}"
        )
        lines = self.job.lines(stage.name)
        steps = [line["step"] for line in lines]
        if steps != list(range(steps[0], steps[0] + len(steps))):
            raise UserError(f"stage {stage.name}: steps {steps} are not consecutive")
        for line in lines:
            if line.get("loss") is not None and not math.isfinite(line["loss"]):
                raise UserError(f"stage {stage.name}, step {line['step']}: loss {line['loss']}")
        rewards = ", ".join(f"{line['reward']:.2f}" for line in lines)
        updates = sum(0 < (line.get("grad_norm") or 0) < math.inf for line in lines)
        if not updates:
            raise UserError(
                f"stage {stage.name}: no optimizer step in {len(lines)} steps (mean reward {rewards}): the rewards of every group "
                "are equal, so loss, update and weight sync were not executed"
            )
        self.job.wait_for(lambda: self.job.last_checkpoint() >= steps[-1], f"checkpoint of step {steps[-1]}")
        # The newest checkpoint can be one of the next stage.
        model = stage_model(self.job.run_dir, stage.name)
        newest = max(RunReader(self.job.run_dir).checkpoints().items())[1]
        self._check_weights(model if model.exists() else newest, f"stage {stage.name}")
        return f"steps {steps}; mean reward {rewards}; {updates} updates with a nonzero gradient"

    def hand_off(self, number: int) -> str:
        """Check that the next stage starts with the step after this stage."""
        before, after = self._stages[number], self._stages[number + 1]
        self.job.wait_for(lambda: self.job.lines(after.name), f"first step of stage {after.name}")
        last, first = self.job.lines(before.name)[-1]["step"], self.job.lines(after.name)[0]["step"]
        if first != last + 1:
            raise UserError(f"stage {after.name} starts with step {first}; stage {before.name} ended with step {last}")
        reset = "optimizer reset" if after.reset_optimizer else "optimizer kept"
        return f"stage {after.name} starts with step {first}; {reset}"

    def end(self) -> str:
        """Wait for the end of the job."""
        self.job.wait_for_end()
        calls = [line.get("calls") or 0.0 for stage in self._stages for line in self.job.lines(stage.name)]
        status = self.job.status(self.job.run_dir.name)
        return f"exit code 0; run {status}; {sum(calls) / max(1, len(calls)):.1f} tool calls per rollout"

    def evaluate(self) -> str:
        """Evaluate the last model on every set of the recipe, in one run."""
        files = {f"{section.file}": name for name, section in self.small.evaluate.sets.items()}
        if not files:
            return "the recipe has no sets"
        command = [
            "evaluate", self.job.run_dir.name, *(word for file in files for word in ("--problems", file)), "--samples", "2",
            "--limit", "4", "--recipe", str(self.job.recipe), "--name", f"{self.small.name}-end",
            "--runs-dir", str(self.job.runs_dir), "--json",
        ]  # fmt: skip
        result = json.loads(self._run_cli(command).splitlines()[-1])
        sets = result.get("sets", {Path(file).stem: result for file in files})
        details = [f"{name} {sets[Path(file).stem]['pass1'][0]:.2f}" for file, name in files.items()]
        return f"pass@1 on {', '.join(details)}"

    def export(self, engine: str) -> str:
        """Load the last checkpoint with an engine and generate a few tokens."""
        step, folder = max(RunReader(self.job.run_dir).checkpoints().items())
        command = ["chat", str(folder), "--prompt", "What is 1 + 1?", "--max-tokens", "16", "--max-turns", "1"]
        self._run_cli([*command, "--engine", engine, "--json"])
        return f"checkpoint of step {step} generates with {engine}"

    def _check_weights(self, folder: Path, part: str) -> None:
        """Raise UserError if a model has the weights that the part of the job before it ended with."""
        weights = read_weights(folder)
        if not weights_differ(self.weights, weights):
            raise UserError(f"{part}: the weights in {folder} are those before it, although the optimizer ran")
        self.weights = weights

    def _ensure_submitted(self) -> None:
        """Submit the job if no earlier phase did. Without SFT, the first stage submits it."""
        if not self.job.id:
            self.job.submit()

    def _run_cli(self, arguments: list[str]) -> str:
        command = [sys.executable, "-m", "rstar_lab.cli", *arguments]
        done = run_child(command, env={**os.environ, **self.environment})
        if done.returncode:
            raise UserError(f"rstar-lab {arguments[0]} failed: {done.stderr.strip()[-800:]}")
        return done.stdout


def _without_none(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_none(value) for key, value in data.items() if value is not None}
    return [_without_none(item) for item in data] if isinstance(data, list) else data


def rehearse(recipe: str, profile: str, overrides: Mapping[str, Any], *, folder: Path | None, as_json: bool) -> int:
    """Run a rehearsal and print its table, or JSON if `as_json`. Return 1 if a phase failed, else 0.

    folder: keep everything there; default: a temporary folder, which is removed.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=as_json)

    def print_phase(phase: Phase) -> None:
        console.print(
            plain(f"{phase.name}: {phase.status} after {phase.seconds:.0f} s. {phase.detail}"), soft_wrap=True
        )

    with ExitStack() as stack:
        target = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rehearsal-")))
        report = Rehearsal(recipe, profile, overrides, target.absolute(), print_phase).run()
    if as_json:
        print(json.dumps(report.as_json()))
        return int(report.failed)
    table = Table("phase", "status", "seconds", "detail", title=plain(f"rehearsal of {recipe} on {profile}"))
    for phase in report.phases:
        table.add_row(phase.name, phase.status, f"{phase.seconds:.0f}", plain(phase.detail))
    console.print(table)
    console.print(f"{len(report.covered)} keys executed. Not covered:", markup=False)
    for line in report.not_covered:
        console.print(plain(f"  {line}"), soft_wrap=True)
    return int(report.failed)
