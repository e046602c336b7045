import { h, fill, show, visible, verdict, rocStatus } from "./dom.js";
import { channelNames } from "./tokens.js";
import { Transcript, answerLine } from "./transcript.js";
import { table } from "./group.js";

const facts = [
  ["Run", "run_id"], ["Problem", "problem_id"], ["Stage", "stage"], ["Step", "step"], ["Policy", "policy_version"], ["Reward", "reward"],
  ["Advantage", "advantage"], ["Turns", "turns"], ["Tool calls", "calls"], ["Tool errors", "errors"], ["Tokens", "response_tokens"],
  ["Model tokens", "model_tokens"], ["Entropy", "entropy"], ["Stopped by", "stop_reason"],
];

/** A trajectory in a saved page: what is known of it, its transcript and its group. */
export class Article {
  constructor(scales) {
    this.said = h("p", { role: "status" });
    this.transcript = new Transcript(scales, (text) => fill(this.said, text));
    this.channel = "entropy";
    this.channels = h("div", { class: "rl-channels", role: "radiogroup", "aria-label": "Colour of the tokens" }, channelNames.map(([name, title]) =>
      h("label", {}, h("input", { type: "radio", name: "rl-channel", value: name, checked: name === this.channel, onchange: () => this.colour(name) }), h("span", {}, title))));
    this.head = h("header", { class: "rl-head" });
    this.group = h("div");
    this.element = h("article", { class: "rl rl-page" }, this.head, this.channels, this.transcript.element, this.said, this.group);
  }

  /** Show a trajectory: the values of `trajectory_data` in export.py. */
  show(opened) {
    const { row, siblings, note, title } = opened;
    const { state, mark, text } = verdict(row);
    const known = [...facts.map(([name, column]) => [name, row[column]]), ...(row.environment ? [["Environment", row.environment]] : []), ...Object.entries(row.metrics ?? {})];
    const chip = (word, more = "") => h("span", { class: `rl-chip${more}` }, word);
    const status = rocStatus(row, siblings);
    fill(this.head, h("h2", {}, visible(title)),
      h("p", { class: "rl-chips" }, chip(`${mark} ${text[0].toUpperCase()}${text.slice(1)}`, ` rl-${state}`), status ? chip(status) : null, (note.tags ?? []).map((tag) => chip(visible(tag)))),
      h("p", { class: "rl-answer" }, answerLine(row)), note.note ? h("p", { class: "rl-note" }, visible(note.note)) : null,
      h("dl", { class: "rl-facts" }, known.map(([name, value]) => h("div", {}, h("dt", {}, visible(name)), h("dd", {}, show(value))))),
      h("p", { class: "rl-id" }, visible(row.traj_id)));
    this.channels.hidden = !opened.tokens;
    this.transcript.show(opened, Uint8Array.from(atob(opened.values), (char) => char.charCodeAt(0)).buffer, this.channel);
    fill(this.said);
    fill(this.group, siblings.length > 1 ? [h("h3", {}, "Rollouts of the same group"), table(siblings, row.traj_id)] : null);
  }

  colour(name) {
    this.channel = name;
    this.transcript.paint(name);
  }
}
