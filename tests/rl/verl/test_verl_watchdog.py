"""Tests that the watchdog reports what a hung step waits for and marks the run as failed."""

import json
import threading
from types import SimpleNamespace

import pytest

from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.verl.objective import StreamLoss
from rstar_lab.rl.verl.trainer import RstarTrainer
from rstar_lab.rl.verl.watchdog import PendingOperations, Watchdog
from rstar_lab.runs.writer import RunWriter


@pytest.mark.parametrize("operation", ["generation", "tools", "reward"])
def test_the_watchdog_reports_what_a_hung_step_waits_for(tmp_path, operation):
    waits, gave_up = PendingOperations(), threading.Event()
    waits.begin("run-000001-0000-02", operation)
    waits.end("run-000001-0000-02")
    waits.begin("run-000001-0000-03", operation)
    with RunWriter.open(tmp_path, "run", kind="train", recipe={}, seed=0) as writer:
        watchdog = Watchdog(0.2, writer, lambda: [waits.report()], gave_up.set)
        watchdog.enter("generation, tools and reward", 1)
        assert gave_up.wait(60)
        report = json.loads((writer.run_dir / "watchdog.json").read_text())
        info = json.loads((writer.run_dir / "run.json").read_text())
    assert report["step"] == 1 and report["phase"] == "generation, tools and reward"
    assert report["workers"][0]["waits"][operation]["traj_id"] == "run-000001-0000-03"
    assert report["workers"][0]["host"]
    assert info["status"] == "failed"
    assert all(words in info["error"] for words in (f"{operation} on ", "1 rollout waiting", "run-000001-0000-03"))


def test_the_report_is_written_if_a_worker_does_not_answer(tmp_path):
    gave_up = threading.Event()

    def broken():
        raise ConnectionError("node gone")

    with RunWriter.open(tmp_path, "run", kind="train", recipe={}, seed=0) as writer:
        Watchdog(0.2, writer, broken, gave_up.set).enter("update", 7)
        assert gave_up.wait(60)
        assert "node gone" in (writer.run_dir / "watchdog.json").read_text()


@pytest.mark.slow
def test_the_first_weight_sync_is_a_phase(tmp_path):
    with RunWriter.open(tmp_path, "a", kind="train", recipe={}, seed=0) as writer:
        trainer = object.__new__(RstarTrainer)
        trainer.global_steps, trainer.watchdog, phases = 3, Watchdog(None, writer, list), []
        trainer.settings, losses = SimpleNamespace(rl=RlSection()), []
        trainer.actor_rollout_wg = SimpleNamespace(set_loss_fn=losses.append)
        trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda step: phases.append(trainer.watchdog._now))
        trainer.on_init_end()
    assert [phase[:2] for phase in phases] == [("first weight sync", 3)] and trainer.watchdog._now is None
    assert losses == [StreamLoss(RlSection())], "the workers compute the loss of the recipe"
