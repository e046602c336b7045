import { h, show, solvedOf, verdict, verdictMark, rocStatus } from "./dom.js";

/** The rollouts of one problem in one step: which are correct, which RoC kept, and why. */

export function strip(siblings, selected, open) {
  const label = (row) => [`sample ${row.sample}: ${verdict(row).text}`, rocStatus(row, siblings)].filter(Boolean).join(", ");
  return [
    h("span", { class: "rl-label" }, `Group: ${solvedOf(siblings)}`),
    h("span", { class: "rl-strip", role: "group", "aria-label": "Rollouts of the group" }, siblings.map((row) =>
      h("button", {
        type: "button", class: `rl-cell rl-${verdict(row).state}${row.kept === false ? " rl-dropped" : ""}`, "data-traj": row.traj_id,
        "aria-pressed": row.traj_id === selected ? "true" : "false", title: label(row),
        "aria-label": label(row), onclick: () => open(row.traj_id),
      }, verdict(row).mark))),
  ];
}

const mean = (rows) => {
  const known = rows.map((row) => (row.p_err ?? NaN) + (row.p_format ?? NaN)).filter((value) => !Number.isNaN(value));
  return known.length ? show(known.reduce((sum, value) => sum + value, 0) / known.length, 2) : "–";
};

export function summary(siblings) {
  const side = (state) => siblings.filter((row) => verdict(row).state === state);
  const own = siblings.some((row) => row.correct === null && verdict(row).state !== "none");
  const sides = [[own ? "with a reward above 0" : "correct", side("ok")], [own ? "without" : "wrong", side("bad")], ["not scored", side("none")]];
  const known = siblings.filter((row) => row.kept !== null && row.kept !== undefined);
  if (known.length > 1 && !known.some((row) => row.kept)) return `The whole group was ${rocStatus(known[0], siblings)}, so it has no training signal.`;
  return sides.filter(([, rows]) => rows.length).map(([name, rows]) => {
    if (!known.length) return `${rows.length} ${name}.`;
    const [kept, dropped] = [rows.filter((row) => row.kept), rows.filter((row) => row.kept === false)];
    return `${rows.length} ${name}: ${kept.length} kept (mean penalty ${mean(kept)}), ${dropped.length} dropped (${mean(dropped)}).`;
  }).join(" ");
}

const bar = (row) => {
  const parts = [["err", row.p_err], ["format", row.p_format]].filter(([, value]) => typeof value === "number");
  if (!parts.length) return "–";
  const box = h("span", { class: "rl-bar", role: "img", "aria-label": `tool errors ${show(row.p_err)}, format ${show(row.p_format)}` }, parts.map(([name, value]) => {
    const part = h("i", { class: `rl-bar-${name}` });
    part.style.width = `${Math.round(Math.min(1, value) * 34)}px`;
    return part;
  }));
  return [box, h("span", { class: "rl-num" }, (parts.reduce((sum, [, value]) => sum + value, 0)).toFixed(2))];
};

/** open(traj_id), compare(traj_id): actions of the buttons; a saved page, which has no other rollout, has none. */
export function table(siblings, selected, open, compare) {
  const heads = ["Sample", "Correct", "RoC", "Penalty", "Calls", "Errors", "Tokens", "Advantage", "Answer", ""];
  return h("div", { class: "rl-group", tabindex: "0", role: "region", "aria-label": "Rollouts of the group with their penalties" },
    h("p", { class: "rl-summary" }, summary(siblings)),
    h("table", { class: "rl-table" }, h("thead", {}, h("tr", {}, heads.map((name) => name ? h("th", { scope: "col" }, name) : h("td")))),
      h("tbody", {}, siblings.map((row) => h("tr", { class: `${row.traj_id === selected ? "rl-this" : ""}${row.kept === false ? " rl-out" : ""}` },
        h("td", {}, open ? h("button", { type: "button", class: "rl-quiet", "aria-label": `Open sample ${row.sample}`, onclick: () => open(row.traj_id) }, show(row.sample)) : show(row.sample)),
        h("td", {}, verdictMark(row)),
        h("td", {}, row.kept === null || row.kept === undefined ? "–" : row.kept ? "kept" : "dropped"), h("td", { class: "rl-penalty" }, bar(row)),
        h("td", {}, show(row.calls)), h("td", {}, show(row.errors)), h("td", {}, show(row.response_tokens)),
        h("td", {}, show(row.advantage)), h("td", {}, show(row.answer)),
        h("td", {}, row.traj_id === selected || !compare ? "" : h("button", { type: "button", class: "rl-quiet", "aria-label": `Compare with sample ${row.sample}`, onclick: () => compare(row.traj_id) }, "compare")))))));
}
