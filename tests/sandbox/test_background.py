"""A call that made room for others, and comes back from the background when its time is over."""

import asyncio
from pathlib import Path

import pytest

from rstar_lab.sandbox.box import frames
from rstar_lab.sandbox.fleet import Fleet

GROUPS = Path("/sys/fs/cgroup")
LOOP = frames.Request(
    seed=None, session=False, timeout_s=8.0, wall_slack_s=2.0, memory_mb=256, processes=64, open_files=64, file_mb=1,
    output_bytes=1024, value_bytes=1024,
)  # fmt: skip


def in_background(owner: int) -> list[bool]:
    """Of each keeper's group that this sandbox has made."""
    files = [path for path in GROUPS.rglob("cpu.idle") if f"rstar-sandbox-{owner}" in str(path)]
    return [path.read_text().strip() == "1" for path in files if path.parent.name.split("-")[-2:] == ["bare", "1"]]


async def becomes(owner: int, what: bool) -> bool:
    for _ in range(160):
        if in_background(owner) == [what]:
            return True
        await asyncio.sleep(0.05)
    return False


@pytest.mark.asyncio
async def test_a_keeper_in_the_background_is_lifted_out_of_it_when_its_time_is_over():
    fleet = Fleet(1)
    try:
        await fleet.start()
        link = await fleet.new_keeper("bare")
        assert fleet._process is not None
        owner = fleet._process.pid
        call = asyncio.create_task(link.call(frames.pack_request(LOOP, b"while True: pass", b""), 5.0))
        await asyncio.sleep(0.2)
        if not in_background(owner):
            pytest.skip("no control groups, or none that can be idle")
        link.yield_slot()
        assert await becomes(owner, True), "a loop that has had a twentieth of its limit runs in the background"
        assert not call.done() and await becomes(owner, False)
        call.cancel()
    finally:
        await fleet.close()
