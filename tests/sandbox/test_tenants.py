"""Tests of tenants: tokens, quotas and separate sessions."""

import asyncio
from typing import ClassVar

import httpx
import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.common.outcomes import Outcome
from rstar_lab.sandbox.access import BusyError
from rstar_lab.sandbox.call import Call, CallResult
from rstar_lab.sandbox.client import SandboxClient
from rstar_lab.sandbox.launch import serving
from rstar_lab.sandbox.server import make_app
from rstar_lab.sandbox.service import Service
from rstar_lab.sandbox.tenants import ACCOUNT, Account, Tenant, load_tenants

A, B = "a" * 16, "b" * 16
CALL = {"calls": [{"code": "1"}]}


class SlowBackend:
    """A backend whose calls take 0.2 s; it records the most calls at once."""

    queued = zygotes = sessions = 0
    events: ClassVar[dict[str, int]] = {}
    capacity = 1

    def __init__(self) -> None:
        self.running = self.most_at_once = 0

    async def run(self, work, on_output=None) -> CallResult:
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        await asyncio.sleep(0.2)
        self.running -= 1
        return CallResult(Outcome.OK, "", "", None, 0.2)

    async def aclose(self) -> None:
        pass


def client_of(backend, *tenants: Tenant) -> httpx.AsyncClient:
    app = make_app(Service(backend, max_calls=1000, max_bytes=10**9, memory_mb=100), time_limit_s=1.0, tenants=tenants)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def test_only_tokens_of_tenants_are_accepted():
    async with client_of(SlowBackend(), Tenant("a", A), Tenant("b", B)) as client:
        replies = [await client.post("/calls", json=CALL, headers=bearer(token)) for token in (A, B, "c" * 16)]
        assert [reply.status_code for reply in replies] == [200, 200, 401]
        assert (await client.post("/calls", json=CALL)).status_code == 401
        page = (await client.get("/metrics", headers=bearer(A))).text
        assert 'rstar_lab_sandbox_tenant_calls_total{outcome="ok",tenant="b"} 1.0' in page


async def test_calls_in_flight_of_one_tenant_are_limited():
    async with client_of(SlowBackend(), Tenant("a", A, calls=2), Tenant("b", B)) as client:
        posts = [client.post("/calls", json=CALL, headers=bearer(token)) for token in (A, A, A, B)]
        replies = await asyncio.gather(*posts)
        assert [reply.status_code for reply in replies] == [200, 200, 429, 200]
        assert "quota is 2" in replies[2].json()["detail"] and replies[2].headers["Retry-After"] == "1"
        assert (await client.post("/calls", json=CALL, headers=bearer(A))).status_code == 200


async def test_the_rate_of_one_tenant_is_limited():
    async with client_of(SlowBackend(), Tenant("a", A, calls_per_s=2)) as client:
        replies = await asyncio.gather(*(client.post("/calls", json=CALL, headers=bearer(A)) for _ in range(5)))
        assert [reply.status_code for reply in replies] == [200, 200, 429, 429, 429]
        await asyncio.sleep(0.6)
        assert (await client.post("/calls", json=CALL, headers=bearer(A))).status_code == 200


async def test_calls_wait_for_the_memory_quota():
    backend = SlowBackend()
    async with client_of(backend, Tenant("a", A, memory_mb=250)) as client:
        reply = await client.post("/calls", json={"calls": [{"code": "1"}] * 4}, headers=bearer(A))
        assert reply.text.count('"outcome":"ok"') == 4 and backend.most_at_once == 2
        large = await client.post("/calls", json={"calls": [{"code": "1", "memory_mb": 251}]}, headers=bearer(A))
        assert "more than the quota" in large.json()["stderr"]


@pytest.mark.slow
async def test_tenants_have_separate_sessions_and_a_quota_of_them(tmp_path):
    file = tmp_path / "tenants.toml"
    file.write_text(f'[a]\ntoken = "{A}"\nsessions = 3\n[b]\ntoken = "{B}"\n')
    with serving("serve", "--port", "0", "--workers", "1", "--tenants", str(file)) as ready:
        async with SandboxClient(ready["url"], A) as a, SandboxClient(ready["url"], B) as b:
            await a.run("x = 'of a'", session="s")
            assert "NameError" in (await b.run("x", session="s")).stderr
            copies = await a.fork("s", 2)
            assert [(await a.run("x", session=copy)).value for copy in copies] == ["'of a'"] * 2
            refused = await a.submit(Call("1", session="fourth"))
            assert refused.outcome is Outcome.SANDBOX_ERROR and "its quota is 3" in refused.stderr
            await a.close_session(copies[0])
            assert (await a.run("1", session="fourth")).value == "1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\ntoken = 'short'", "a.token: must be a text of at least 16"),
        (f"[a]\ntoken = '{A}'\nmemory = 1", "a.memory: unknown key"),
        (f"[a]\ntoken = '{A}'\ncalls = 0", "a.calls: 0 must be a number greater than 0"),
        (f"[a]\ntoken = '{A}'\n[b]\ntoken = '{A}'", "two tenants have the same token"),
        ("token = 1", "write one table per tenant"),
        ("", "no tenant"),
    ],
)
def test_errors_in_the_file_name_tenant_and_key(tmp_path, text, message):
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_tenants(file)


async def test_a_tenant_that_announces_much_and_sends_nothing_takes_no_room():
    """Four heads of 128 MiB used up the bytes of all tenants."""
    service = Service(SlowBackend(), max_calls=100, max_bytes=512 * 2**20)
    app = make_app(service, time_limit_s=1.0, tenants=[Tenant("a", A), Tenant("b", B)])

    async def silent():
        await asyncio.sleep(60)

    scope = {
        "type": "http", "method": "POST", "path": "/calls", "raw_path": b"/calls", "query_string": b"", "scheme": "http",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"134217728"),
                    (b"authorization", f"Bearer {A}".encode())],
        "http_version": "1.1", "server": ("localhost", 80), "client": ("localhost", 1), "root_path": "",
    }  # fmt: skip
    waiting = [asyncio.create_task(app(dict(scope), silent, silent)) for _ in range(8)]
    await asyncio.sleep(0.1)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.post("/calls", json=CALL, headers=bearer(B))).status_code == 200
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert service.bytes == 0


async def test_one_tenant_cannot_hold_the_bytes_of_another():
    service = Service(SlowBackend(), max_calls=100, max_bytes=1000)
    service.tenants = 2
    first, second = Account(Tenant("a", A)), Account(Tenant("b", B))

    def reserve(account: Account, size: int) -> None:
        ACCOUNT.set(account)
        service.reserve_body(size)

    reserve(first, 400)
    with pytest.raises(BusyError):
        reserve(first, 200)
    reserve(second, 500)
    ACCOUNT.set(first)
    service.release_body(400)
    reserve(first, 450)
    assert (first.bytes, second.bytes, service.bytes) == (450, 500, 950)


class FailingBackend(SlowBackend):
    """A backend that runs calls whose code is `ok` and refuses others."""

    async def run(self, work, on_output=None) -> CallResult:
        if work.code == "raise":
            raise ValueError("timeout_s: out of range")
        outcome = Outcome.OK if work.code == "ok" else Outcome.SANDBOX_ERROR
        return CallResult(outcome, "", "", None, 0.0)


async def test_calls_that_have_not_run_are_not_counted_as_sessions():
    async with client_of(FailingBackend(), Tenant("a", A, sessions=2)) as client:

        async def outcome(code: str, session: str) -> str:
            body = {"calls": [{"code": code, "session": session}]}
            return (await client.post("/calls", json=body, headers=bearer(A))).json()["outcome"]

        for number in range(5):
            assert await outcome("raise", f"r{number}") == "invalid_arguments"
            assert await outcome("fail", f"f{number}") == "sandbox_error"
        assert [await outcome("ok", name) for name in ("x", "y", "z")] == ["ok", "ok", "sandbox_error"]
        assert await outcome("raise", "x") == "invalid_arguments"
        assert [await outcome("ok", name) for name in ("x", "y", "z")] == ["ok", "ok", "sandbox_error"]
