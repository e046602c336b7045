import { show } from "./dom.js";

/** Token values and their colour classes. Colours are ranges in the CSS highlight registry, not elements. */

export const channelNames = [
  ["entropy", "Entropy"],
  ["log_prob", "Log-prob"],
  ["mismatch", "Mismatch"],
  ["mask", "Mask"],
  ["advantage", "Advantage"],
  ["none", "Off"],
];

/** Channel: label of the low end, of the high end, title, colour class of positive values, of negative values. */
export const legends = {
  entropy: ["low", "high", "Entropy of the next-token distribution, nats", "e", ""],
  log_prob: ["likely", "unlikely", "−log p (engine), nats", "l", ""],
  mismatch: ["trainer higher", "engine higher", "Log-probability, engine minus trainer, nats", "dp", "dn"],
  mask: ["tool, template", "model (trained on)", "Loss mask", "m", ""],
  advantage: ["negative", "positive", "Advantage of the trajectory, on its trained tokens", "ap", "an"],
};

export class Values {
  /** values: Float32Array of shape (5, count): entropy, engine, trainer, mask, id. */
  constructor(buffer, count, advantage, scales) {
    this.count = count;
    this.scales = scales;
    this.advantage = advantage;
    const all = new Float32Array(buffer ?? 0);
    [this.entropy, this.engine, this.trainer, this.mask, this.ids] = [0, 1, 2, 3, 4].map((row) => all.subarray(row * count, (row + 1) * count));
  }

  /** Whether the rollout has values of a channel. */
  has(channel) {
    if (channel === "none") return true;
    if (channel === "advantage") return this.count > 0 && typeof this.advantage === "number";
    if (channel === "mask") return this.count > 0;
    const finite = (column) => column.some((value) => !Number.isNaN(value));
    if (channel === "mismatch") return finite(this.trainer) && finite(this.engine);
    return finite(channel === "entropy" ? this.entropy : this.engine);
  }

  /** Colour class of one token under a channel, "" for none. */
  level(channel, token) {
    if (channel === "none") return "";
    if (channel === "mask") return this.mask[token] ? "m1" : "m0";
    if (!this.mask[token]) return "";
    const rank = (name, value) => {
      let level = 0;
      for (const edge of this.scales[name]) if (value >= edge) level += 1;
      return level;
    };
    if (channel === "entropy" || channel === "log_prob") {
      const value = channel === "entropy" ? this.entropy[token] : -this.engine[token];
      const level = Number.isNaN(value) ? 0 : rank(channel, value);
      return level ? (channel === "entropy" ? "e" : "l") + level : "";
    }
    const value = channel === "advantage" ? this.advantage : this.engine[token] - this.trainer[token];
    const level = typeof value !== "number" || Number.isNaN(value) ? 0 : rank(channel, Math.abs(value));
    return level ? (channel === "advantage" ? "a" : "d") + (value > 0 ? "p" : "n") + level : "";
  }

  rows(token) {
    return [
      ["token", `${token}, id ${this.ids[token]}`],
      ["written by", this.mask[token] ? "model" : "tool or template"],
      ["entropy", show(this.entropy[token])],
      ["log-prob engine", show(this.engine[token])],
      ["log-prob trainer", show(this.trainer[token])],
      ["difference", show(this.engine[token] - this.trainer[token])],
      ["advantage", this.mask[token] ? show(this.advantage) : "–"],
    ];
  }
}

/** The coloured ranges of one view. All views of a page share the registry; each removes only its own ranges. */
export class Paint {
  constructor() {
    this.own = new Map();
  }

  add(name, node, begin, end, priority = 0) {
    if (begin >= end || !globalThis.CSS?.highlights) return null;
    const full = `rl-${name}`;
    let highlight = CSS.highlights.get(full);
    if (!highlight) {
      highlight = new Highlight();
      highlight.priority = priority;
      CSS.highlights.set(full, highlight);
    }
    const range = new StaticRange({ startContainer: node, startOffset: begin, endContainer: node, endOffset: end });
    highlight.add(range);
    if (!this.own.has(full)) this.own.set(full, []);
    this.own.get(full).push(range);
    return range;
  }

  clear() {
    for (const [full, ranges] of this.own) {
      const highlight = CSS.highlights.get(full);
      for (const range of ranges) highlight?.delete(range);
    }
    this.own.clear();
  }
}
