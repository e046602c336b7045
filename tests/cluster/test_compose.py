"""The Compose file: it follows the schema, keeps secrets and ports in, and its commands work together on this machine."""

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from rstar_lab.sandbox import SandboxClient

CLUSTER = Path(__file__).parents[2] / "cluster"
TEXT = (CLUSTER / "compose.yaml").read_text()
COMPOSE = yaml.safe_load(TEXT)
SERVICES = COMPOSE["services"]
SECRETS = {
    name: f"{name.lower()}-of-the-test" for name in re.findall(r"echo|\b([A-Z_]+)\b", TEXT.split("; do")[0]) if name
}


def test_the_file_follows_the_compose_specification():
    tool = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run(
        [tool, "--builtin-schema", "vendor.compose-spec", CLUSTER / "compose.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_calls_and_results_in_redis_are_signed():
    keys = [SERVICES[name]["environment"]["RSTAR_LAB_SANDBOX_KEY"] for name in ("sandbox", "worker")]
    assert all(key.startswith("${SANDBOX_KEY") for key in keys)


def test_secrets_come_from_variables_and_ports_listen_on_loopback():
    assert set(SECRETS) == {"REDIS_PASSWORD", "SANDBOX_KEY", "SANDBOX_TOKEN", "JUPYTER_TOKEN"}
    assert set(re.findall(r"\$\{(\w+)", TEXT)) == set(SECRETS)
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
    assert SERVICES["worker"]["networks"] == SERVICES["redis"]["networks"] == ["calls"]
    assert COMPOSE["networks"]["calls"]["internal"] is True, "programs of the model must not reach the network"


def test_files_and_volumes_exist():
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (CLUSTER / source).exists() if source.startswith("./") else source in COMPOSE["volumes"]
        assert set(service.get("networks", ())) <= set(COMPOSE["networks"])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
def test_the_commands_work_together(tmp_path):
    """Redis, sandbox and worker with the commands and variables of the file; service names become 127.0.0.1."""
    if shutil.which("redis-server") is None:
        pytest.skip("REDIS IS NOT TESTED: redis-server is not installed (`make services` installs it where it may)")
    ports = {"6379": str(free_port()), "8088": str(free_port())}

    def here(text: str) -> str:
        for name, value in SECRETS.items():
            text = re.sub(rf"\$\{{{name}[^}}]*\}}", value, text)
        text = text.replace("$$", "$").replace("redis:6379", "127.0.0.1:6379").replace("0.0.0.0", "127.0.0.1")
        text = text.replace("/etc/redis.conf", f"{CLUSTER / 'redis.conf'} --port 6379 --dir {tmp_path}")
        for port, free in ports.items():
            text = re.sub(rf"\b{port}\b", free, text)
        return text.replace('"* -::*"', "127.0.0.1")

    def start(name: str) -> subprocess.Popen[bytes]:
        # --strict needs every isolation layer, which the machine of the test may lack.
        command = [here(part) for part in SERVICES[name]["command"] if part != "--strict"]
        variables = {key: here(value) for key, value in SERVICES[name]["environment"].items()}
        command[0] = str(Path(sys.executable).with_name(command[0])) if command[0] == "rstar-lab" else command[0]
        log = (tmp_path / f"{name}.log").open("wb")
        return subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=log)

    async def call() -> str:
        async with SandboxClient(
            f"http://127.0.0.1:{ports['8088']}", SECRETS["SANDBOX_TOKEN"], deadline_s=60
        ) as sandbox:
            return (await sandbox.run("print(6 * 7)")).stdout

    processes = [start("redis")]
    try:
        time.sleep(1)
        processes += [start(name) for name in ("sandbox", "worker")]
        assert asyncio.run(call()) == "42\n"
        assert httpx.get(f"http://127.0.0.1:{ports['8088']}/status").status_code == 401
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(60)
