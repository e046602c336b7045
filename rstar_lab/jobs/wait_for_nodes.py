"""`python -m rstar_lab.jobs.wait_for_nodes N`: wait until a Ray cluster has N nodes, and say which are missing when it has not."""

import sys
import time

TIMEOUT_S = 300


def main(wanted: int) -> int:
    import ray

    ray.init(log_to_driver=False)
    deadline = time.monotonic() + TIMEOUT_S
    while len(alive := [node for node in ray.nodes() if node["Alive"]]) < wanted:
        if time.monotonic() > deadline:
            print(
                f"Ray has {len(alive)} of {wanted} nodes after {TIMEOUT_S} s: {[n['NodeManagerHostname'] for n in alive]}"
            )
            return 1
        time.sleep(1)
    print(f"Ray has {wanted} nodes: {ray.cluster_resources()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
