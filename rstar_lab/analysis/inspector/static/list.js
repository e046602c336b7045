import { h, counted, fill, show, visible, verdictMark, outcomeClass, debounce } from "./dom.js";

/** The list of trajectories. Only visible rows have elements; rows are fetched in blocks. */

const rowHeight = 28;
const block = 100;
const marginWidth = 22; // pixels of the mark of a note
const tallest = 8_000_000; // pixels; browsers limit the height of an element, so longer lists map the scroll bar proportionally

const callGlyph = { ok: "●", bad: "▲", ours: "○", unknown: "·" };
const callCell = (row) => {
  const outcomes = row.outcomes ?? [];
  if (!outcomes.length) return show(row.calls);
  const drawn = outcomes.slice(0, 8).map((outcome) => h("span", { class: `rl-dot rl-${outcomeClass(outcome)}`, title: outcome }, callGlyph[outcomeClass(outcome)]));
  return h("span", { role: "img", "aria-label": `${counted(outcomes.length, "call")}: ${outcomes.slice(0, 8).join(", ")}` }, drawn, outcomes.length > 8 ? `+${outcomes.length - 8}` : null);
};
const fixed = (name, digits) => (row) => (typeof row[name] === "number" ? row[name].toFixed(digits).replace("-", "−") : "–");

const meanings = { p_err: "p_err, RoC's penalty of tool errors", p_format: "p_format, RoC's penalty of the format", sample: "sample, the place in the group" };

/** [column to sort by, title, width, cell, right-aligned] */
export const listColumns = [
  ["step", "Step", 44, (row) => show(row.step), true],
  ["problem_id", "Problem", 190, (row) => visible(row.question ?? row.problem_id)],
  ["sample", "#", 28, (row) => show(row.sample), true],
  ["reward", "Correct", 64, (row) => verdictMark(row)],
  ["kept", "Kept", 44, (row) => (row.kept === null || row.kept === undefined ? "–" : h("span", { class: row.kept ? "" : "rl-faint" }, row.kept ? "yes" : "no"))],
  ["outcomes", "Tool calls", 74, callCell],
  ["response_tokens", "Tokens", 58, (row) => show(row.response_tokens), true],
  ["answer", "Answer", 84, (row) => show(row.answer), true],
  ["truth", "Truth", 84, (row) => show(row.truth), true],
  ["p_err", "p_err", 52, fixed("p_err", 2), true],
  ["p_format", "p_format", 78, fixed("p_format", 2), true],
  ["advantage", "Adv.", 56, fixed("advantage", 2), true],
  ["turns", "Turns", 50, (row) => show(row.turns), true],
  ["errors", "Errors", 52, (row) => show(row.errors), true],
  ["entropy", "Entropy", 72, fixed("entropy", 2), true],
  ["reflection_tokens", "Reflection", 86, (row) => show(row.reflection_tokens), true],
  ["stop_reason", "Stopped by", 92, (row) => show(row.stop_reason)],
  ["stage", "Stage", 76, (row) => show(row.stage)],
  ["run_id", "Run", 88, (row) => show(row.run_id)],
];

export class List {
  /** ask(offset, limit) returns {rows, total}. loaded(page): rows of the current filters have arrived. choose(row) opens a
   *  row. sort(column) changes the order. */
  constructor({ ask, loaded, choose, sort, say, failed, known, several, shown }) {
    Object.assign(this, { ask, loaded, choose, sort, say, failed });
    this.message = "Loading …";
    this.known = listColumns.filter(([name]) => known.includes(name));
    if (several) this.known.splice(1, 0, this.known.pop()); // with several runs, the run is the second column
    this.blocks = new Map();
    this.pending = new Map(); // requests of blocks, by number
    this.total = 0;
    this.top = 0; // index of the first row in view, with its fraction
    this.at = -1; // index of the selected row, -1 if the filter excludes it
    this.last = -1; // index of the row that was selected last
    this.snippets = {};
    this.head = h("div", { class: "rl-row rl-header", role: "row", "aria-rowindex": 1 });
    this.rows = h("div", { class: "rl-rows", role: "rowgroup" });
    this.space = h("div", { class: "rl-space" }, this.rows);
    this.pane = h("div", {
      class: "rl-list", role: "grid", tabindex: "0", "aria-label": "Trajectories", "aria-rowcount": 1,
      onscroll: () => this.scrolled(), onkeydown: (event) => this.key(event),
    }, h("div", { role: "rowgroup", class: "rl-sticky" }, this.head), this.space);
    this.pane.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.rows.addEventListener("click", (event) => {
      const row = event.target.closest("[data-index]");
      if (row) this.select(Number(row.dataset.index));
    });
    this.show(shown);
    this.element = this.pane;
    this.fetch = debounce(60, () => this.load());
    this.observer = new ResizeObserver(() => { this.layout(); this.draw(); });
    this.observer.observe(this.pane);
  }

  /** Show these columns; an empty array shows all. */
  show(names) {
    this.columns = names.length ? this.known.filter(([name]) => names.includes(name)) : this.known;
    fill(this.head, h("span", { role: "columnheader" }, h("span", { class: "rl-hidden" }, "Note")), this.columns.map(([name, title, , , right]) =>
      h("span", { role: "columnheader", class: right ? "rl-num" : "", "data-column": name },
        h("button", { type: "button", title: `Sort by ${meanings[name] ?? name}`, tabindex: "-1", onclick: () => this.sort(name) }, title))));
    this.layout();
  }

  /** Set the widths of the columns. The problem takes what the columns up to the tokens leave, but is never too narrow to be read. */
  layout() {
    const last = this.columns.findIndex(([name]) => name === "response_tokens");
    const first = this.columns.slice(0, last < 0 ? undefined : last + 1);
    const rest = first.reduce((sum, [name, , width]) => sum + (name === "problem_id" ? 0 : width), marginWidth);
    const problem = Math.max(180, Math.min(420, (this.pane.clientWidth || 560) - rest));
    const widths = this.columns.map(([name, , width]) => (name === "problem_id" ? problem : width));
    const template = `${marginWidth}px ${widths.map((width) => `${width}px`).join(" ")}`;
    if (template === this.template) return;
    this.template = template;
    const width = widths.reduce((sum, each) => sum + each, marginWidth);
    for (const element of [this.head, this.rows, this.space]) element.style.minWidth = `${width}px`;
    this.head.style.gridTemplateColumns = template;
  }

  get visible() {
    return Math.max(1, Math.floor((this.pane.clientHeight - rowHeight) / rowHeight));
  }

  get full() {
    return this.total * rowHeight;
  }

  /** Load the list again after the filter or order changed. keep: do not scroll to the top. */
  async reset({ keep = false } = {}) {
    this.generation = (this.generation ?? 0) + 1;
    this.blocks.clear();
    this.pending.clear();
    if (!keep) {
      this.top = 0;
      this.at = -1;
      this.last = -1;
      this.pane.scrollTop = 0;
    }
    await this.load();
  }

  async load() {
    const { generation } = this;
    const from = Math.floor(Math.max(0, this.top - 5) / block);
    const to = Math.floor(Math.min(this.total - 1, this.top + this.visible + 5) / block);
    for (let index = Math.max(0, from); index <= Math.max(0, to); index += 1) {
      if (this.blocks.has(index)) continue;
      this.blocks.set(index, null);
      try {
        const asked = this.ask(index * block, block);
        this.pending.set(index, asked.catch(() => {}));
        const page = await asked;
        if (generation !== this.generation) return; // a reply to earlier filters
        const { rows, total } = page;
        this.loaded(page);
        this.total = total;
        this.blocks.set(index, rows);
        this.message = total ? "" : "No trajectory matches the filters.";
        if (this.top > Math.max(0, total - this.visible)) this.goTo(this.top);
      } catch (error) {
        if (generation !== this.generation) return;
        this.blocks.delete(index);
        if (index * block <= this.top) { // the page in view has failed
          this.total = 0;
          this.message = error.message;
          this.failed(error);
          this.draw();
        } else this.say(error.message, true);
        return;
      }
      if (this.blocks.size > 40) this.blocks.delete(this.blocks.keys().next().value);
      this.draw();
    }
  }

  /** Index of the first loaded row whose token values were recorded, else 0. */
  get firstWithValues() {
    return Math.max(0, this.blocks.get(0)?.findIndex((row) => typeof row.entropy === "number") ?? 0);
  }

  /** Index of a trajectory among the loaded rows, else null. */
  indexOf(traj_id) {
    for (const [number, rows] of this.blocks) {
      const at = rows?.findIndex((row) => row.traj_id === traj_id) ?? -1;
      if (at >= 0) return number * block + at;
    }
    return null;
  }

  rowOf(traj_id) {
    const index = this.indexOf(traj_id);
    return index === null ? null : this.row(index);
  }

  row(index) {
    return this.blocks.get(Math.floor(index / block))?.[index % block] ?? null;
  }

  draw() {
    const height = this.total ? Math.min(this.full, tallest) : 80;
    this.space.style.height = `${height}px`;
    this.pane.setAttribute("aria-rowcount", this.total + 1);
    const first = Math.max(0, Math.floor(this.top));
    const last = Math.min(this.total, first + this.visible + 2);
    const drawn = [];
    let missing = false;
    for (let index = first; index < last; index += 1) {
      const row = this.row(index);
      missing ||= !row;
      drawn.push(this.line(row, index));
    }
    fill(this.rows, drawn.length || !this.message ? drawn : h("p", { class: "rl-empty" }, this.message));
    const above = this.full <= tallest ? first * rowHeight : this.pane.scrollTop - (this.top - first) * rowHeight;
    this.rows.style.transform = `translateY(${above}px)`;
    if (this.at >= 0) this.last = this.at;
    if (this.at >= first && this.at < last) this.pane.setAttribute("aria-activedescendant", `${this.name}-${this.at}`);
    else this.pane.removeAttribute("aria-activedescendant");
    if (missing) this.fetch();
  }

  name = `rl-${Math.random().toString(36).slice(2)}`;

  line(row, index) {
    const chosen = index === this.at;
    const note = row?.note;
    const line = h("div", { class: `rl-row${chosen ? " rl-chosen" : ""}${index % 2 ? " rl-odd" : ""}`, role: "row", id: `${this.name}-${index}`, "data-index": index, "aria-rowindex": index + 2, "aria-selected": chosen ? "true" : "false",
      title: row && this.snippets[row.traj_id] ? `… ${this.snippets[row.traj_id]} …` : undefined },
      row
        ? [h("span", { role: "gridcell" }, note ? h("span", { class: "rl-flag", role: "img", "aria-label": "has a note", title: [...note.tags, note.note].join(" · ") }, "◆") : ""),
            this.columns.map(([name, , , cell, right]) => {
              const content = cell(row);
              const title = name === "problem_id" && row.question ? visible(`${row.problem_id}: ${row.question}`) : content;
              return h("span", { role: "gridcell", class: right ? "rl-num" : "", title: typeof title === "string" && !this.snippets[row.traj_id] && title }, content);
            })]
        : h("span", { role: "gridcell", class: "rl-faint" }, "…"));
    line.style.gridTemplateColumns = this.template;
    return line;
  }

  sorted(column, down) {
    for (const cell of this.head.querySelectorAll("[data-column]")) {
      if (cell.dataset.column === column) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
  }

  scrolled() {
    if (this.expected !== undefined && Math.abs(this.pane.scrollTop - this.expected) < 2) {
      this.expected = undefined;
    } else {
      const range = Math.min(this.full, tallest) + rowHeight - this.pane.clientHeight;
      this.top = this.full <= tallest ? this.pane.scrollTop / rowHeight : (this.pane.scrollTop / Math.max(1, range)) * Math.max(0, this.total - this.visible);
    }
    this.draw();
  }

  /** If the scroll bar is proportional, the wheel still moves by rows. */
  wheel(event) {
    if (this.full <= tallest || event.shiftKey || !event.deltaY) return;
    event.preventDefault();
    this.goTo(this.top + event.deltaY / rowHeight);
  }

  goTo(top) {
    this.top = Math.max(0, Math.min(top, this.total - this.visible));
    const range = Math.min(this.full, tallest) + rowHeight - this.pane.clientHeight;
    const target = this.full <= tallest ? this.top * rowHeight : (this.top / Math.max(1, this.total - this.visible)) * range;
    if (Math.abs(target - this.pane.scrollTop) >= 1) {
      this.expected = Math.round(target);
      this.pane.scrollTop = target;
    }
    this.draw();
  }

  async select(index) {
    if (!this.total) return;
    this.at = Math.max(0, Math.min(index, this.total - 1));
    if (this.at < Math.ceil(this.top) || this.at >= this.top + this.visible - 1) this.goTo(this.at < this.top ? this.at : this.at - this.visible + 2);
    if (!this.row(this.at)) {
      this.selecting = true;
      await this.load();
      await this.pending.get(Math.floor(this.at / block)); // its rows may have been asked for already
      this.selecting = false;
    }
    const row = this.row(this.at);
    this.draw();
    if (row) this.choose(row);
  }

  move(by) {
    if (this.at >= 0 || Math.abs(by) >= this.total) return this.select(Math.max(0, this.at) + by);
    return this.select(this.last >= 0 ? this.last + by : Math.floor(this.top));
  }

  key(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: this.visible, PageUp: -this.visible, Home: -this.total, End: this.total }[event.key];
    if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    this.move(by);
  }

  close() {
    this.observer.disconnect();
  }
}
