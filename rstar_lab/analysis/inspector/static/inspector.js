import { h, fill, show, correct, rocStatus, connect, disconnected, greet, hideStatic, committed, debounce } from "./dom.js";
import { linkedTrajectory, trajectoryIn } from "./links.js";
import { channelNames } from "./tokens.js";
import { Transcript, answerLine } from "./transcript.js";
import { List } from "./list.js";
import { strip, table } from "./group.js";
import { Filters } from "./filters.js";

const keys = [
  ["j, k", "next, previous trajectory"], ["[, ]", "previous, next rollout of the group"], ["1 to 6", "colour of the tokens"],
  ["c", "compare with the next rollout of the group"], ["g", "table of the group"], ["r", "raw tokens"], ["/", "search in the transcript"],
  ["s", "search in all transcripts"], ["n", "note and tags"], ["f", "full screen"], ["?", "this help"],
];

class View {
  constructor(model, el) {
    this.model = model;
    this.host = el;
    this.line = connect(model);
    this.status = h("div", { class: "rl-status", role: "status" }, "Starting …");
    this.root = h("div", { class: "rl rl-app", "data-lm-suppress-shortcuts": "true", "data-jp-suppress-context-menu": "true", role: "region", "aria-label": "Trajectory inspector", onkeydown: (event) => this.key(event) }, this.status);
    this.root.style.height = `${model.get("height")}px`;
    el.append(this.root);
    this.memory = `rstar-lab:${model.get("label")}`;
    this.questions = new Map(); // problem id to the beginning of its question
    this.cache = new Map(); // opened trajectories, newest last
  }

  /** Show a message. Errors are shown above the list, where they are in view. */
  say(text, wrong = false) {
    this.status.textContent = wrong ? "" : text;
    if (this.alert) this.alert.textContent = wrong ? text : "";
    else if (wrong) this.status.textContent = text;
  }

  /** The kernel was restarted: nothing here works until the cell runs again. */
  lost() {
    this.isLost = true;
    this.root.classList.add("rl-lost");
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
    const kept = Object.fromEntries(["filters", "scope", "sort", "selected", "channel"].map((name) => [name, this.model.get(name)]));
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
    } catch { /* no state stored */ }
  }

  async start() {
    this.model.on("comm_live_update", this.onComm = () => this.lost());
    const [choices] = await this.line.ask("start");
    this.choices = choices;
    await this.recall();
    const say = (text, wrong) => this.say(text, wrong);
    this.transcript = new Transcript(choices.scales, say);
    this.other = new Transcript(choices.scales, say);
    this.list = new List({
      known: choices.columns, several: choices.run_id.length > 1, say, sort: (name) => this.sort(name), choose: (row) => this.choose(row),
      failed: (error) => { this.count.textContent = "–"; this.say(error.message, true); },
      ask: async (offset, limit) => {
        const [page] = await this.line.ask("page", { offset, limit, ...this.state() });
        this.count.textContent = `${show(page.total)} of ${show(page.all)} trajectories`;
        if (this.alert.textContent !== disconnected) this.alert.textContent = "";
        this.addQuestions(page.rows);
        this.list.sorted(...(this.state().sort.length ? this.state().sort : [null]));
        return page;
      },
    });
    this.filters = new Filters(choices, () => this.model.get("filters"), (filters) => this.set({ filters }));
    this.build();
    this.listen();
    await this.reload();
    if (this.model.get("selected")) await this.open(this.model.get("selected"));
    else await this.list.select(0);
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
    } catch { /* the list shows problem ids */ }
  }

  choose(row) {
    if (this.isLost) return this.restoreHighlight();
    if (row.traj_id !== this.model.get("selected")) return this.set({ selected: row.traj_id });
    return row.traj_id === this.row?.traj_id ? undefined : this.open(row.traj_id);
  }

  build() {
    this.count = h("span", { class: "rl-count", role: "status" });
    this.across = h("input", { type: "search", class: "rl-across", placeholder: "Search in all transcripts listed", "aria-label": "Search in all transcripts listed", onkeydown: (event) => event.key === "Enter" && this.searchAll(), oninput: (event) => event.target.value || this.endSearch() });
    this.scopeLine = h("div", { class: "rl-scope" });
    this.alert = h("div", { class: "rl-alert", role: "alert" });
    this.helpBox = h("dialog", { class: "rl-help", "aria-label": "Keys" }, h("h3", {}, "Keys"), h("dl", {}, keys.map(([name, what]) => h("div", {}, h("dt", {}, name), h("dd", {}, what)))),
      h("form", { method: "dialog" }, h("button", { class: "rl-toggle" }, "Close")));
    const bar = h("div", { class: "rl-top" }, h("strong", { class: "rl-name" }, this.model.get("label")), this.count, this.across,
      h("button", { type: "button", class: "rl-quiet", onclick: () => this.full() }, "Full screen"),
      h("button", { type: "button", class: "rl-quiet", onclick: () => this.helpBox.showModal() }, "Keys ?"));
    this.detail = h("section", { class: "rl-detail", "aria-label": "Selected trajectory" });
    this.buildDetail();
    const drag = h("div", { class: "rl-split", "aria-hidden": "true", onpointerdown: (event) => this.drag(event) });
    this.main = h("div", { class: "rl-main" }, this.list.element, drag, this.detail);
    fill(this.root, bar, this.filters.element, this.scopeLine, this.alert, this.main, this.status, this.helpBox);
    this.say("");
  }

  buildDetail() {
    this.head = h("div", { class: "rl-dhead" });
    this.group = h("div", { class: "rl-groupline" });
    this.channels = h("div", { class: "rl-channels", role: "radiogroup", "aria-label": "Colour of the tokens" }, channelNames.map(([name, title]) =>
      h("label", {}, h("input", { type: "radio", name: `${this.list.name}-channel`, value: name, onchange: () => this.set({ channel: name }) }), h("span", {}, title))));
    this.findBox = h("input", { type: "search", class: "rl-find", placeholder: "Find in transcript", "aria-label": "Find in transcript",
      oninput: debounce(120, () => this.find()), onkeydown: (event) => { if (event.key === "Enter") this.findNext(event.shiftKey ? -1 : 1); } });
    this.found = h("span", { class: "rl-found", role: "status" });
    const button = (title, action, more = {}) => h("button", { type: "button", class: "rl-toggle", onclick: action, ...more }, title);
    this.rawButton = button("Raw", () => this.raw(), { "aria-pressed": "false", title: "Show the unchanged token stream" });
    this.compareButton = button("Side by side", () => this.compareNext(), { "aria-pressed": "false" });
    this.groupButton = button("Group", () => this.toggleGroup(), { "aria-pressed": "false" });
    const tools = h("div", { class: "rl-tools" }, this.channels, h("span", { class: "rl-push" }), h("span", { class: "rl-actions" }, this.rawButton, this.groupButton, this.compareButton));
    const actions = h("div", { class: "rl-actions" }, button("Copy link", () => this.link()), button("HTML", () => this.export("html"), { title: "Save as a self-contained HTML page" }), button("Markdown", () => this.export("markdown")));
    this.note = h("input", { type: "text", class: "rl-note-text", placeholder: "Note", "aria-label": "Note", ...committed(() => this.saveNote()) });
    this.tags = h("input", { type: "text", class: "rl-note-tags", placeholder: "tags, with, commas", "aria-label": "Tags", ...committed(() => this.saveNote()) });
    this.panes = h("div", { class: "rl-panes" }, this.transcript.element);
    this.groupBox = h("div", { class: "rl-groupbox", hidden: true });
    const row = h("div", { class: "rl-siblings" }, this.group, h("span", { class: "rl-push" }), this.findBox, this.found);
    fill(this.detail, this.head, row, tools, this.groupBox, this.panes, h("div", { class: "rl-foot" }, this.note, this.tags, actions));
  }

  listen() {
    this.handlers = {
      "change:filters": () => this.reload(), "change:scope": () => this.reload(), "change:sort": () => this.reload(),
      "change:revision": () => this.grown(), "change:reveal": () => this.reveal(), "change:selected": () => this.open(this.model.get("selected")),
      "change:channel": () => this.recolour(),
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
    this.transcript?.clear();
    this.other?.clear();
  }

  /** The run has grown: load the list again, keep the selected row and the rows in view. */
  async grown() {
    this.cache.clear();
    const [choices] = await this.line.ask("start");
    this.filters.update(choices);
    const { list } = this;
    const before = list.at;
    await list.reset({ keep: true });
    const [index] = await this.line.ask("place", { traj_id: this.model.get("selected"), ...this.state() });
    list.at = index ?? -1;
    if (index !== null && before >= 0 && list.top > 0) list.goTo(list.top + index - before);
    list.draw();
  }

  /** A click in a figure has set the scope: bring the list into view and open its first row. */
  async reveal() {
    this.root.scrollIntoView({ block: "nearest" });
    await this.loading;
    await this.list.select(0);
  }

  reload() {
    this.loading = this.load();
    return this.loading;
  }

  async load() {
    this.filters.sync();
    const { label } = this.state().scope;
    fill(this.scopeLine, label ? [h("span", { class: "rl-chip" }, label), h("button", { type: "button", class: "rl-quiet", onclick: () => this.showAll() }, "Show all")] : null);
    this.say("");
    await this.list.reset();
  }

  sort(name) {
    const [column, down] = this.state().sort;
    this.set({ sort: column !== name ? [name, true] : down ? [name, false] : [] });
  }

  async open(traj_id) {
    if (!traj_id || traj_id === this.opening) return;
    this.opening = traj_id;
    try {
      const raw = this.rawButton.getAttribute("aria-pressed") === "true";
      const [opened, buffers] = await this.fetch(traj_id, raw);
      if (this.opening !== traj_id) return;
      this.opened = opened;
      this.row = opened.row;
      this.detail.dataset.traj = traj_id;
      this.drawHead();
      this.transcript.show(opened, floats(buffers), this.model.get("channel"));
      this.recolour();
      if (this.compared) await this.compare(this.nextSibling(this.row.traj_id, 1));
      if (this.findBox.value) this.find();
      if (this.list.row(this.list.at)?.traj_id !== traj_id) await this.mark(traj_id);
      this.remember();
      this.prefetch();
    } catch (error) {
      if (this.opening !== traj_id) return;
      this.say(error.message, true);
      this.restoreHighlight();
    } finally {
      if (this.opening === traj_id) this.opening = null;
    }
  }

  /** Highlight the row of the open trajectory again, after another one could not be opened. */
  restoreHighlight() {
    this.list.at = this.row ? this.list.indexOf(this.row.traj_id) ?? -1 : -1;
    this.list.draw();
  }

  /** Get a trajectory from the cache or the kernel. */
  fetch(traj_id, raw) {
    const key = `${raw} ${traj_id}`;
    let request = this.cache.get(key);
    if (!request) {
      const row = this.list.rowOf(traj_id);
      request = this.line.ask("open", { traj_id, raw, ...(row ? { group: [row.run_id, row.step, row.group_id] } : {}) });
      this.cache.set(key, request);
      request.catch(() => this.cache.delete(key));
      if (this.cache.size > 12) this.cache.delete(this.cache.keys().next().value);
    }
    return request;
  }

  /** Load the next row in advance, so that `j` shows it at once. */
  prefetch() {
    clearTimeout(this.later);
    this.later = setTimeout(() => {
      const next = this.list.row(this.list.at + 1);
      if (next && this.list.at >= 0 && !this.isLost) this.fetch(next.traj_id, false).catch(() => {});
    }, 250);
  }

  /** Highlight a trajectory in the list, and scroll to it if it is not in view. */
  async mark(traj_id) {
    let index = this.list.indexOf(traj_id);
    if (index === null) [index] = await this.line.ask("place", { traj_id, ...this.state() });
    this.list.at = index ?? -1;
    if (index !== null && (index < this.list.top || index > this.list.top + this.list.visible - 2)) this.list.goTo(index - Math.floor(this.list.visible / 3));
    this.list.draw();
  }

  drawHead() {
    const { row } = this;
    fill(this.head,
      h("span", { class: `rl-chip ${correct(row) ? "rl-ok" : "rl-bad"}` }, correct(row) ? "✓ Correct" : "✗ Wrong"),
      h("h2", { title: `${row.problem_id}` }, heading(this.opened.question ?? row.problem_id)), h("span", { class: "rl-where" }, `step ${show(row.step)} · sample ${show(row.sample)}${row.stage ? ` · ${row.stage}` : ""}`),
      h("span", { class: "rl-answer" }, answerLine(row)),
      h("span", { class: "rl-verdict" }, `${rocStatus(row, this.opened.siblings)}${typeof row.advantage === "number" ? `; advantage ${show(row.advantage)}` : ""}`));
    fill(this.group, strip(this.opened.siblings, row.traj_id, (traj_id) => this.set({ selected: traj_id })));
    this.note.value = row.note?.note ?? "";
    this.tags.value = (row.note?.tags ?? []).join(", ");
    this.saved = JSON.stringify([row.traj_id, this.note.value, row.note?.tags ?? []]);
    if (!this.groupBox.hidden) this.drawGroup();
  }

  drawGroup() {
    fill(this.groupBox, table(this.opened.siblings, this.row.traj_id, (traj_id) => this.set({ selected: traj_id }), (traj_id) => this.compare(traj_id)));
  }

  toggleGroup() {
    this.groupBox.hidden = !this.groupBox.hidden;
    this.groupButton.setAttribute("aria-pressed", String(!this.groupBox.hidden));
    if (!this.groupBox.hidden) this.drawGroup();
  }

  nextSibling(traj_id, by) {
    const all = this.opened?.siblings ?? [];
    const at = all.findIndex((row) => row.traj_id === traj_id);
    return all[(at + by + all.length) % all.length]?.traj_id;
  }

  async compareNext() {
    if (this.compared) this.endCompare();
    else await this.compare(this.nextSibling(this.row.traj_id, 1));
  }

  async compare(traj_id) {
    if (!traj_id || traj_id === this.row.traj_id) return this.endCompare();
    const [opened, buffers] = await this.fetch(traj_id, false);
    this.compared = traj_id;
    this.compareButton.setAttribute("aria-pressed", "true");
    const head = (row) => h("div", { class: "rl-pane-head" }, h("b", {}, `Sample ${show(row.sample)}`), h("span", { class: correct(row) ? "rl-right" : "rl-wrong" }, correct(row) ? "✓ correct" : "✗ wrong"), h("span", {}, rocStatus(row, opened.siblings)));
    fill(this.panes, h("div", { class: "rl-pane" }, head(this.row), this.transcript.element), h("div", { class: "rl-pane" }, head(opened.row), this.other.element));
    this.other.show(opened, floats(buffers), this.model.get("channel"));
    this.scrollTogether();
    const marked = this.transcript.differ(this.other) && this.other.differ(this.transcript);
    return this.say(marked ? "Words that only one rollout contains are underlined." : "The transcripts are too long to mark the differences.");
  }

  /** Scroll both transcripts to the same turn. */
  scrollTogether() {
    this.unlock?.();
    const pair = [this.transcript, this.other];
    let leader = null;
    const removers = pair.map((pane, i) => {
      const lead = () => { leader = pane; };
      const follow = () => { if (leader !== pair[1 - i]) pair[1 - i].position = pane.position; };
      for (const name of ["pointerenter", "wheel", "focusin"]) pane.turns.addEventListener(name, lead);
      pane.turns.addEventListener("scroll", follow);
      return () => {
        for (const name of ["pointerenter", "wheel", "focusin"]) pane.turns.removeEventListener(name, lead);
        pane.turns.removeEventListener("scroll", follow);
      };
    });
    leader = this.transcript;
    this.unlock = () => removers.forEach((remove) => remove());
  }

  endCompare() {
    this.unlock?.();
    this.compared = null;
    this.compareButton.setAttribute("aria-pressed", "false");
    this.other.clear();
    this.transcript.paintDiff.clear();
    fill(this.panes, this.transcript.element);
    this.say("");
  }

  async raw() {
    this.rawButton.setAttribute("aria-pressed", String(this.rawButton.getAttribute("aria-pressed") !== "true"));
    await this.open(this.row.traj_id);
  }

  recolour() {
    const channel = this.model.get("channel");
    for (const input of this.channels.querySelectorAll("input")) input.checked = input.value === channel;
    this.transcript.paint(channel);
    if (this.compared) this.other.paint(channel);
    this.remember();
  }

  find() {
    const count = this.transcript.find(this.findBox.value);
    this.found.textContent = this.findBox.value ? (count ? `1 of ${count}` : "none") : "";
  }

  findNext(by) {
    const at = this.transcript.nextMatch(by);
    if (at >= 0) this.found.textContent = `${at + 1} of ${this.transcript.matches.length}`;
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
      this.findBox.value = text;
      this.searched = text;
      this.say("");
      if (ids.length) this.set({ scope: { label: `${ids.length} with “${text}”${where}`, filter: { traj_id: ids }, search: true }, selected: ids[0] });
      else this.set({ scope: { label: `No transcript contains “${text}”${where}`, filter: { sql: "FALSE" }, search: true } });
      this.find();
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
    if (this.findBox.value === this.searched) {
      this.findBox.value = "";
      this.find();
    }
    this.searched = null;
    this.list.snippets = {};
    this.say("");
    if (this.state().scope.search) this.set({ scope: {} });
  }

  async saveNote() {
    const tags = this.tags.value.split(",").map((tag) => tag.trim()).filter(Boolean);
    const { traj_id } = this.row;
    const saved = JSON.stringify([traj_id, this.note.value.trim(), tags]);
    if (saved === this.saved) return; // Enter was pressed, then the field lost focus
    this.saved = saved;
    try {
      const [entry] = await this.line.ask("note", { traj_id, note: this.note.value, tags });
      this.row.note = entry;
      const listed = [...this.list.blocks.values()].flat().find((row) => row?.traj_id === traj_id);
      if (listed) listed.note = entry.note || entry.tags.length ? entry : null;
      this.list.draw();
      this.cache.clear();
      this.say("Note saved in the run's folder.");
    } catch (error) {
      this.say(error.message, true);
    }
  }

  async link() {
    const url = `${location.href.split("#")[0]}#rstar=${encodeURIComponent(this.row.traj_id)}`;
    try {
      await navigator.clipboard.writeText(url);
      this.say("Link copied: it opens this notebook at this trajectory.");
    } catch {
      this.say(url);
    }
  }

  async export(kind) {
    try {
      const [text] = await this.line.ask("export", { traj_id: this.row.traj_id, kind });
      const url = URL.createObjectURL(new Blob([text], { type: kind === "html" ? "text/html" : "text/markdown" }));
      h("a", { href: url, download: `${this.row.traj_id.replace(/[^\w.-]+/g, "_")}.${kind === "html" ? "html" : "md"}` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10000);
      this.say("Exported.");
    } catch (error) {
      this.say(error.message, true);
    }
  }

  full() {
    if (document.fullscreenElement) document.exitFullscreen();
    else this.root.requestFullscreen?.();
  }

  drag(event) {
    const box = this.main.getBoundingClientRect();
    const move = (at) => this.main.style.setProperty("--rl-split", `${Math.max(15, Math.min(75, ((at.clientX - box.left) / box.width) * 100))}%`);
    event.target.setPointerCapture(event.pointerId);
    event.target.addEventListener("pointermove", move);
    event.target.addEventListener("pointerup", () => event.target.removeEventListener("pointermove", move), { once: true });
  }

  key(event) {
    if (event.key === "Escape" && /INPUT|SELECT/.test(event.target.tagName)) return this.list?.element.focus();
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName) && event.target.type !== "radio" || !this.row) return undefined;
    const focus = (input) => { input.focus(); input.select(); };
    const action = {
      j: () => this.list.move(1), k: () => this.list.move(-1), "[": () => this.set({ selected: this.nextSibling(this.row.traj_id, -1) }),
      "]": () => this.set({ selected: this.nextSibling(this.row.traj_id, 1) }), c: () => this.compareNext(), g: () => this.toggleGroup(), r: () => this.raw(),
      "/": () => focus(this.findBox), s: () => focus(this.across), n: () => focus(this.note), f: () => this.full(), "?": () => this.helpBox.showModal(),
    }[event.key] ?? (channelNames[Number(event.key) - 1] && (() => this.set({ channel: channelNames[Number(event.key) - 1][0] })));
    if (!action) return undefined;
    event.preventDefault();
    event.stopPropagation();
    return action();
  }
}

const heading = (text) => (text.length > 90 ? `${text.slice(0, 90).trimEnd()}…` : text);

function floats(buffers) {
  const view = buffers?.[0];
  return view ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : null;
}

export default {
  initialize({ model }) {
    return greet(model);
  },
  render({ model, el }) {
    const view = new View(model, el);
    hideStatic(el);
    view.start().catch((error) => view.say(error.message, true));
    return () => view.close();
  },
};
