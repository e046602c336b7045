import { h, counted, fill, show, verdict, pathEnd } from "./dom.js";

const percent = (value) => `${Math.round(100 * value)}%`;

/** Continuations of the open rollout from the start of a turn, sampled by a model on request, and the value of each turn. */
export class Fork {
  /** ask(op, values, patience): request to the kernel. compare(traj_id): show a continuation beside the rollout.
   *  focus(): give the focus back to the transcript. say(text): tell that continuations of another rollout are stored. */
  constructor(ask, compare, focus, say) {
    Object.assign(this, { ask, compare, focus, say, made: new Set() }); // made: rollouts that were forked here
    this.turn = h("select", { "aria-label": "Turn to fork at", onchange: () => this.chosen() });
    this.count = h("input", { type: "number", class: "rl-step", min: 1, max: 256, value: 16, "aria-label": "Continuations per turn" });
    this.weights = h("input", { type: "text", class: "rl-weights", spellcheck: "false", placeholder: "Model folder or URL of a server; empty: nearest checkpoint", "aria-label": "Model folder or URL of a server" });
    this.edit = h("textarea", { class: "rl-edit", rows: 2, spellcheck: "false", "aria-label": "Text with which the turn starts" });
    this.original = h("button", { type: "button", class: "rl-quiet", title: "Insert what the model wrote in this turn, to edit it", onclick: () => this.insert() }, "Insert original text");
    this.button = h("button", { type: "button", class: "rl-toggle", onclick: () => this.load() }, "Fork");
    this.title = h("p", { class: "rl-summary", role: "status" });
    this.body = h("div", { class: "rl-fork-body", tabindex: "0", role: "region", "aria-label": "Continuations" });
    this.element = h("div", { class: "rl-fork", role: "group", "aria-label": "Fork", hidden: true, onkeydown: (event) => this.key(event) },
      h("div", { class: "rl-alternatives-head" }, "Sample", this.count, "continuations from the start of", this.turn, "by", this.weights, h("span", { class: "rl-push" }), this.button,
        h("button", { type: "button", class: "rl-quiet", onclick: () => this.close() }, "Close")), h("div", { class: "rl-edit-row" }, this.edit, this.original), this.title, this.body);
  }

  key(event) {
    if (event.key === "Escape") {
      event.stopPropagation();
      this.close();
    } else if (event.key === "Enter" && (event.target.tagName === "INPUT" || (event.target === this.edit && event.ctrlKey))) {
      event.stopPropagation();
      this.load();
    }
  }

  /** Show the panel for a rollout. */
  open({ traj_id, turns }) {
    this.element.hidden = false;
    if (traj_id !== this.traj_id) {
      this.traj_id = traj_id;
      fill(this.turn, h("option", { value: "" }, "every turn"), Array.from({ length: turns ?? 0 }, (_, turn) => h("option", { value: turn }, `turn ${turn + 1}`)));
      this.edit.value = "";
      this.chosen();
      fill(this.body);
      this.title.textContent = "The continuations are stored beside the run.";
      this.recall(traj_id);
    }
    this.turn.focus();
  }

  /** Show the last result for a rollout, if the kernel has one. */
  async recall(traj_id) {
    const [forked] = await this.ask("forked", { traj_id }).catch(() => [null]);
    if (forked && traj_id === this.traj_id && !this.button.disabled) this.draw(forked);
  }

  /** Only a single turn can be edited. */
  chosen() {
    this.edit.disabled = this.original.disabled = this.turn.value === "";
    this.edit.placeholder = this.edit.disabled ? "Select a turn to edit its start" : "Text with which the turn starts; empty: the model writes it (Ctrl+Enter forks)";
    if (this.edit.disabled) this.edit.value = "";
  }

  /** Fill the field with what the model wrote in the selected turn. */
  async insert() {
    const { traj_id } = this;
    const turn = Number(this.turn.value);
    try {
      const [text] = await this.ask("turn_text", { traj_id, turn });
      if (traj_id !== this.traj_id || turn !== Number(this.turn.value)) return;
      this.edit.value = text;
      this.edit.focus();
    } catch (error) {
      this.fail(error.message);
    }
  }

  async load() {
    if (this.button.disabled) return;
    if (!this.count.checkValidity() || !this.count.value) return this.fail("Enter a number of continuations from 1 to 256.");
    const { traj_id } = this;
    const turn = this.turn.value === "" ? null : Number(this.turn.value);
    this.button.disabled = true;
    this.title.textContent = `Forking: sampling ${counted(Number(this.count.value), "continuation")} from ${turn === null ? "every turn" : `turn ${turn + 1}`} …`;
    const seconds = h("span", { "aria-hidden": "true" }, "0 s");
    fill(this.body, h("p", { class: "rl-missing" }, "The kernel is busy until the continuations are stored. ", seconds));
    const began = Date.now();
    const timer = setInterval(() => { seconds.textContent = `${Math.round((Date.now() - began) / 1000)} s`; }, 1000);
    try {
      const [forked] = await this.ask("fork", { traj_id, turn, k: Number(this.count.value), edit: this.edit.value, weights: this.weights.value.trim() }, 3_600_000);
      this.made.add(traj_id);
      if (traj_id === this.traj_id) {
        this.draw(forked);
        this.body.focus();
      } else this.say(`Stored as run ${forked.run}: ${counted(forked.tree.length, "continuation")}. Open the rollout and press t to see them.`);
    } catch (error) {
      if (traj_id === this.traj_id) this.fail(error.message);
      else this.say(`Not forked: ${error.message}`, true);
    } finally {
      clearInterval(timer);
      this.button.disabled = false;
    }
  }

  fail(message) {
    this.title.textContent = "Not forked.";
    fill(this.body, h("p", { class: "rl-missing", role: "alert" }, message));
  }

  draw({ values, tree, lost_at, reward, run, weights, differing }) {
    const whole = values.length === this.turn.options.length - 1; // every turn was forked: the values show where the value falls
    const own = tree.some((row) => typeof row.reward === "number") && tree.every((row) => row.correct === null);
    const original = `The original rollout ${own ? `has ${verdict({ reward, correct: null }).text}` : `is ${verdict({ reward }).text}`}.`;
    const fall = whole && lost_at !== null ? lost_at : -1;
    const lost = fall < 0 ? "" : ` The value falls most over turn ${fall + 1}.`;
    const replayed = differing ? ` ${counted(differing, "earlier call")} returned another response than the stored one.` : "";
    this.title.textContent = `${original}${lost}${replayed} Model: ${pathEnd(weights, 3)}. Stored as run ${run}.`;
    this.title.title = weights;
    const rows = values.map(({ turn, value, low, high, n }) => h("tr", { class: turn === fall ? "rl-this" : "" },
      h("td", {}, show(turn + 1), turn === fall ? h("div", { class: "rl-label" }, "largest fall") : null), h("td", { title: `n = ${n}` }, `${percent(value)} of ${n}`),
      h("td", {}, interval(value, low, high), h("div", {}, `${percent(low)} to ${percent(high)}`)),
      h("td", {}, h("span", { class: "rl-strip" }, tree.filter((row) => row.turn === turn).map((row) => this.cell(row))))));
    fill(this.body, h("table", { class: "rl-table" }, h("thead", {}, h("tr", {}, ["From turn", own ? "Reward above 0" : "Correct", "95% interval", "Continuations"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows)));
  }

  cell(row) {
    const failed = row.stop_reason === "engine_error";
    const result = failed ? "excluded, because the engine failed" : verdict(row).text;
    const text = `continuation ${row.sample}: ${result}, answer ${show(row.answer)}, ${counted(row.calls, "call")}, ${counted(row.errors, "error")}, ${counted(row.response_tokens, "token")}, stopped by ${show(row.stop_reason)}`;
    const colour = failed ? "" : `rl-${verdict(row).state}`;
    return h("button", { type: "button", class: `rl-cell ${colour}`, title: `${text}. Click: side by side.`, "aria-label": text, "aria-pressed": "false", "data-traj": row.traj_id, onclick: () => this.compare(row.traj_id) }, failed ? "–" : verdict(row).mark);
  }

  /** Mark the continuation that is shown beside the rollout. null: none. */
  mark(traj_id) {
    for (const cell of this.body.querySelectorAll(".rl-cell")) cell.setAttribute("aria-pressed", String(cell.dataset.traj === traj_id));
  }

  close() {
    if (this.element.hidden) return;
    const focused = this.element.contains(this.element.getRootNode().activeElement);
    this.element.hidden = true;
    this.traj_id = null;
    if (focused) this.focus();
  }
}

/** A line from 0 to 100% with the interval and the value. */
function interval(value, low, high) {
  const range = h("i", { class: "rl-range" });
  range.style.left = `${100 * low}%`;
  range.style.width = `${100 * (high - low)}%`;
  const point = h("i", { class: "rl-point" });
  point.style.left = `${100 * value}%`;
  return h("span", { class: "rl-interval", role: "img", "aria-label": `${percent(value)}, 95% interval ${percent(low)} to ${percent(high)}` }, range, point);
}
