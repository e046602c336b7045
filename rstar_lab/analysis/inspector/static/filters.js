import { h, fill, committed, debounce } from "./dom.js";

/** The filter bar: toggle buttons, selects, a step range, a problem id and an SQL condition. */

// With a reward function of the user, a positive reward does not mean a correct answer.
const toggles = ({ own_reward: own, unscored }) => [
  ...(own ? [["rewarded", true, "✓ Reward > 0"], ["rewarded", false, "✗ Reward ≤ 0"]] : [["correct", true, "✓ Correct"], ["correct", false, "✗ Wrong"]]),
  ...(unscored ? [["reward", null, "– Not scored"]] : []), ["kept", true, "Kept"], ["kept", false, "Dropped"],
  ["errors", true, "Tool errors"], ["truncated", true, "Truncated"], ["noted", true, "◆ Noted"],
];

const short = (value) => {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 48 ? `${text.slice(0, 48)}…` : text;
};

export class Filters {
  constructor(choices, get, set) {
    this.get = get;
    const change = (name, value) => {
      const next = { ...get() };
      if (value === undefined || value === "") delete next[name];
      else next[name] = value;
      if (JSON.stringify(next) !== JSON.stringify(get())) set(next);
    };
    this.buttons = toggles(choices).map(([name, value, title]) => [name, value, h("button", {
      type: "button", class: "rl-toggle", "aria-pressed": "false", onclick: () => change(name, get()[name] === value ? undefined : value),
    }, title)]);
    const select = (name, title, values) => h("select", { "aria-label": title, onchange: (event) => change(name, event.target.value) },
      h("option", { value: "" }, title), values.map((value) => h("option", { value }, value)));
    this.selects = { run_id: ["All runs", choices.run_id], stage: ["All stages", choices.stage], outcome: ["Any outcome", choices.outcomes] };
    for (const [name, [title, values]] of Object.entries(this.selects)) this.selects[name] = select(name, title, values);
    const later = debounce(300, (name, value) => change(name, value));
    this.steps = ["first", "last"].map((end) => h("input", { type: "number", class: "rl-step", "aria-label": `${end} step`, placeholder: choices[end] ?? "", ...committed(() => {
      const [first, last] = this.steps.map((input) => input.value);
      change("steps", first || last ? [Number(first || choices.first || 0), Number(last || choices.last || 0)] : undefined);
    }) }));
    this.texts = {
      problem: h("input", { type: "search", class: "rl-problem", "aria-label": "Problem id contains", placeholder: "Problem id", oninput: (event) => later("problem", event.target.value) }),
      sql: h("input", { type: "text", class: "rl-sql", "aria-label": "Condition in SQL", placeholder: "SQL: errors > 1 and reward > 0", spellcheck: "false", ...committed((event) => change("sql", event.target.value.trim())) }),
    };
    this.others = h("span", { class: "rl-others" });
    this.remove = (name) => change(name, undefined);
    this.clear = h("button", { type: "button", class: "rl-quiet", onclick: () => set({}) }, "Clear filters");
    this.element = h("div", { class: "rl-filters", role: "group", "aria-label": "Filters" },
      h("span", { class: "rl-toggles" }, this.buttons.map(([, , button]) => button)),
      Object.entries(this.selects).map(([name, element]) => (choices[{ run_id: "run_id", stage: "stage", outcome: "outcomes" }[name]].length > 1 ? element : null)),
      h("span", { class: "rl-steps" }, "Steps ", this.steps[0], " – ", this.steps[1]), this.texts.problem, this.texts.sql, this.others, this.clear);
    this.sync();
  }

  /** Whether a control of the bar shows this filter. The others are shown as chips. */
  shows(name, value) {
    const select = this.selects[name];
    return name === "steps" || name in this.texts || this.buttons.some(([key, pressed]) => key === name && pressed === value) || Boolean(select?.isConnected && select.value === value);
  }

  /** Update the choices after the run has grown. */
  update({ first, last }) {
    [first, last].forEach((step, i) => { this.steps[i].placeholder = step ?? ""; });
  }

  sync() {
    const filters = this.get();
    for (const [name, value, button] of this.buttons) button.setAttribute("aria-pressed", name in filters && filters[name] === value ? "true" : "false");
    for (const [name, element] of Object.entries(this.selects)) element.value = filters[name] ?? "";
    for (const [name, input] of Object.entries(this.texts)) if (document.activeElement !== input) input.value = filters[name] ?? "";
    this.steps.forEach((input, i) => { if (document.activeElement !== input) input.value = filters.steps?.[i] ?? ""; });
    fill(this.others, Object.entries(filters).filter(([name, value]) => !this.shows(name, value)).map(([name, value]) =>
      h("span", { class: "rl-chip" }, `${name}: ${short(value)} `, h("button", { type: "button", class: "rl-quiet", "aria-label": `Remove the filter ${name}`, onclick: () => this.remove(name) }, "×"))));
    this.clear.disabled = !Object.keys(filters).length;
  }
}
