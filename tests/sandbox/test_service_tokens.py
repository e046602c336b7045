"""Tests of the tokens that services make for themselves, and of what a service accepts from clients without one."""

import asyncio
import contextlib
import os
import resource
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.common.service_tokens import find_token, published_token
from rstar_lab.hardware.limits import raise_open_files
from rstar_lab.sandbox import SandboxClient, http_limits
from rstar_lab.sandbox.http_limits import MAX_HEADER_BYTES
from rstar_lab.sandbox.launch import serving


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """A folder of token files for this test."""
    monkeypatch.delenv("RSTAR_LAB_SANDBOX_TOKEN", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rstar-lab" / "tokens"


def test_a_token_is_private_found_by_address_and_removed(state):
    with published_token("127.0.0.1", 8088) as (token, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(state.stat().st_mode) == 0o700
        for url in (
            "http://127.0.0.1:8088",
            "http://localhost:8088/v1",
            "http://[::1]:8088",
            f"http://{socket.gethostname()}:8088",
        ):
            assert find_token(url) == token
        for url in ("http://127.0.0.1:8089", "http://10.0.0.1:8088", "http://127.0.0.1", "nonsense", "http://x:y"):
            assert find_token(url) is None
        with published_token("127.0.0.1", 8088) as (newer, _):
            assert find_token("http://127.0.0.1:8088") == newer != token
    assert list(state.iterdir()) == []


def test_the_token_of_a_killed_service_is_not_used_and_removed(state):
    program = (
        "from rstar_lab.common.service_tokens import published_token\n"
        "with published_token('127.0.0.1', 8088): print('ready', flush=True); input()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout.readline() == "ready\n"
        assert find_token("http://127.0.0.1:8088")
        service.kill()
    (file,) = state.iterdir()
    assert find_token("http://127.0.0.1:8088") is None
    elsewhere = state / "other-host-8088"  # its lock may not be visible here
    elsewhere.touch(mode=0o600)
    with published_token("127.0.0.1", 8089) as (_, path):
        assert {*state.iterdir()} == {path, elsewhere} and not file.exists()


@pytest.mark.parametrize("defect", ["readable", "link", "folder", "folder of others"])
def test_a_file_that_others_can_change_or_read_is_not_used(state, tmp_path, defect):
    with published_token("127.0.0.1", 8088) as (_, path):
        if defect == "readable":
            path.chmod(0o644)
        elif defect == "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        elif defect == "folder":
            state.chmod(0o777)
        elif os.geteuid() == 0:
            os.chown(state, 65534, -1)
        else:
            pytest.skip("requires root")
        assert find_token("http://127.0.0.1:8088") is None


def test_the_port_of_the_other_loopback_address_is_held():
    """A client of `localhost` may connect to ::1, where another user could listen."""
    addresses = [
        ("127.0.0.1", socket.AF_INET, "::1", socket.AF_INET6),
        ("::1", socket.AF_INET6, "127.0.0.1", socket.AF_INET),
    ]
    for address, family, other, other_family in addresses:
        with socket.create_server((address, 0), family=family) as service:
            port = service.getsockname()[1]
            with published_token(address, port) as (token, _):
                assert find_token(f"http://localhost:{port}") == token
                with pytest.raises(OSError, match="in use"), socket.create_server((other, port), family=other_family):
                    pass
            with socket.create_server((other, port), family=other_family), published_token(address, port) as (token, _):
                urls = [f"http://localhost:{port}", f"http://{f'[{other}]' if ':' in other else other}:{port}"]
                assert [find_token(url) for url in urls] == [None, None]
                assert find_token(f"http://{f'[{address}]' if ':' in address else address}:{port}") == token


def test_without_a_private_folder_the_error_names_the_remedy(state):
    state.mkdir(parents=True, mode=0o777)
    state.chmod(0o777)
    with pytest.raises(UserError, match="set XDG_STATE_HOME"), published_token("127.0.0.1", 1):
        pass


@pytest.mark.slow
async def test_a_service_on_loopback_has_a_token_that_the_client_finds():
    with serving("serve", "--port", "0", "--workers", "1") as ready:
        url, file = ready["url"], Path(ready["token_file"])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        async with httpx.AsyncClient(base_url=url, trust_env=False) as stranger:
            assert (await stranger.get("/status")).status_code == 401
            assert (await stranger.post("/run", json={"type": "python", "solution": "1"})).status_code == 401
        async with SandboxClient(url) as client:
            assert (await client.run("print(6 * 7)")).stdout == "42\n"
        file.chmod(0o644)
        async with SandboxClient(url) as client:
            with pytest.raises(UserError, match="wrong token, or none"):
                await client.run("1")
        file.chmod(0o600)
    assert not file.exists()


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def receive_all(connection: socket.socket) -> bytes:
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


@pytest.mark.slow
async def test_headers_are_limited_before_authentication():
    """One connection filled 2.5 GB in 4.5 s."""
    with serving("serve", "--port", "0", "--workers", "1") as ready:
        before = psutil.Process(ready["pid"]).memory_info().rss
        heads = {
            "many headers": (b"GET /run HTTP/1.1\r\n", b"a: b\r\n"),
            "a long value": (b"GET /run HTTP/1.1\r\na: ", b"b" * 1000),
            "a long name": (b"GET /run HTTP/1.1\r\n", b"a" * 1000),
            "a long path": (b"GET /", b"a" * 1000),
            "trailers": (
                b"POST /run HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n",
                b"a: b\r\n",
            ),
        }
        for name, (head, more) in heads.items():
            sent = 0
            with connect(ready["url"]) as connection:
                connection.sendall(head)
                try:
                    while sent < 64 << 20:
                        connection.sendall(more * (64000 // len(more)))
                        sent += 64000
                except (ConnectionResetError, BrokenPipeError):
                    pass
                assert sent < 20 << 20, name
        assert psutil.Process(ready["pid"]).memory_info().rss - before < 64 << 20
        fits = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\na: " + b"b" * (MAX_HEADER_BYTES - 1000)
        with connect(ready["url"]) as connection:
            connection.sendall(fits + b"\r\n\r\n")
            assert receive_all(connection).endswith(b'"pong"')
        with connect(ready["url"]) as connection:
            connection.sendall(b"GET /ping HTTP/1.1\r\na: " + b"b" * (MAX_HEADER_BYTES + 1000))
            assert receive_all(connection).startswith(b"HTTP/1.1 400")
        async with SandboxClient(ready["url"]) as client:  # a body is not limited like headers
            assert (await client.run(f"print(len({'x' * (8 << 20)!r}))")).stdout == f"{8 << 20}\n"


@pytest.mark.slow
def test_a_refused_request_is_not_read_to_its_end():
    """After 401, the service read 300 MB of a chunked body."""
    head = b"POST /run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving("serve", "--port", "0", "--workers", "1") as ready:
        with connect(ready["url"]) as connection:
            connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 401")
            sent = 0
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                while sent < 200 << 20:
                    connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
                    sent += 1 << 20
            assert sent < 64 << 20
        with connect(ready["url"]) as connection:  # the answer is not lost, although the body arrives after it
            connection.sendall(head + b"Content-Length: 4194304\r\n\r\n" + bytes(4 << 20))
            assert receive_all(connection).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(("files", "strangers", "most"), [(256, 64, 128), (1 << 20, 1024, 1 << 19)])
def test_a_service_that_may_open_few_files_says_so(monkeypatch, caplog, files, strangers, most):
    monkeypatch.setattr(http_limits, "raise_open_files", lambda: files)
    options = http_limits.http_limits()
    assert (options["http"].most_strangers, options["limit_concurrency"]) == (strangers, most)
    said = [f"this process may open only {files} files (ulimit -n), half of which can be connections"]
    assert caplog.messages == (said if files == 256 else [])


@pytest.mark.slow
async def test_idle_connections_do_not_keep_clients_out():
    """With the usual soft limit of 1,024 open files, 1,019 idle connections made every call fail."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    prepare = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))"
    with serving("serve", "--port", "0", "--workers", "1", prepare=prepare) as ready:
        connections = [connect(ready["url"]) for _ in range(min(1000, soft - 100))]
        try:
            async with SandboxClient(ready["url"], deadline_s=10) as client:
                results = await asyncio.gather(*(client.run(f"print({number})") for number in range(8)))
            assert [result.stdout for result in results] == [f"{number}\n" for number in range(8)]
            await asyncio.sleep(0.2)
            assert len(psutil.Process(ready["pid"]).net_connections()) < 256 + 50
        finally:
            for connection in connections:
                connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [0, 1.5])
async def test_a_burst_of_600_connections_loses_none(wait_s):
    """Of a burst of new connections, those beyond 128 were closed before they could send the token."""
    with serving("serve", "--port", "0", "--workers", "1") as ready:
        token = Path(ready["token_file"]).read_text()
        head = f"GET /status HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        connections = [connect(ready["url"]) for _ in range(600)]
        await asyncio.sleep(wait_s)
        for connection in connections:
            connection.sendall(head.encode())
        answers = [receive_all(connection)[:15] for connection in connections]
        assert set(answers) == {b"HTTP/1.1 200 OK"}
        for connection in connections:
            connection.close()


def test_the_limit_on_open_files_is_raised_to_the_hard_one():
    code = (
        "import resource\nfrom rstar_lab.hardware.limits import raise_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 3000))\nprint(raise_open_files())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "3000\n"
    assert raise_open_files() > 0
