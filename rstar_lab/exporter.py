"""Prometheus metrics of the runs in a folder: `rstar-lab monitor`.

Each scrape reads the run store. Therefore the exporter works for the local trainer, for verl and for runs that are
copied from another machine, and the training process needs no change.
"""

import contextlib
import hmac
import math
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rstar_lab.errors import UserError
from rstar_lab.runs.errors import READ_ERRORS
from rstar_lab.runs.reader import RunReader, run_folders
from rstar_lab.sandbox.access import check_exposure, is_loopback
from rstar_lab.sandbox.service import CONTENT_TYPE

# Limits of a connection before it sends the token.
MAX_CONNECTIONS, MAX_HEADER_BYTES, HEADER_TIMEOUT_S = 64, 64 * 1024, 20.0
RECENT_S = 24 * 3600.0  # finished runs older than this are not exported
GAUGES = {
    "rstar_lab_run_running": "1 while the run is running, else 0",
    "rstar_lab_run_step": "last finished step",
    "rstar_lab_run_last_step_timestamp_seconds": "time at which the last step was written",
    "rstar_lab_run_metric": "metric of the last step, by name",
}


class RunCollector(Collector):
    """Collects the gauges of all runs that are running or ended recently. runs_dir: folder of runs."""

    def __init__(self, runs_dir: Path):
        self.runs_dir = runs_dir

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families = {
            name: GaugeMetricFamily(
                name, text, labels=("run", "stage", "name") if name.endswith("_metric") else ("run",)
            )
            for name, text in GAUGES.items()
        }
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
                families["rstar_lab_run_metric"].add_metric([*run, str(last["stage"]), clean_name(name)], float(value))


def clean_name(name: str) -> str:
    """Return the value of the label `name`: `eval/held_out/pass1` becomes `eval_held_out_pass1`."""
    return re.sub(r"\W", "_", name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Exporter(ThreadingHTTPServer):
    """A server of `/metrics`. token: required bearer token; None: every user of this machine may read the metrics.

    If more than MAX_CONNECTIONS have not sent the token, the oldest is closed.
    """

    token: str | None = None
    request_queue_size = 128
    daemon_threads = True

    def __init__(self, *arguments: Any):
        self._strangers: dict[Any, None] = {}  # sockets, in the order in which they were opened
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._strangers[request] = None
        if len(self._strangers) > MAX_CONNECTIONS:
            close(next(iter(self._strangers)))
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.trust(request)
        super().shutdown_request(request)

    def trust(self, request: Any) -> None:
        """Stop counting a connection: it has sent the token, or it is closed."""
        self._strangers.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client has closed the connection or sent too much."""


def close(connection: socket.socket) -> None:
    """End a connection that another thread reads."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Head:
    """Reads the lines of a request's head, of together at most MAX_HEADER_BYTES."""

    def __init__(self, file: Any):
        self.file, self.left, self.closed = file, MAX_HEADER_BYTES, False

    def readline(self, size: int = -1) -> bytes:
        line = self.file.readline(self.left + 1)
        self.left -= len(line)
        if self.left < 0:
            raise ConnectionError("the head of the request is too large")
        return line

    def close(self) -> None:
        self.file.close()


def make_exporter(runs_dir: Path, host: str, port: int, token: str | None) -> Exporter:
    """Return a server of `/metrics`; `serve_forever` runs it.

    Raises UserError if it would be reachable from other machines without a token.
    """
    check_exposure(host, token, "set RSTAR_LAB_MONITOR_TOKEN")
    registry = CollectorRegistry()
    registry.register(RunCollector(runs_dir))

    class Handler(BaseHTTPRequestHandler):
        timeout = HEADER_TIMEOUT_S  # of each wait

        def handle(self) -> None:
            self.rfile = Head(self.rfile)  # type: ignore[assignment]
            self.deadline = threading.Timer(HEADER_TIMEOUT_S, close, [self.connection])
            self.deadline.daemon = True
            self.deadline.start()
            try:
                super().handle()
            finally:
                self.deadline.cancel()

        def do_GET(self) -> None:
            self.deadline.cancel()
            given, token = self.headers.get("Authorization", ""), server.token
            if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                self._answer(401, b"send the token as `Authorization: Bearer TOKEN`\n")
            elif token is None and not is_loopback(self.headers.get("Host", "").encode()):
                self._answer(400, b"this service answers only to localhost: it has no token\n")
            elif self.path != "/metrics":
                self._answer(404, b"the metrics are at /metrics\n")
            else:
                server.trust(self.request)
                self._answer(200, generate_latest(registry))

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    try:
        server = Exporter((host, port), Handler)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; is the port in use? Try another --port"
        ) from error
    server.token = token
    return server
