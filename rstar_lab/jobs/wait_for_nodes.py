"""Wait until a Ray cluster has N nodes: `python -m rstar_lab.jobs.wait_for_nodes N`."""

import sys
import time

TIMEOUT_S = 300


def main(expected: int) -> int:
    """Return 0 when `expected` nodes are alive, 1 after TIMEOUT_S; prints the nodes in both cases."""
    import ray

    ray.init(log_to_driver=False)
    deadline = time.monotonic() + TIMEOUT_S
    while len(alive := [node for node in ray.nodes() if node["Alive"]]) < expected:
        if time.monotonic() > deadline:
            hosts = [node["NodeManagerHostname"] for node in alive]
            print(f"Ray has {len(alive)} of {expected} nodes after {TIMEOUT_S} s: {hosts}")
            return 1
        time.sleep(1)
    print(f"Ray has {expected} nodes: {ray.cluster_resources()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
