/** Keeps the trajectories that were opened last. load(traj_id, raw) requests one from the kernel. */
export class TrajectoryCache {
  constructor(load, size = 12) {
    Object.assign(this, { load, size });
    this.requests = new Map(); // oldest first
  }

  /** Return a promise of the trajectory. raw: the unchanged token stream instead of segments. */
  get(traj_id, raw) {
    const key = `${raw} ${traj_id}`;
    let request = this.requests.get(key);
    if (!request) {
      request = this.load(traj_id, raw);
      this.requests.set(key, request);
      request.catch(() => this.requests.delete(key));
      if (this.requests.size > this.size) this.requests.delete(this.requests.keys().next().value);
    }
    return request;
  }

  clear() {
    this.requests.clear();
  }
}
