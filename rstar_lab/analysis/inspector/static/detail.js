import { h, fill, show, visible, verdict, verdictMark, rocStatus, committed, debounce } from "./dom.js";
import { channelNames } from "./tokens.js";
import { Transcript, answerLine } from "./transcript.js";
import { strip, table } from "./group.js";
import { Alternatives } from "./alternatives.js";
import { Fork } from "./fork.js";

/** The open trajectory: header, group, transcript, comparison with another rollout, note, link and export. */
export class Detail {
  /** scales: colour scales of the tokens. channel(): the selected colour. ask(op, values): request to the kernel.
   *  fetch(traj_id, raw): get a trajectory. select(traj_id): open another trajectory. reopen(): show the open one again.
   *  setChannel(name): select a colour. noted(traj_id, note): a note was saved. say(text, wrong): show a message. */
  constructor({ scales, channel, ask, fetch, select, reopen, setChannel, noted, say }) {
    this.told = ""; // the last message, which the next rollout removes
    this.say = (text, wrong) => say(this.told = text, wrong);
    Object.assign(this, { channel, ask, fetch, select, reopen, noted });
    this.transcript = new Transcript(scales, this.say);
    this.other = new Transcript(scales, this.say);
    this.name = `rl-${Math.random().toString(36).slice(2)}`;
    this.head = h("div", { class: "rl-dhead" }, h("p", { class: "rl-missing" }, "Loading …"));
    this.group = h("div", { class: "rl-groupline" });
    this.channels = h("div", { class: "rl-channels", role: "radiogroup", "aria-label": "Colour of the tokens" }, channelNames.map(([name, title]) =>
      h("label", {}, h("input", { type: "radio", name: `${this.name}-channel`, value: name, onchange: () => setChannel(name) }), h("span", {}, title))));
    // The same as a menu, on a narrow page
    this.channelMenu = h("select", { class: "rl-channel-menu", "aria-label": "Colour of the tokens", onchange: ({ target }) => setChannel(target.value) },
      channelNames.map(([name, title]) => h("option", { value: name }, title)));
    this.findBox = h("input", { type: "search", class: "rl-find", placeholder: "Find in transcript", "aria-label": "Find in transcript",
      oninput: debounce(120, () => this.find()), onkeydown: (event) => { if (event.key === "Enter") this.findNext(event.shiftKey ? -1 : 1); } });
    this.matchLine = h("span", { class: "rl-found", role: "status" });
    const button = (title, action, more = {}) => h("button", { type: "button", class: "rl-toggle", onclick: action, ...more }, title);
    this.rawButton = button("Raw", () => this.toggleRaw(), { "aria-pressed": "false", title: "Show the unchanged token stream" });
    this.alternatives = new Alternatives(ask, () => this.transcript.ribbon.focus());
    this.fork = new Fork(ask, (traj_id) => this.compare(traj_id).catch((error) => this.say(error.message, true)), () => this.transcript.ribbon.focus(), this.say);
    this.forkButton = button("Fork", () => this.showFork(), { title: "Sample continuations from the start of a turn" });
    const tokenButton = button("Alternatives", () => this.showAlternatives(), { title: "Most likely tokens at the selected token" });
    this.compareButton = button("Side by side", () => this.toggleCompare(), { "aria-pressed": "false" });
    this.groupButton = button("Group", () => this.toggleGroup(), { "aria-pressed": "false" });
    const tools = h("div", { class: "rl-tools" }, this.channels, this.channelMenu, h("span", { class: "rl-push" }), h("span", { class: "rl-actions" }, tokenButton, this.forkButton, this.rawButton, this.groupButton, this.compareButton));
    const quiet = (title, action, more = {}) => h("button", { type: "button", class: "rl-quiet", onclick: action, ...more }, title);
    this.noteButton = quiet("Note", () => (this.noteBox.hidden ? this.openNote() : this.showNote(false)), { "aria-expanded": "false", title: "Note and tags of this rollout" });
    const actions = h("div", { class: "rl-actions" }, this.noteButton, h("span", { class: "rl-push" }), quiet("Copy link", () => this.copyLink()),
      quiet("HTML", () => this.export("html"), { title: "Save as a self-contained HTML page" }), quiet("Markdown", () => this.export("markdown"), { title: "Save as Markdown" }));
    this.note = h("input", { type: "text", class: "rl-note-text", placeholder: "Note", "aria-label": "Note", ...committed(() => this.saveNote()) });
    this.tags = h("input", { type: "text", class: "rl-note-tags", placeholder: "tags, with, commas", "aria-label": "Tags", ...committed(() => this.saveNote()) });
    this.noteBox = h("div", { class: "rl-notes", hidden: true }, this.note, this.tags);
    this.panes = h("div", { class: "rl-panes" }, this.transcript.element);
    this.groupBox = h("div", { class: "rl-groupbox", hidden: true });
    const row = h("div", { class: "rl-siblings" }, this.group, this.findBox, this.matchLine);
    this.element = h("section", { class: "rl-detail", "aria-label": "Selected trajectory" },
      this.head, row, tools, this.groupBox, this.alternatives.element, this.fork.element, this.panes, this.noteBox, h("div", { class: "rl-foot" }, actions));
    this.element.inert = true; // until a rollout is open
  }

  /** Whether the unchanged token stream is shown instead of segments. */
  get raw() {
    return this.rawButton.getAttribute("aria-pressed") === "true";
  }

  /** Show an opened trajectory. buffers: its token values. */
  async show(opened, buffers) {
    if (this.row?.traj_id !== opened.row.traj_id) [this.alternatives, this.fork].forEach((panel) => panel.close());
    this.opened = opened;
    this.row = opened.row;
    this.element.inert = false;
    this.element.dataset.traj = this.row.traj_id;
    this.drawHead();
    this.transcript.show(opened, floats(buffers), this.channel());
    this.recolour();
    if (this.compared) await this.compare(this.nextSibling(1));
    if (this.findBox.value) this.find();
  }

  drawHead() {
    const { row } = this;
    const selection = [rocStatus(row, this.opened.siblings), typeof row.advantage === "number" ? `advantage ${show(row.advantage)}` : ""].filter(Boolean).join("; ");
    const measured = row.metrics ? Object.entries(row.metrics).map(([name, value]) => `${name} ${show(value)}`).join(" · ") : "";
    fill(this.head, h("div", { class: "rl-line" },
      h("span", { class: `rl-chip rl-${verdict(row).state}` }, `${verdict(row).mark} ${capital(verdict(row).text)}`),
      h("h2", { title: visible(`${row.problem_id}\n${excerpt(this.opened.question ?? "")}`) }, heading(visible(this.opened.question ?? row.problem_id))), h("span", { class: "rl-where" }, `step ${show(row.step)} · sample ${show(row.sample)}${row.stage ? ` · ${row.stage}` : ""}`)),
    h("div", { class: "rl-line" }, h("span", { class: "rl-answer" }, answerLine(row)),
      h("span", { class: "rl-selection", title: selection }, selection),
      row.environment ? h("span", { class: "rl-environment", title: row.environment }, `environment ${row.environment}`) : null,
      measured ? h("span", { class: "rl-metrics", title: measured }, measured) : null));
    this.forkButton.textContent = this.fork.made.has(row.traj_id) ? "Fork ●" : "Fork";
    fill(this.group, strip(this.opened.siblings, row.traj_id, this.select));
    const [box, cell] = [".rl-strip", "[aria-pressed=true]"].map((name) => this.group.querySelector(name));
    if (cell) box.scrollLeft = cell.offsetLeft - box.clientWidth / 2; // the selected rollout is in view
    this.note.value = row.note?.note ?? "";
    this.tags.value = (row.note?.tags ?? []).join(", ");
    this.saved = JSON.stringify([row.traj_id, this.note.value, row.note?.tags ?? []]);
    this.showNote(Boolean(this.note.value || this.tags.value));
    if (!this.groupBox.hidden) this.drawGroup();
  }

  /** Show or hide the fields of the note. They are hidden until the rollout has a note or one is to be written. */
  showNote(open) {
    this.noteBox.hidden = !open;
    this.noteButton.setAttribute("aria-expanded", String(open));
  }

  openNote() {
    this.showNote(true);
    this.note.focus();
    this.note.select();
  }

  drawGroup() {
    fill(this.groupBox, table(this.opened.siblings, this.row.traj_id, this.select, (traj_id) => this.compare(traj_id)));
  }

  toggleGroup() {
    this.groupBox.hidden = !this.groupBox.hidden;
    this.groupButton.setAttribute("aria-pressed", String(!this.groupBox.hidden));
    if (!this.groupBox.hidden) this.drawGroup();
  }

  /** Show the most likely tokens at the token that was selected last. */
  showAlternatives() {
    if (!this.opened.tokens) return this.say("The run did not store the tokens of this rollout: train with --set rl.token_arrays=all.");
    this.fork.close();
    return this.alternatives.open(this.row.traj_id, this.transcript.token);
  }

  /** Show the panel that samples continuations of the rollout. */
  showFork() {
    if (!this.opened.tokens) return this.say("The run did not store the tokens of this rollout: train with --set rl.token_arrays=all.");
    this.alternatives.close();
    return this.fork.open(this.row);
  }

  /** traj_id of the rollout of the group that is `by` places after the open one. */
  nextSibling(by) {
    const all = this.opened?.siblings ?? [];
    const at = all.findIndex((row) => row.traj_id === this.row.traj_id);
    return all[(at + by + all.length) % all.length]?.traj_id;
  }

  async toggleCompare() {
    if (this.compared) this.endCompare();
    else await this.compare(this.nextSibling(1)).catch((error) => this.say(error.message, true));
  }

  async compare(traj_id) {
    if (!traj_id || traj_id === this.row.traj_id) return this.endCompare();
    this.compared = traj_id;
    const [opened, buffers] = await this.fetch(traj_id, false).catch((error) => {
      if (this.compared === traj_id) this.endCompare();
      throw error;
    });
    if (this.compared !== traj_id) return undefined; // ended, or another one was chosen, during the request
    this.compareButton.setAttribute("aria-pressed", "true");
    const head = (row) => h("div", { class: "rl-pane-head" }, h("b", {}, `${row.stage === "fork" ? "Continuation" : "Sample"} ${show(row.sample)}`),
      verdictMark(row, true), h("span", {}, rocStatus(row, opened.siblings)));
    fill(this.panes, h("div", { class: "rl-pane" }, head(this.row), this.transcript.element), h("div", { class: "rl-pane" }, head(opened.row), this.other.element));
    this.other.show(opened, floats(buffers), this.channel());
    this.scrollTogether();
    this.fork.mark(traj_id);
    if (opened.row.stage === "fork") for (const pane of [this.transcript, this.other]) pane.position = { turn: opened.row.step, fraction: 0 };
    if (!this.fork.element.hidden) this.element.scrollTop = this.element.scrollHeight; // the transcripts are below the panel
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
    this.fork.mark(null);
    this.compareButton.setAttribute("aria-pressed", "false");
    this.other.clear();
    this.transcript.paintDiff.clear();
    fill(this.panes, this.transcript.element);
    this.say("");
  }

  async toggleRaw() {
    this.rawButton.setAttribute("aria-pressed", String(!this.raw));
    await this.reopen();
  }

  /** Colour the tokens by the selected channel. */
  recolour() {
    const channel = this.channel();
    for (const input of this.channels.querySelectorAll("input")) input.checked = input.value === channel;
    this.channelMenu.value = channel;
    this.transcript.paint(channel);
    if (this.compared) this.other.paint(channel);
  }

  find() {
    const count = this.transcript.find(this.findBox.value);
    this.matchLine.textContent = this.findBox.value ? (count ? `1 of ${count}` : "none") : "";
  }

  findNext(by) {
    const at = this.transcript.nextMatch(by);
    if (at >= 0) this.matchLine.textContent = `${at + 1} of ${this.transcript.matches.length}`;
  }

  async saveNote() {
    const tags = this.tags.value.split(",").map((tag) => tag.trim()).filter(Boolean);
    const { traj_id } = this.row;
    const saved = JSON.stringify([traj_id, this.note.value.trim(), tags]);
    if (saved === this.saved) return; // Enter was pressed, then the field lost focus
    this.saved = saved;
    try {
      const [entry] = await this.ask("note", { traj_id, note: this.note.value, tags });
      this.row.note = entry;
      this.noted(traj_id, entry.note || entry.tags.length ? entry : null);
      this.say("Note saved in the run's folder.");
    } catch (error) {
      this.say(error.message, true);
    }
  }

  async copyLink() {
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
      const [text] = await this.ask("export", { traj_id: this.row.traj_id, kind });
      const url = URL.createObjectURL(new Blob([text], { type: kind === "html" ? "text/html" : "text/markdown" }));
      h("a", { href: url, download: `${this.row.traj_id.replace(/[^\w.-]+/g, "_")}.${kind === "html" ? "html" : "md"}` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10000);
      this.say("Exported.");
    } catch (error) {
      this.say(error.message, true);
    }
  }

  close() {
    this.transcript.clear();
    this.other.clear();
  }
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);
const heading = (text) => (text.length > 160 ? `${text.slice(0, 160).trimEnd()}…` : text);
const excerpt = (text) => (text.length > 600 ? `${text.slice(0, 600).trimEnd()}…` : text);

function floats(buffers) {
  const view = buffers?.[0];
  return view ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : null;
}
