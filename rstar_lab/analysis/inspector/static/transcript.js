import { h, fill, show, verdict, outcomeClass } from "./dom.js";
import { pythonSpans } from "./python.js";
import { Paint, Values, legends } from "./tokens.js";

// Characters of a segment that are drawn at first. Tool output can be very long, and a long problem would fill the first screen.
const drawnAtFirst = ({ kind, turn, text }) => (kind === "user" && !turn && text.length > 1000 ? 600 : kind === "tool" || kind === "stream" ? 20_000 : 400_000);
const bins = 240;

/** Shows one transcript: a text node per segment, colours as highlights, and a ribbon of all tokens. */
export class Transcript {
  constructor(scales, say) {
    this.scales = scales;
    this.say = say;
    this.paintTokens = new Paint();
    this.paintSyntax = new Paint();
    this.paintFind = new Paint();
    this.paintCurrent = new Paint();
    this.paintDiff = new Paint();
    this.matches = [];
    this.tip = h("div", { class: "rl-tip", role: "status", hidden: true });
    this.legend = h("div", { class: "rl-legend" });
    this.ribbon = h("div", {
      class: "rl-ribbon", role: "slider", tabindex: "0", "aria-label": "Token", "aria-valuemin": 0,
      onkeydown: (event) => this.walk(event), onpointermove: (event) => this.hoverRibbon(event), onpointerleave: () => this.hideTip(),
      onclick: (event) => this.jump(this.tokenAt(event)), onblur: () => this.hideTip(),
    });
    this.turns = h("div", {
      class: "rl-turns", tabindex: "0", role: "region", "aria-label": "Transcript",
      onclick: (event) => this.clickText(event), onpointermove: (event) => this.hoverText(event), onpointerleave: () => this.hideTip(), onscroll: () => this.hideTip(),
    });
    this.element = h("div", { class: "rl-transcript" }, h("div", { class: "rl-band" }, this.legend, this.ribbon), this.turns, this.tip);
    this.parts = [];
  }

  show(opened, buffer, channel) {
    this.clear();
    this.values = new Values(buffer, opened.tokens, opened.row.advantage, this.scales);
    this.kept = opened.row.stage === "fork" ? null : opened.row.kept;
    this.omitted = opened.omitted;
    this.token = 0;
    this.atFork = false;
    this.error = null;
    this.parts = opened.segments.map((segment, index) => this.segment(segment, index));
    fill(this.turns, opened.missing ? h("p", { class: "rl-missing" }, opened.missing) : null, this.parts.map((part) => part.element));
    this.turns.scrollTop = 0;
    for (const part of this.parts) if (part.kind === "code") for (const [kind, begin, end] of pythonSpans(part.node.data)) this.paintSyntax.add(`py-${kind}`, part.node, begin, end);
    this.paint(channel);
  }

  segment(segment, index) {
    const { kind, text, turn, tool, outcome, starts, first, malformed } = segment;
    const drawn = drawnAtFirst(segment);
    const node = document.createTextNode(text.slice(0, drawn));
    const pre = h("pre", { class: "rl-text", dir: "ltr", "data-part": index }, node);
    const part = { kind, text, node, starts, first, pre, turn, outcome };
    const head = [
      turn ? h("span", { class: "rl-turn" }, `Turn ${turn}`) : null,
      h("span", { class: "rl-kind" }, labels[malformed ? "malformed" : kind] ?? labels.other),
      tool ? h("span", { class: "rl-tool" }, tool) : null,
      outcome ? h("span", { class: `rl-badge rl-${outcomeClass(outcome)}` }, outcome) : null,
      kind === "code" ? h("button", { class: "rl-quiet", type: "button", onclick: () => this.copy(text) }, "Copy code") : null,
    ];
    const more =
      text.length > drawn
        ? h("button", { class: "rl-quiet", type: "button", onclick: () => this.drawAll(part) },
            `Show all ${text.length.toLocaleString("en")} characters`)
        : null;
    part.more = more;
    part.element =
      kind === "system"
        ? h("details", { class: `rl-seg rl-${kind}` }, h("summary", {}, head), pre, more)
        : h("section", { class: `rl-seg rl-${kind}`, "data-outcome": outcomeClass(outcome) }, h("h3", {}, head), pre, more);
    return part;
  }

  drawAll(part) {
    part.node.data = part.text;
    part.more?.remove();
    this.paint(this.wanted);
  }

  async copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      this.say("Code copied.");
    } catch {
      this.say("The browser did not allow copying.");
    }
  }

  /** Colour the tokens by a channel, or by the log-probability if the channel has no values. Adjacent tokens of one
   *  colour are one range. */
  paint(wanted) {
    this.paintTokens.clear();
    const { values } = this;
    this.channel = wanted;
    if (!values) return;
    const channel = values.has(wanted) || !values.has("log_prob") ? wanted : "log_prob";
    this.wanted = wanted;
    this.channel = channel;
    const off = !values.has(channel);
    for (const { starts, first, node } of off ? [] : this.parts) {
      let begin = 0;
      let level = "";
      const end = node.data.length;
      for (let i = 0; i < starts.length && starts[i] < end; i += 1) {
        const next = values.level(channel, first + i);
        if (next === level) continue;
        if (level) this.paintTokens.add(level, node, begin, starts[i], 1);
        begin = starts[i];
        level = next;
      }
      if (level && starts.length) this.paintTokens.add(level, node, begin, end, 1);
    }
    this.drawRibbon(off);
    this.drawLegend(off);
  }

  drawRibbon(off) {
    const { values, channel } = this;
    this.ribbon.hidden = !values.count || off;
    if (this.ribbon.hidden) return;
    this.ribbon.setAttribute("aria-valuemax", values.count - 1);
    this.ribbon.setAttribute("aria-valuenow", this.token);
    this.ribbon.setAttribute("aria-valuetext", `token ${this.token} of ${values.count}`);
    const count = Math.min(bins, values.count);
    const cells = [];
    for (let bin = 0; bin < count; bin += 1) {
      const from = Math.floor((bin * values.count) / count);
      const to = Math.max(from + 1, Math.floor(((bin + 1) * values.count) / count));
      let top = "";
      for (let token = from; token < to; token += 1) {
        const level = values.level(channel, token);
        if (level.slice(-1) > top.slice(-1) || !top) top = level;
      }
      const tool = !values.mask[from] ? " rl-env" : "";
      const last = cells.at(-1);
      const name = `${top ? `rl-${top}` : ""}${tool}`;
      if (last?.name === name) last.size += to - from;
      else cells.push({ name, size: to - from });
    }
    fill(this.ribbon, cells.map(({ name, size }) => {
      const cell = h("i", { class: name });
      cell.style.flexGrow = size;
      return cell;
    }));
  }

  drawLegend(off) {
    const { channel, values } = this;
    const known = legends[channel];
    if (!values.count) return fill(this.legend, h("span", {}, this.omitted ? "Token values are left out of this page, because the response is long." : "The run did not store the tokens of this rollout."));
    if (!known) return fill(this.legend);
    const dropped = this.kept === false && this.wanted !== "log_prob";
    const reason = dropped ? " (RoC dropped it, so the trainer did not compute it)" : "";
    if (off) return fill(this.legend, h("span", {}, `${known[2]}: not recorded for this rollout${reason}.`));
    const missing = `${legends[this.wanted][2].split(/,| of /)[0]} is not recorded`;
    const instead = channel === this.wanted ? null : h("span", { class: "rl-instead", title: `${missing} for this rollout${reason}.` }, `${missing}${dropped ? " (RoC dropped it)" : ""}.`);
    const [low, high, title, up, down] = known;
    const edges = this.scales[channel];
    const label = (word, sign, last) => (edges ? `${word} ${sign}${show(last)}` : word);
    const levels = channel === "mask" ? ["m0", "m1"] : [...(down ? this.scales[channel].map((_, i) => `${down}${i + 1}`).reverse() : []), "", ...this.scales[channel].map((_, i) => `${up}${i + 1}`)];
    return fill(this.legend, instead, h("span", { class: "rl-legend-title" }, title), h("span", { class: "rl-scale" }, h("span", {}, down ? label(low, "≤ −", edges?.at(-1)) : label(low, "< ", edges?.[0])),
      h("span", { class: "rl-swatches", "aria-hidden": "true" }, levels.map((level) => h("i", { class: level ? `rl-${level}` : "" }))), h("span", {}, label(high, "≥ ", edges?.at(-1)))));
  }

  partOf(token) {
    return this.parts.find(({ starts, first }) => starts.length && token >= first && token < first + starts.length);
  }

  place(token) {
    const part = this.partOf(token);
    if (!part) return null;
    const begin = part.starts[token - part.first];
    const end = part.starts[token - part.first + 1] ?? part.text.length;
    return { part, begin, end: Math.max(end, Math.min(begin + 1, part.text.length)) };
  }

  /** The response token under the pointer, or null. */
  tokenUnder(event) {
    const node = document.caretPositionFromPoint?.(event.clientX, event.clientY);
    const found = node ? [node.offsetNode, node.offset] : (() => { const r = document.caretRangeFromPoint?.(event.clientX, event.clientY); return r ? [r.startContainer, r.startOffset] : []; })();
    const part = this.parts.find((candidate) => candidate.node === found[0]);
    if (!part?.starts.length) return null;
    let offset = found[1];
    const range = document.createRange();
    if (offset > 0) {
      // The caret is at the nearer edge of a character: use the character whose box contains the pointer.
      range.setStart(part.node, offset - 1);
      range.setEnd(part.node, offset);
      const box = range.getBoundingClientRect();
      if (event.clientX < box.right && event.clientX >= box.left && event.clientY >= box.top && event.clientY <= box.bottom) offset -= 1;
    }
    range.setStart(part.node, Math.min(offset, part.node.data.length - 1));
    range.setEnd(part.node, Math.min(offset + 1, part.node.data.length));
    const box = range.getBoundingClientRect();
    if (Math.abs(event.clientX - (box.left + box.right) / 2) > box.width + 12) return null; // not over text
    let low = 0;
    let high = part.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (part.starts[middle] <= offset) low = middle;
      else high = middle - 1;
    }
    return part.first + low;
  }

  hoverText(event) {
    const token = this.tokenUnder(event);
    if (token === null) return this.hideTip();
    return this.showTip(token, event.clientX, event.clientY);
  }

  /** Select the token under the pointer, unless text was selected. */
  clickText(event) {
    const token = getSelection().isCollapsed ? this.tokenUnder(event) : null;
    if (token !== null) this.mark(token);
  }

  tokenAt(event) {
    const box = this.ribbon.getBoundingClientRect();
    return Math.max(0, Math.min(this.values.count - 1, Math.floor(((event.clientX - box.left) / box.width) * this.values.count)));
  }

  hoverRibbon(event) {
    this.showTip(this.tokenAt(event), event.clientX, event.clientY);
  }

  walk(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50, Home: -1e9, End: 1e9 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    this.token = Math.max(0, Math.min(this.values.count - 1, this.token + by));
    this.jump(this.token);
    const box = this.ribbon.getBoundingClientRect();
    this.showTip(this.token, box.left + (this.token / this.values.count) * box.width, box.bottom);
    this.ribbon.setAttribute("aria-valuenow", this.token);
    this.ribbon.setAttribute("aria-valuetext", this.tip.textContent);
  }

  jump(token) {
    const found = this.mark(token);
    if (found) this.scrollTo(found.part, found.begin, found.end);
  }

  /** Select a token and return its place. */
  mark(token) {
    this.token = token;
    const found = this.place(token);
    if (!found) return null;
    this.paintCurrent.clear();
    this.paintCurrent.add("here", found.part.node, found.begin, Math.min(found.end, found.part.node.data.length), 4);
    return found;
  }

  scrollTo(part, begin, end) {
    if (part.element.tagName === "DETAILS") part.element.open = true;
    if (begin >= part.node.data.length) this.drawAll(part);
    const range = document.createRange();
    range.setStart(part.node, begin);
    range.setEnd(part.node, Math.min(end, part.node.data.length));
    const box = range.getBoundingClientRect();
    const pane = this.turns.getBoundingClientRect();
    if (box.top < pane.top + 24 || box.bottom > pane.bottom - 24) this.turns.scrollTop += box.top - pane.top - pane.height / 3;
  }

  showTip(token, x, y) {
    const found = this.place(token);
    const text = found ? found.part.text.slice(found.begin, found.end) : "";
    fill(this.tip, text ? h("code", {}, text.length > 40 ? `${text.slice(0, 40)}…` : text.replaceAll("\n", "⏎").replace(/^ +$/, (blank) => "␣".repeat(blank.length))) : null,
      h("dl", {}, this.values.rows(token).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
    this.tip.hidden = false;
    const pane = this.element.getBoundingClientRect();
    const [width, height] = [this.tip.offsetWidth, this.tip.offsetHeight];
    this.tip.style.left = `${Math.max(0, Math.min(x - pane.left + 12, pane.width - width - 8))}px`;
    this.tip.style.top = `${y - pane.top + 18 + height > pane.height ? Math.max(0, y - pane.top - height - 12) : y - pane.top + 18}px`;
  }

  hideTip() {
    this.tip.hidden = true;
  }

  /** Scroll to the next failed tool call, or to the previous one (by: -1). Returns a message. */
  nextError(by) {
    const failed = this.parts.filter(({ kind, outcome }) => kind === "tool" && outcome && outcomeClass(outcome) !== "ok");
    if (!failed.length) return "No tool call of this rollout failed.";
    const at = cycle(failed.map((part) => this.parts.indexOf(part)), this.parts.indexOf(this.error), by);
    this.error = failed[at];
    this.paintCurrent.clear();
    this.paintCurrent.add("here", this.error.node, 0, this.error.node.data.length, 4);
    this.turns.scrollTop += this.error.element.getBoundingClientRect().top - this.turns.getBoundingClientRect().top - 8;
    return `Failed call ${at + 1} of ${failed.length}: ${this.error.outcome}.`;
  }

  /** Jump to the next forking token, or to the previous one (by: -1). Returns a message. Forking tokens are the fifth of the
   *  model's tokens with the highest entropy (Wang et al. 2025, arXiv:2506.01939). */
  nextFork(by) {
    if (!this.values?.has("entropy")) return "Entropy is not recorded for this rollout.";
    const { entropy, mask } = this.values;
    const known = [...entropy.keys()].filter((token) => mask[token] && entropy[token] > 0);
    const edge = known.map((token) => entropy[token]).sort((a, b) => b - a)[Math.ceil(known.length / 5) - 1];
    const forks = known.filter((token) => entropy[token] >= edge);
    if (!forks.length) return "No token of this rollout has entropy above 0.";
    const at = cycle(forks, this.atFork ? this.token : -1, by);
    this.atFork = true;
    this.jump(forks[at]);
    return `Forking token ${at + 1} of ${forks.length}: token ${this.token}, entropy ${show(entropy[this.token])} nats.`;
  }

  /** Mark all matches of a text and return their number. */
  find(text) {
    this.paintFind.clear();
    this.paintCurrent.clear();
    this.matches = [];
    this.match = -1;
    if (!text) return 0;
    const exact = text !== text.toLowerCase();
    for (const part of this.parts) {
      const inside = exact ? part.text : part.text.toLowerCase();
      if (inside.length !== part.text.length) continue;
      for (let at = inside.indexOf(text); at >= 0 && this.matches.length < 5000; at = inside.indexOf(text, at + text.length)) this.matches.push([part, at, at + text.length]);
    }
    for (const [part, begin, end] of this.matches) this.paintFind.add("find", part.node, begin, Math.min(end, part.node.data.length), 3);
    if (this.matches.length) this.nextMatch(1);
    return this.matches.length;
  }

  nextMatch(by) {
    if (!this.matches.length) return -1;
    this.match = (this.match + by + this.matches.length) % this.matches.length;
    const [part, begin, end] = this.matches[this.match];
    this.scrollTo(part, begin, end);
    this.paintCurrent.clear();
    this.paintCurrent.add("here", part.node, begin, end, 4);
    return this.match;
  }

  /** Underline the words that are not in the longest common subsequence with the other transcript. */
  differ(other) {
    this.paintDiff.clear();
    const words = (transcript) => transcript.parts.filter(({ kind }) => !["system", "user"].includes(kind))
      .flatMap((part) => [...part.node.data.matchAll(/\S+/g)].map((found) => ({ part, word: found[0], at: found.index })));
    const [mine, theirs] = [words(this), words(other)];
    if (mine.length * theirs.length > 9e6) return false;
    const width = theirs.length + 1;
    const table = new Uint16Array((mine.length + 1) * width);
    for (let i = mine.length - 1; i >= 0; i -= 1)
      for (let j = theirs.length - 1; j >= 0; j -= 1)
        table[i * width + j] = mine[i].word === theirs[j].word ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    for (let i = 0, j = 0; i < mine.length; ) {
      if (j < theirs.length && mine[i].word === theirs[j].word) [i, j] = [i + 1, j + 1];
      else if (j < theirs.length && table[i * width + j + 1] >= table[(i + 1) * width + j]) j += 1;
      else {
        const { part, at, word } = mine[i];
        this.paintDiff.add("diff", part.node, at, at + word.length, 2);
        i += 1;
      }
    }
    return true;
  }

  /** The scroll position as a turn and the fraction of the turn that is above the view. */
  get position() {
    const starts = this.turnStarts();
    const top = this.turns.scrollTop;
    let turn = 0;
    while (turn + 1 < starts.length - 1 && starts[turn + 1] <= top) turn += 1;
    return { turn, fraction: (top - starts[turn]) / Math.max(1, starts[turn + 1] - starts[turn]) };
  }

  set position({ turn, fraction }) {
    const starts = this.turnStarts();
    const at = Math.min(turn, starts.length - 2);
    this.turns.scrollTop = turn > at ? starts.at(-1) : starts[at] + fraction * (starts[at + 1] - starts[at]);
  }

  turnStarts() {
    const starts = [0];
    let turn = 0;
    for (const part of this.parts) if (part.turn > turn) {
      turn = part.turn;
      starts.push(part.element.offsetTop - this.turns.offsetTop);
    }
    return [...starts, this.turns.scrollHeight];
  }

  clear() {
    for (const paint of [this.paintTokens, this.paintSyntax, this.paintFind, this.paintCurrent, this.paintDiff]) paint.clear();
    this.hideTip();
  }
}

/** Index of the first of the ascending places after `at` (by: 1) or of the last before it (by: -1), around the ends. */
function cycle(places, at, by) {
  if (by > 0) return Math.max(0, places.findIndex((place) => place > at));
  const before = places.findLastIndex((place) => place < at);
  return before < 0 ? places.length - 1 : before;
}

export const answerLine = (row) => [
  h("span", {}, "Answer"), h("b", { class: { ok: "rl-right", bad: "rl-wrong" }[verdict(row).state] }, show(row.answer)),
  h("span", {}, "Truth"), h("b", {}, show(row.truth)),
];
