"""verl's SFT trainer on Ray with the local trainer's batches and the run store. The training loop is verl's."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import verl.single_controller.ray as single_controller
from verl.single_controller.ray.base import RayResourcePool
from verl.trainer import sft_trainer_ray
from verl.utils.dataset.dataset_utils import SFTTensorCollator
from verl.utils.tracking import Tracking
from verl.workers.engine_workers import TrainingWorker

from rstar_lab.rl.pipeline import write_sft_step
from rstar_lab.rl.recipe import SftConfig
from rstar_lab.rl.renderers.conversations import Example
from rstar_lab.rl.training.sft import check_finite, iterate_batches, lr_scale, steps_of
from rstar_lab.rl.verl import attention, checkpoints  # noqa: F401 (register themselves)
from rstar_lab.runs.writer import RunWriter

_PADDING_ROW = Example([0, 0], [False, False])


class Batches:
    """Replaces verl's loader and sampler: all steps of the run as one pass, each batch a function of seed and step.

    Its state is the metrics of the finished steps, so a resumed run sees the batches of an uninterrupted one.
    """

    def __init__(self, examples: list[Example], config: SftConfig, ranks: int):
        """ranks: ranks that share a batch in equal parts; the last batch of an epoch is padded with rows without loss."""
        self.examples, self.config, self.ranks = examples, config, ranks
        self.steps = steps_of(examples, config)
        self.history: list[dict[str, float]] = []

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        collate = SFTTensorCollator("no_padding")  # type: ignore[arg-type]
        for _, batch in iterate_batches(self.examples, self.config, range(len(self.history) + 1, self.steps + 1)):
            rows = [*batch, *[_PADDING_ROW] * (-len(batch) % self.ranks)]
            yield collate([_row(example) for example in rows])

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = state["history"]


def _row(example: Example) -> dict[str, torch.Tensor]:
    ids = torch.tensor(example.ids)
    return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": torch.tensor(example.mask).long()}


class SftWorker(TrainingWorker):
    """The process of one rank. It imports this module to find the class, which registers `attention` there."""


class RstarSft(sft_trainer_ray.SFTTrainer):
    """One SFT run. After `fit`, `batches.history` holds the metrics of every step."""

    def __init__(self, config: Any, batches: Batches, writer: RunWriter):
        self.batches, self.writer = batches, writer
        super().__init__(config)
        self.writer.cut(self.resume_global_step)

    def _build_dataset(self) -> None: ...

    def _build_dataloader(self) -> None:
        self.train_dataloader = self.train_sampler = self.batches  # type: ignore[assignment]
        self.val_dataloader = None
        self.global_batch_size = self.config.data.train_batch_size
        self.total_training_steps = self.steps_per_epoch = len(self.batches)
        self.optimizer_config.total_training_steps = len(self.batches)
        self.save_freq, self.test_freq = self.config.trainer.save_freq, self.config.trainer.test_freq

    def _build_engine(self) -> None:
        # One process per GPU. verl's pool requests ten CPUs for each, and waits forever on a node with fewer.
        single_controller.RayResourcePool = functools.partial(RayResourcePool, max_colocate_count=1)  # type: ignore
        sft_trainer_ray.TrainingWorker = SftWorker  # type: ignore[misc]
        super()._build_engine()

    def fit(self) -> None:
        # verl has a fixed list of loggers, so replace the class that it looks up.
        sft_trainer_ray.Tracking = functools.partial(_RecordingTracking, self)  # type: ignore[assignment,misc]
        super().fit()

    def record(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of a step. verl calls this before the checkpoint of the step."""
        line = {
            "step": step,
            "steps": len(self.batches),
            "loss": metrics["train/loss"],
            "lr": self.batches.config.lr * lr_scale(step, len(self.batches), self.batches.config),
            "grad_norm": metrics["train/grad_norm"],
            "tokens": metrics["train/global_tokens"],
        }
        check_finite(line)
        self.batches.history.append(line)
        write_sft_step(self.writer, line)


class _RecordingTracking(Tracking):
    def __init__(self, trainer: RstarSft, **keywords: Any):
        super().__init__(**keywords)
        self.trainer = trainer

    def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
        super().log(data, step, backend)
        self.trainer.record(step, data)
