import { h, fill, show, pathEnd } from "./dom.js";

/** The most likely tokens at one position of the open rollout, computed by a model on request. */
export class Alternatives {
  /** ask(op, values, patience): request to the kernel. focus(): give the focus back to the transcript. */
  constructor(ask, focus) {
    Object.assign(this, { ask, focus });
    this.weights = h("input", { type: "text", class: "rl-weights", spellcheck: "false", placeholder: "Model folder or URL of a server; empty: nearest checkpoint", "aria-label": "Model folder or URL of a server",
      onkeydown: (event) => { if (event.key === "Enter") this.load(); } });
    this.title = h("span", { role: "status" });
    this.body = h("div", { class: "rl-alternatives-body", tabindex: "0", role: "region", "aria-label": "Most likely tokens" });
    this.element = h("div", { class: "rl-alternatives", hidden: true, onkeydown: (event) => { if (event.key === "Escape") { event.stopPropagation(); this.close(); } } },
      h("div", { class: "rl-alternatives-head" }, this.title, h("span", { class: "rl-push" }), this.weights,
        h("button", { type: "button", class: "rl-toggle", onclick: () => this.load() }, "Compute"),
        h("button", { type: "button", class: "rl-quiet", onclick: () => this.close() }, "Close")), this.body);
  }

  /** Show the panel for a token of a rollout. */
  open(traj_id, position) {
    Object.assign(this, { traj_id, position });
    this.element.hidden = false;
    return this.load();
  }

  async load() {
    const { traj_id, position } = this;
    this.title.textContent = `Token ${position}: computing …`;
    fill(this.body);
    try {
      const [{ rows, weights }] = await this.ask("alternatives", { traj_id, position, weights: this.weights.value.trim() }, 600_000);
      if (traj_id !== this.traj_id || position !== this.position) return;
      this.title.textContent = `Token ${position}: most likely tokens of ${pathEnd(weights, 3)}`;
      this.title.title = weights;
      fill(this.body, h("table", { class: "rl-table" }, h("thead", {}, h("tr", {}, ["Rank", "Token", "Probability", "Log-prob", ""].map((name) => (name ? h("th", { scope: "col" }, name) : h("td"))))),
        h("tbody", {}, rows.map((row) => h("tr", { class: row.stored ? "rl-this" : "" }, h("td", {}, show(row.rank)), h("td", {}, h("code", {}, tokenText(row))),
          h("td", {}, `${(100 * row.probability).toFixed(1)}%`), h("td", {}, row.log_prob.toFixed(3).replace("-", "−")), h("td", {}, row.stored ? "in the rollout" : ""))))));
      this.body.focus();
    } catch (error) {
      this.title.textContent = `Token ${position}`;
      fill(this.body, h("p", { class: "rl-missing" }, error.message));
    }
  }

  close() {
    if (this.element.hidden) return;
    const focused = this.element.contains(this.element.getRootNode().activeElement);
    this.element.hidden = true;
    this.traj_id = null;
    if (focused) this.focus();
  }
}

/** Text of a token with visible blanks. */
const tokenText = ({ text, token_id }) => (text === null ? `id ${token_id}` : text.replaceAll("\n", "⏎").replaceAll(" ", "␣"));
