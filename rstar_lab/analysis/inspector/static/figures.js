import { h, fill } from "./dom.js";
import { plotly, drawFigure } from "./plot.js";

/** The figures of one screen: beside the list on a wide page, above it on a narrower one, one at a time on a narrow one. */
export class Figures {
  constructor(model) {
    this.model = model;
    this.panes = model.get("figures").map(({ name }, index) => {
      const box = h("div", { class: "rl-figure" }, h("p", { class: "rl-empty" }, "Loading the figure …"));
      const tab = h("button", { type: "button", class: "rl-toggle", "aria-pressed": "false", onclick: () => this.choose(index) }, name);
      return { box, tab, element: h("div", { class: "rl-plot", role: "group", "aria-label": name }, box) };
    });
    this.tabs = h("div", { class: "rl-tabs", role: "group", "aria-label": "Figure" }, this.panes.map(({ tab }) => tab));
    this.element = h("section", { class: "rl-plots", "aria-label": "Figures" }, this.tabs, this.panes.map(({ element }) => element));
    this.choose(0);
  }

  /** Show one of the figures on a page that has room for one. */
  choose(chosen) {
    this.panes.forEach(({ tab, element }, index) => {
      tab.setAttribute("aria-pressed", String(index === chosen));
      element.classList.toggle("rl-chosen-plot", index === chosen);
    });
  }

  async start() {
    const Plotly = await plotly(this.model);
    this.panes.forEach(({ box }) => fill(box));
    this.shown = this.panes.map(({ box, element }, index) => drawFigure({
      Plotly, box, resized: element, figure: () => compact(JSON.parse(this.model.get("figures")[index].json), Math.max(160, element.clientHeight)), fills: true,
      darkTemplate: () => this.model.get("dark_template"), linked: () => true, send: (points) => this.send(index, points),
    }));
    this.redraw = () => this.shown.forEach(({ draw }) => draw());
    this.model.on("change:figures", this.redraw);
  }

  send(figure, points) {
    if (points.length) this.shown.forEach((_, index) => index !== figure && this.clear(index));
    this.model.send({ op: "points", figure, points });
  }

  /** Remove the marks of a selection in a figure, because another figure's selection replaces it. */
  clear(index) {
    const { box } = this.panes[index];
    if (!box.data?.some((trace) => trace.selectedpoints) && !box.layout?.selections?.length) return;
    globalThis.Plotly.restyle(box, { selectedpoints: [null] });
    globalThis.Plotly.relayout(box, { selections: [] });
  }

  close() {
    this.model.off("change:figures", this.redraw);
    this.shown?.forEach(({ close }) => close());
    fill(this.element);
  }
}

/** The figure at the height of its pane (pixels), in smaller type. Its headings are placed as fractions of its own height:
 *  keep their distance in pixels. */
function compact({ data, layout }, height) {
  const own = layout.height ?? 400;
  const place = (y) => (typeof y === "number" ? 1 - ((1 - y) * own) / height : y);
  const title = layout.title && { ...layout.title, y: place(layout.title.y), font: { ...layout.title.font, size: 13 } };
  const legend = layout.legend && { ...layout.legend, y: place(layout.legend.y) };
  const annotations = layout.annotations?.map((note) => ({ ...note, font: { ...note.font, size: 12 } }));
  return { data, layout: { ...layout, height, title, legend, annotations, font: { ...layout.font, size: 11 }, margin: { ...layout.margin, b: 46, r: 12 } } };
}
