"""Prometheus metrics of the runs in a folder: `rstar-lab monitor`.

Each scrape reads the run store. Therefore the exporter works for the local trainer, for verl and for runs that are
copied from another machine, and the training process needs no change.
"""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rstar_lab.common.service_tokens import published_token
from rstar_lab.runs.errors import READ_ERRORS
from rstar_lab.runs.reader import RunReader, run_folders
from rstar_lab.sandbox.access import CONTENT_TYPE, AccessMiddleware, check_exposure, listen, refuse
from rstar_lab.sandbox.http_limits import http_limits

RECENT_S = 24 * 3600.0  # finished runs older than this are not exported
GAUGES = {
    "rstar_lab_run_running": ("1 while the run is running, else 0", "run"),
    "rstar_lab_run_step": ("last finished step", "run"),
    "rstar_lab_run_last_step_timestamp_seconds": ("time at which the last step was written", "run"),
    "rstar_lab_run_metric": ("metric of the last step, by name", "run", "stage", "name"),
}


class RunCollector(Collector):
    """Collects the gauges of all runs that are running or ended recently. runs_dir: folder of runs."""

    def __init__(self, runs_dir: Path):
        self.runs_dir = runs_dir

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families = {name: GaugeMetricFamily(name, text, labels=labels) for name, (text, *labels) in GAUGES.items()}
        for folder in run_folders(self.runs_dir):
            try:
                self._add(folder, families)
            except READ_ERRORS:
                continue  # a run that is being created or removed, or whose files are damaged
        yield from families.values()

    def _add(self, folder: Path, families: dict[str, GaugeMetricFamily]) -> None:
        reader = RunReader(folder)
        lines = reader.metrics()
        written = (folder / "metrics.jsonl").stat().st_mtime if lines else folder.stat().st_mtime
        running = reader.status == "running"
        if not running and time.time() - written > RECENT_S:
            return
        run = [reader.run_id]
        families["rstar_lab_run_running"].add_metric(run, float(running))
        families["rstar_lab_run_last_step_timestamp_seconds"].add_metric(run, written)
        if not lines:
            return
        last = lines[-1]
        if _is_number(last["step"]):
            families["rstar_lab_run_step"].add_metric(run, last["step"])
        for name, value in last.items():
            if name != "step" and _is_number(value):
                label = re.sub(r"\W", "_", name)  # eval/held_out/pass1 becomes eval_held_out_pass1
                families["rstar_lab_run_metric"].add_metric([*run, str(last["stage"]), label], float(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def make_exporter(runs_dir: Path, token: str | None) -> uvicorn.Server:
    """Return a server of `/metrics`. token: required bearer token; None: the server answers only requests to localhost."""
    registry = CollectorRegistry()
    registry.register(RunCollector(runs_dir))

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/metrics":
            await refuse(send, 404, "the metrics are at /metrics")
            return
        page = await asyncio.to_thread(generate_latest, registry)
        await Response(page, media_type=CONTENT_TYPE)(scope, receive, send)

    app = AccessMiddleware(answer, token=token, max_body=0, loopback_only=True)
    options = {"lifespan": "off", "log_level": "warning", "access_log": False, **http_limits()}
    return uvicorn.Server(uvicorn.Config(app, **options))


def serve_metrics(
    runs_dir: Path, host: str, port: int, token: str | None, announce: Callable[[str, Path | None], None]
) -> None:
    """Serve `/metrics` until SIGTERM or SIGINT.

    token: default: one that is made, and stored in a file that only its user can read. announce: called with the URL and the file
    of the token before the server starts. Raises UserError if the port is in use, or if other machines could read the metrics
    without a token that the user has chosen.
    """
    check_exposure(host, token, "set RSTAR_LAB_MONITOR_TOKEN")
    listener = listen(host, port)
    host, port = listener.getsockname()[:2]
    with contextlib.ExitStack() as stack:
        path = None
        if token is None:
            token, path = stack.enter_context(published_token(host, port))
        listener.listen()  # a request that follows the announcement waits until the server has started
        announce(f"http://{host}:{port}/metrics", path)
        make_exporter(runs_dir, token).run(sockets=[listener])
