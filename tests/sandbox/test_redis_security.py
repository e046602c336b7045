"""Tests of signatures and TLS between services, Redis and workers."""

import asyncio
import logging
import shutil
import subprocess
from contextlib import aclosing
from dataclasses import asdict

import pytest

from benchmarks.redis_server import wait_for_port
from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.hardware.processes import free_port
from rstar_lab.sandbox import Call, transport
from rstar_lab.sandbox.call import CallResult
from rstar_lab.sandbox.redis_backend import RedisBackend
from rstar_lab.sandbox.transport import KEY, Signer
from rstar_lab.sandbox.wire import dumps
from rstar_lab.sandbox.worker import Worker

SECRET = "k" * 32


class EchoBackend:
    """A backend that returns the code of a call as its output."""

    workers, prefetch_limit = 1, 8

    async def run(self, work, on_output=None) -> CallResult:
        return CallResult(Outcome.OK, work.code, "", None, 0.0)


async def with_worker(url: str, action):
    """Run `action` while a worker that echoes calls is connected to a Redis."""
    worker = Worker(url, EchoBackend(), drain_s=1.0)  # type: ignore[arg-type]
    started = asyncio.Event()
    serving = asyncio.create_task(worker.serve(started.set))
    try:
        await asyncio.wait({asyncio.create_task(started.wait()), serving}, return_when=asyncio.FIRST_COMPLETED)
        return await action()
    finally:
        worker.stopping.set()
        await serving


@pytest.mark.slow
async def test_signed_calls_run_and_unsigned_ones_do_not(redis, monkeypatch, caplog):
    monkeypatch.setenv(KEY, SECRET)

    async def run():
        async with aclosing(await RedisBackend(redis.url, wait_s=20).start()) as signed:
            ran = await signed.run(Call("echo"))
            monkeypatch.delenv(KEY)
            async with aclosing(await RedisBackend(redis.url, wait_s=20).start()) as unsigned:
                return ran, await unsigned.run(Call("echo"))

    ran, refused = await with_worker(redis.url, run)
    assert (ran.outcome, ran.stdout) == (Outcome.OK, "echo")
    assert refused.outcome is Outcome.SANDBOX_ERROR and "no valid signature" in refused.stderr
    assert "no valid signature" in caplog.text


@pytest.mark.slow
async def test_an_unsigned_result_is_a_sandbox_error(redis, monkeypatch):
    monkeypatch.setenv(KEY, SECRET)
    async with aclosing(await RedisBackend(redis.url, wait_s=20).start()) as client:
        call = asyncio.create_task(client.run(Call("1")))
        while not client.pending:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        forged = {
            "id": next(iter(client.pending)),
            "body": dumps(asdict(CallResult(Outcome.OK, "x", "", None, 0.0))),
        }
        await client.redis.xadd(transport.results_of(client.client), forged)
        assert (await call).outcome is Outcome.SANDBOX_ERROR


def test_a_signature_belongs_to_one_call_and_one_body(monkeypatch):
    monkeypatch.setenv(KEY, SECRET)
    signer = Signer()
    right = signer.sign("call", "1", "c", b"body").encode()
    signer.check(right, "call", b"1", "c", b"body")
    for wrong in [
        (right, "call", b"2", "c", b"body"),
        (right, "call", b"1", "d", b"body"),
        (right, "call", b"1", "c", b"bodY"),
        (b"", "call", b"1", "c", b"body"),
        (right, "result", b"1", "c", b"body"),
    ]:
        with pytest.raises(Exception, match="no valid signature"):
            signer.check(*wrong)
    monkeypatch.setenv(KEY, "short")
    with pytest.raises(UserError, match="at least 16"):
        Signer()


@pytest.mark.slow
async def test_calls_go_over_tls(tmp_path):
    if shutil.which("redis-server") is None or shutil.which("openssl") is None:
        pytest.skip("redis-server and openssl are needed")
    key, certificate, port = tmp_path / "key.pem", tmp_path / "certificate.pem", free_port()
    subprocess.run(  # noqa: ASYNC221
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    settings = f"port 0\ntls-port {port}\ntls-cert-file {certificate}\ntls-key-file {key}\ntls-auth-clients no\n"
    settings += f'bind 127.0.0.1\ndir {tmp_path}\nrequirepass secret\nsave ""\n'
    server = subprocess.Popen(["redis-server", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        assert server.stdin is not None
        server.stdin.write(settings.encode())
        server.stdin.close()
        wait_for_port(port)
        url = f"rediss://:secret@127.0.0.1:{port}/0?ssl_ca_certs={certificate}"

        async def run():
            async with aclosing(await RedisBackend(url, wait_s=20).start()) as client:
                return await client.run(Call("echo"))

        assert (await with_worker(url, run)).stdout == "echo"
        with pytest.raises(UserError, match="no Redis at"):
            await RedisBackend(f"rediss://:secret@127.0.0.1:{port}/0", wait_s=1).start()
    finally:
        server.kill()
        server.wait()


async def test_failures_are_logged_with_the_id_of_the_call(caplog):
    from rstar_lab.sandbox.call import call_id, log_event, log_failure

    with caplog.at_level(logging.WARNING), call_id("client:7"):
        log_event("supervisor_died")
        log_failure(CallResult(Outcome.SANDBOX_ERROR, "", "reason\n", None, 1.0, 0.5))
        log_failure(CallResult(Outcome.TIMEOUT, "", "", None, 1.0, 0.5))
    assert caplog.messages == [
        "call client:7: supervisor_died",
        "call client:7: sandbox_error (queued 0.50 s, ran 1.00 s): reason",
    ]
