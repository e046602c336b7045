import { h, fill } from "./dom.js";

/** The dialog of saved views: choose the columns of the list, and name, open and delete views. */
export class Views {
  /** columns: [name, title] of all columns. get(): the columns shown. set(columns): show these columns. ask(op, values):
   *  request to the kernel. open(view): apply a view. say(text, wrong): show a message. */
  constructor({ columns, get, set, ask, open, say }) {
    Object.assign(this, { get, set, ask, open, say });
    this.boxes = columns.map(([name, title]) => [name, h("input", { type: "checkbox", value: name, onchange: () => this.choose() }), title]);
    this.name = h("input", { type: "text", "aria-label": "Name of the view", placeholder: "Name", onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); this.save(); } } });
    this.list = h("ul", { class: "rl-views" });
    this.error = h("p", { class: "rl-view-error", role: "alert" });
    this.element = h("dialog", { class: "rl-help rl-view", "aria-label": "Views" },
      h("h3", {}, "Saved views"), this.list,
      h("p", { class: "rl-actions" }, this.name, h("button", { type: "button", class: "rl-toggle", onclick: () => this.save() }, "Save filters, order and columns")), this.error,
      h("h3", {}, "Columns"), h("div", { class: "rl-column-boxes" }, this.boxes.map(([, box, title]) => h("label", {}, box, " ", title))),
      h("form", { method: "dialog" }, h("button", { class: "rl-toggle" }, "Close")));
  }

  async show() {
    this.error.textContent = "";
    this.sync();
    this.element.showModal();
    await this.run("views", {});
  }

  sync() {
    const shown = this.get();
    for (const [name, box] of this.boxes) box.checked = !shown.length || shown.includes(name);
  }

  choose() {
    const checked = this.boxes.filter(([, box]) => box.checked).map(([name]) => name);
    if (!checked.length) return this.sync(); // a list without columns
    return this.set(checked.length === this.boxes.length ? [] : checked);
  }

  save() {
    return this.run("save_view", { name: this.name.value });
  }

  /** Send a request whose result is the stored views, and list them. A list that stays the same keeps its focus. */
  async run(op, values) {
    try {
      const [views] = await this.ask(op, values);
      this.error.textContent = "";
      if (op === "save_view") this.name.value = "";
      const stored = JSON.stringify(views);
      if (stored === this.stored) return;
      this.stored = stored;
      fill(this.list, Object.entries(views).map(([name, view]) => h("li", {},
        h("button", { type: "button", class: "rl-quiet", onclick: () => { this.element.close(); this.open(view); this.say(`View ${name}.`); } }, name),
        h("button", { type: "button", class: "rl-quiet", "aria-label": `Delete view ${name}`, onclick: () => this.run("delete_view", { name }) }, "delete"))));
      if (!Object.keys(views).length) fill(this.list, h("li", {}, "No view is saved yet."));
    } catch (error) {
      this.error.textContent = error.message;
    }
  }
}
