/** Links of the form #rstar=TRAJ_ID, which open a trajectory. */

export function trajectoryIn(address) {
  try {
    return decodeURIComponent(/[#&?]rstar=([^&]+)/.exec(address)?.[1] ?? "");
  } catch {
    return ""; // incomplete escape
  }
}

/** The trajectory in the page's address, returned once per inspector. JupyterLab removes the fragment after it has opened
 *  the notebook; the browser's navigation entry keeps it. */
export function linkedTrajectory(inspector) {
  const used = (globalThis.__rstarLabUsedLinks ??= new Set());
  if (used.has(inspector)) return null;
  used.add(inspector);
  const addresses = [location.href, performance.getEntriesByType("navigation")[0]?.name ?? ""];
  return addresses.map(trajectoryIn).find(Boolean) ?? null;
}
