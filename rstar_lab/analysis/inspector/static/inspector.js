import { h, fill, show, splitter, connect, disconnected, silent, greet, hideStatic, pathEnd } from "./dom.js";
import { linkedTrajectory, trajectoryIn } from "./links.js";
import { channelNames } from "./tokens.js";
import { TrajectoryCache } from "./cache.js";
import { Detail } from "./detail.js";
import { List } from "./list.js";
import { Views } from "./views.js";
import { Filters } from "./filters.js";
import { Figures } from "./figures.js";

const keys = [
  ["j, k", "next, previous trajectory"], ["[, ]", "previous, next rollout of the group"], ["1 to 6", "colour of the tokens"],
  ["e, E", "next, previous failed tool call"], ["b, B", "next, previous forking token"],
  ["a", "most likely tokens at the selected token"], ["t", "continuations from a turn (fork)"],
  ["c", "compare with the next rollout of the group"], ["g", "table of the group"], ["r", "raw tokens"], ["/", "search in the transcript"],
  ["s", "search in all transcripts"], ["n", "note and tags"], ["v", "saved views and columns"], ["f", "full screen"], ["?", "this help"],
];

class View {
  constructor(model, el) {
    this.model = model;
    this.host = el;
    this.line = connect(model, (level) => this.waits(level));
    this.status = h("div", { class: "rl-status", role: "status" }, "Starting …");
    this.root = h("div", { class: "rl rl-app", "data-lm-suppress-shortcuts": "true", "data-jp-suppress-context-menu": "true", role: "region", "aria-label": "Trajectory inspector", onkeydown: (event) => this.key(event) }, this.status);
    this.root.style.height = `${model.get("height")}px`;
    el.append(h("div", { class: "rl-host" }, this.root));
    this.memory = `rstar-lab:${model.get("place")}:${model.get("label")}`;
    this.questions = new Map(); // problem id to the beginning of its question
    this.waiting = []; // actions that wait until the selected trajectory is shown
    this.cache = new TrajectoryCache((traj_id, raw) => this.load(traj_id, raw));
  }

  /** Show a message. Errors are shown above the list, where they are in view. */
  say(text, wrong = false) {
    this.status.textContent = wrong ? "" : text;
    if (this.alert) this.alert.textContent = wrong ? text : this.isLost ? disconnected : this.isSilent ? silent : this.failure ?? "";
    else if (wrong) this.status.textContent = text;
  }

  /** Show whether requests wait for the kernel; level: see `connect`. */
  waits(level) {
    this.root.classList.toggle("rl-busy", level > 0);
    if ((level === 2) !== Boolean(this.isSilent)) this.say((this.isSilent = level === 2) ? silent : "", this.isSilent);
  }

  /** The kernel was restarted: nothing here works until the cell runs again. */
  lost() {
    this.isLost = true;
    this.root.classList.add("rl-lost");
    this.line.close();
    this.say(disconnected, true);
  }

  state() {
    return { filters: this.model.get("filters"), scope: this.model.get("scope"), sort: this.model.get("sort") };
  }

  set(changes) {
    if (this.isLost) return;
    for (const [name, value] of Object.entries(changes)) this.model.set(name, value);
    this.remember();
    try {
      this.model.save_changes();
    } catch {
      this.lost();
    }
  }

  remember() {
    const kept = Object.fromEntries(["filters", "scope", "sort", "columns", "selected", "channel"].map((name) => [name, this.model.get(name)]));
    if (!this.model.get("place")) return;
    try {
      sessionStorage.setItem(this.memory, JSON.stringify(kept));
    } catch { /* the page has no storage */ }
  }

  /** Restore the state of this inspector from before a kernel restart. A link in the address takes precedence, once. */
  async recall() {
    const empty = (name) => !Object.keys(this.model.get(name)).length;
    if (this.model.get("selected") || !empty("filters") || !empty("scope")) return;
    const linked = linkedTrajectory(this.memory);
    if (linked) {
      const [place] = await this.line.ask("place", { traj_id: linked, filters: {}, scope: {}, sort: [] });
      if (place !== null) {
        this.set({ selected: linked });
        return;
      } // else the link refers to another inspector of the page
    }
    try {
      const kept = JSON.parse(sessionStorage.getItem(this.memory) ?? "null");
      if (kept) this.set(kept);
      if (kept && ["filters", "scope"].some((name) => Object.keys(kept[name] ?? {}).length)) this.restored = "The filters from before the restart of the kernel or the page are restored.";
    } catch { /* no state stored */ }
  }

  async start() {
    this.model.on("comm_live_update", this.onComm = () => this.lost());
    const [choices] = await this.line.ask("start");
    this.choices = choices;
    await this.recall();
    const say = (text, wrong) => this.say(text, wrong);
    this.detail = new Detail({
      scales: choices.scales, say, channel: () => this.model.get("channel"), setChannel: (channel) => this.set({ channel }),
      ask: (...request) => this.line.ask(...request), fetch: (traj_id, raw) => this.cache.get(traj_id, raw),
      select: (selected) => this.set({ selected }), reopen: () => this.open(this.opening ? this.model.get("selected") : this.detail.row.traj_id), noted: (traj_id, note) => this.noted(traj_id, note),
    });
    this.list = new List({
      known: choices.columns, several: choices.run_id.length > 1, shown: this.model.get("columns"), say, sort: (name) => this.sort(name), choose: (row) => this.choose(row),
      failed: (error) => { this.count.textContent = "–"; this.failure = error.message; this.say(error.message, true); },
      ask: async (offset, limit) => (await this.line.ask("page", { offset, limit, ...this.state() }))[0],
      loaded: (page) => {
        this.count.textContent = `${show(page.total)} of ${show(page.all)} trajectories`;
        if (!this.isLost && !this.isSilent) this.alert.textContent = "";
        this.addQuestions(page.rows);
        this.list.sorted(...(this.state().sort.length ? this.state().sort : [null]));
      },
    });
    // A run that is chosen here replaces one that was chosen in a figure.
    const elsewhere = (run) => run && ![this.state().scope.filter?.run_id ?? run].flat().includes(run);
    this.filters = new Filters(choices, () => this.model.get("filters"), (filters) => this.set({ filters, ...(elsewhere(filters.run_id) ? { scope: {} } : {}) }));
    this.build();
    this.listen();
    await this.reload();
    const selected = this.model.get("selected");
    if (selected) {
      await this.open(selected);
      await this.mark(selected);
    } else await this.list.select(this.list.firstWithValues);
    if (!this.model.get("selected")) fill(this.detail.head, h("p", { class: "rl-missing" }, "No rollout is open: select one in the list."));
    if (this.restored) this.say(this.restored);
  }

  /** Fill in the questions of rows, after they are shown. */
  async addQuestions(rows) {
    const put = () => { for (const row of rows) row.question = this.questions.get(row.problem_id); };
    put();
    const unknown = new Map(rows.filter((row) => !this.questions.has(row.problem_id)).map((row) => [row.problem_id, row]));
    if (!unknown.size) return;
    for (const problem of unknown.keys()) this.questions.set(problem, undefined);
    try {
      const [questions] = await this.line.ask("questions", { rows: [...unknown.values()].map(({ traj_id, run_id, step, problem_id }) => ({ traj_id, run_id, step, problem_id })) });
      for (const [problem, question] of Object.entries(questions)) this.questions.set(problem, question);
      put();
      this.list.draw();
    } catch (error) { this.say(error.message, true); } // the list shows problem ids
  }

  choose(row) {
    if (this.detail.row) this.waiting = []; // they were meant for another trajectory
    if (this.isLost) return this.restoreHighlight();
    if (row.traj_id !== this.model.get("selected")) return this.set({ selected: row.traj_id });
    return row.traj_id === this.detail.row?.traj_id ? undefined : this.open(row.traj_id);
  }

  build() {
    this.count = h("span", { class: "rl-count", role: "status" });
    this.across = h("input", { type: "search", class: "rl-across", placeholder: "Search in all transcripts listed", "aria-label": "Search in all transcripts listed", onkeydown: (event) => event.key === "Enter" && this.searchAll(), oninput: (event) => event.target.value || this.endSearch() });
    this.scopeLine = h("div", { class: "rl-scope" });
    this.alert = h("div", { class: "rl-alert", role: "alert" });
    this.helpBox = h("dialog", { class: "rl-help", "aria-label": "Keys" }, h("h3", {}, "Keys"), h("dl", {}, keys.map(([name, what]) => h("div", {}, h("dt", {}, name), h("dd", {}, what)))),
      h("form", { method: "dialog" }, h("button", { class: "rl-toggle" }, "Close")));
    this.views = new Views({
      columns: this.list.known, get: () => this.model.get("columns"), set: (columns) => this.set({ columns }), ask: (op, values) => this.line.ask(op, { ...values, ...(op === "save_view" ? { view: { ...this.state(), columns: this.model.get("columns") } } : {}) }),
      open: (view) => this.set(view), say: (text, wrong) => this.say(text, wrong),
    });
    const bar = h("div", { class: "rl-top" }, h("strong", { class: "rl-name", title: this.model.get("label") }, pathEnd(this.model.get("label"), 2)), this.count, this.across,
      h("button", { type: "button", class: "rl-quiet", onclick: () => this.views.show() }, "Views"),
      h("button", { type: "button", class: "rl-toggle", onclick: () => this.full() }, "Full screen"),
      h("button", { type: "button", class: "rl-quiet", onclick: () => this.helpBox.showModal() }, "Keys ?"));
    this.main = h("div", { class: "rl-main" }, this.list.element, splitter(), this.detail.element);
    const dialogs = [this.helpBox, this.views.element];
    const rollouts = [this.filters.element, this.scopeLine, this.alert, this.main, this.status];
    if (this.model.get("figures")?.length) {
      this.figures = new Figures(this.model);
      this.root.classList.add("rl-one-screen");
      fill(this.root, bar, h("div", { class: "rl-screen" }, this.figures.element, h("div", { class: "rl-rollouts" }, rollouts)), dialogs);
      this.figures.start().catch((error) => this.say(error.message, true));
    } else fill(this.root, bar, rollouts, dialogs);
    this.say("");
  }

  listen() {
    this.handlers = {
      "change:filters": () => this.reload(), "change:scope": () => this.reload(), "change:sort": () => this.reload(),
      "change:columns": () => this.columns(), "change:revision": () => this.grown(), "change:reveal": () => this.reveal(), "change:selected": () => this.open(this.model.get("selected")),
      "change:channel": () => { this.detail.recolour(); this.remember(); },
    };
    for (const [event, handler] of Object.entries(this.handlers)) this.model.on(event, handler);
    this.clicked = (event) => this.follow(event).catch((error) => this.say(error.message, true));
    document.addEventListener("click", this.clicked);
  }

  /** Open a trajectory when a link to it is clicked anywhere on the page, such as in a comparison. */
  async follow(event) {
    const href = event.target.closest?.("a")?.getAttribute("href");
    if (!href?.startsWith("#rstar=")) return;
    event.preventDefault();
    const selected = trajectoryIn(href);
    const [place] = await this.line.ask("place", { traj_id: selected, filters: {}, scope: {}, sort: [] });
    if (place === null) return this.say(`${selected} is not in the runs of this list.`, true);
    this.set({ selected });
    return this.root.scrollIntoView({ block: "nearest" });
  }

  close() {
    for (const [event, handler] of Object.entries(this.handlers ?? {})) this.model.off(event, handler);
    document.removeEventListener("click", this.clicked);
    this.model.off("comm_live_update", this.onComm);
    this.line.close();
    this.list?.close();
    this.detail?.close();
    this.figures?.close();
  }

  /** The run has grown: load the list again, keep the selected row and the rows in view. */
  async grown() {
    this.cache.clear();
    const [choices] = await this.line.ask("start");
    this.filters.update(choices);
    const { list } = this;
    const before = list.at;
    await list.reset({ keep: true });
    const { generation } = list;
    const [index] = await this.line.ask("place", { traj_id: this.model.get("selected"), ...this.state() });
    if (generation !== list.generation) return;
    list.at = index ?? -1;
    if (index !== null && before >= 0 && list.top > 0) list.goTo(list.top + index - before);
    list.draw();
  }

  /** A click in a figure has set the scope: bring the list into view and open its first row. */
  async reveal() {
    this.root.scrollIntoView({ block: "nearest" });
    await null; // The changes of one update arrive in any order: let the change of the scope start the load.
    await this.loading;
    await this.list.select(this.list.firstWithValues);
  }

  reload() {
    this.loading = this.loadList();
    return this.loading;
  }

  async loadList() {
    this.filters.sync();
    this.failure = null; // why the list could not be loaded; shown until the filters change
    const { label } = this.state().scope;
    fill(this.scopeLine, label ? [h("span", { class: "rl-chip" }, label), h("button", { type: "button", class: "rl-quiet", onclick: () => this.showAll() }, "Show all")] : null);
    this.say("");
    this.remember();
    await this.list.reset();
    await this.highlight();
  }

  /** Highlight the selected trajectory in the list after its order or its filters have changed, without scrolling to it. */
  async highlight() {
    const selected = this.model.get("selected");
    const { list } = this;
    const { generation } = list;
    if (!selected || list.at >= 0 || !list.total) return;
    let index = list.indexOf(selected);
    if (index === null) [index] = await this.line.ask("place", { traj_id: selected, ...this.state() });
    if (index === null || list.at >= 0 || generation !== list.generation || selected !== this.model.get("selected")) return;
    list.at = index;
    list.draw();
  }

  columns() {
    this.list.show(this.model.get("columns"));
    this.list.sorted(...(this.state().sort.length ? this.state().sort : [null]));
    this.list.draw();
    this.views.sync();
    this.remember();
  }

  sort(name) {
    const [column, down] = this.state().sort;
    this.set({ sort: column !== name ? [name, true] : down ? [name, false] : [] });
  }

  async open(traj_id) {
    const { raw } = this.detail;
    const request = `${raw} ${traj_id}`;
    if (!traj_id || request === this.opening) return;
    this.opening = request;
    try {
      const response = await this.cache.get(traj_id, raw);
      if (this.opening !== request) return;
      this.remember();
      const { row, told } = this.detail;
      if (told && row?.traj_id !== traj_id && [this.status, this.alert].some((line) => line?.textContent === told)) this.say("");
      await this.detail.show(...response);
      if (this.opening !== request) return;
      this.opening = null;
      while (!this.opening && this.waiting.length) this.waiting.shift()();
      if (this.list.row(this.list.at)?.traj_id !== traj_id) await this.mark(traj_id);
      this.prefetch();
    } catch (error) {
      if (this.opening && this.opening !== request) return;
      this.opening = null;
      this.waiting = [];
      this.say(error.message, true);
      this.restoreHighlight();
    }
  }

  /** Do something with the selected trajectory: now if it is shown, otherwise as soon as it is. */
  whenShown(action) {
    if (this.detail.row && !this.opening && !this.list.selecting) action();
    else this.waiting.push(action);
  }

  /** Get a trajectory from the kernel. */
  load(traj_id, raw) {
    const row = this.list.rowOf(traj_id);
    return this.line.ask("open", { traj_id, raw, ...(row ? { group: [row.run_id, row.step, row.group_id] } : {}) });
  }

  /** Highlight the row of the open trajectory again, after another one could not be opened. */
  restoreHighlight() {
    const { row } = this.detail;
    this.list.at = row ? this.list.indexOf(row.traj_id) ?? -1 : -1;
    this.list.draw();
  }

  /** Load the next row in advance, so that `j` shows it at once. */
  prefetch() {
    clearTimeout(this.later);
    this.later = setTimeout(() => {
      const next = this.list.row(this.list.at + 1);
      if (next && this.list.at >= 0 && !this.isLost) this.cache.get(next.traj_id, false).catch(() => {});
    }, 250);
  }

  /** Highlight a trajectory in the list, and scroll to it if it is not in view. */
  async mark(traj_id) {
    let index = this.list.indexOf(traj_id);
    const { generation } = this.list;
    if (index === null) [index] = await this.line.ask("place", { traj_id, ...this.state() });
    // During the request another one was selected, or the filters changed; then `highlight` finds its row.
    if (traj_id !== this.model.get("selected") || generation !== this.list.generation) return;
    this.list.at = index ?? -1;
    if (index !== null && (index < this.list.top || index > this.list.top + this.list.visible - 2)) this.list.goTo(index - Math.floor(this.list.visible / 3));
    this.list.draw();
  }

  async searchAll() {
    const text = this.across.value;
    if (!text) return this.endSearch();
    this.say("Searching …");
    try {
      const { scope, ...state } = this.state();
      const [{ hits, first, last, whole }] = await this.line.ask("search", { text, ...state, scope: scope.search ? {} : scope });
      const ids = Object.keys(hits);
      const where = whole ? "" : ` (steps ${last} down to ${first}; filter the list to search further)`;
      this.list.snippets = hits;
      this.detail.findBox.value = text;
      this.searched = text;
      this.say("");
      if (ids.length) this.set({ scope: { label: `${ids.length} with “${text}”${where}`, filter: { traj_id: ids }, search: true }, selected: ids[0] });
      else this.set({ scope: { label: `No transcript contains “${text}”${where}`, filter: { sql: "FALSE" }, search: true } });
      this.detail.find();
    } catch (error) {
      this.say(error.message, true);
    }
    return undefined;
  }

  showAll() {
    this.across.value = "";
    if (this.state().scope.search) this.endSearch();
    else this.set({ scope: {} });
  }

  /** Remove the search and its marks. */
  endSearch() {
    const { findBox } = this.detail;
    if (findBox.value === this.searched) {
      findBox.value = "";
      this.detail.find();
    }
    this.searched = null;
    this.list.snippets = {};
    this.say("");
    if (this.state().scope.search) this.set({ scope: {} });
  }

  /** Show a saved note in the list. */
  noted(traj_id, note) {
    const row = this.list.rowOf(traj_id);
    if (row) row.note = note;
    this.list.draw();
    this.cache.clear();
  }

  full() {
    if (document.fullscreenElement) document.exitFullscreen();
    else this.root.requestFullscreen?.();
  }

  key(event) {
    if (event.key === "Escape" && /INPUT|SELECT/.test(event.target.tagName)) return this.list?.element.focus();
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName) && event.target.type !== "radio" || !this.helpBox) return undefined;
    const focus = (input) => { input.focus(); input.select(); };
    const { detail } = this;
    const ofTrajectory = {
      e: () => detail.say(detail.transcript.nextError(1)), E: () => detail.say(detail.transcript.nextError(-1)),
      b: () => detail.say(detail.transcript.nextFork(1)), B: () => detail.say(detail.transcript.nextFork(-1)),
      a: () => detail.showAlternatives(), t: () => detail.showFork(), "[": () => this.set({ selected: detail.nextSibling(-1) }), "]": () => this.set({ selected: detail.nextSibling(1) }),
      c: () => detail.toggleCompare(), g: () => detail.toggleGroup(), r: () => detail.toggleRaw(), n: () => detail.openNote(),
    }[event.key];
    const action = ofTrajectory ? () => this.whenShown(ofTrajectory) : {
      j: () => this.list.move(1), k: () => this.list.move(-1), "/": () => focus(detail.findBox), s: () => focus(this.across), v: () => this.views.show(), f: () => this.full(), "?": () => this.helpBox.showModal(),
    }[event.key] ?? (channelNames[Number(event.key) - 1] && (() => this.set({ channel: channelNames[Number(event.key) - 1][0] })));
    if (!action) return undefined;
    event.preventDefault();
    event.stopPropagation();
    return action();
  }
}

export default {
  initialize({ model }) {
    return greet(model);
  },
  render({ model, el }) {
    const view = new View(model, el);
    hideStatic(el, 1 + (model.get("figures")?.length ?? 0));
    view.start().catch((error) => view.say(error.message, true));
    return () => view.close();
  },
};
