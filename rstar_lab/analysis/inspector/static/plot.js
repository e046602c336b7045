import { connect } from "./dom.js";

/** Load plotly from the kernel, once per page. */
export function plotly(model) {
  if (globalThis.Plotly?.newPlot) return Promise.resolve(globalThis.Plotly);
  globalThis.__rstarLabPlotly ??= (async () => {
    const line = connect(model);
    const [, [source]] = await line.ask("plotly");
    line.close();
    // With an AMD loader on the page, plotly would define an AMD module instead of a global: hide the loader from it.
    const url = URL.createObjectURL(new Blob(["((define, module, exports) => {", source, "\n}).call(window)"], { type: "text/javascript" }));
    const script = document.createElement("script");
    script.src = url;
    await new Promise((resolve, reject) => {
      script.onload = resolve;
      script.onerror = () => reject(new Error("the page could not load plotly"));
      document.head.append(script);
    });
    URL.revokeObjectURL(url);
    return globalThis.Plotly;
  })();
  return globalThis.__rstarLabPlotly;
}

/** Whether the page is dark: by the sign of JupyterLab, VS Code or Colab, or by its CSS property, as marimo's. */
const isDark = () => {
  const { body, documentElement } = document;
  if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false";
  if (body.matches(".vscode-dark, .vscode-high-contrast:not(.vscode-high-contrast-light)") || documentElement.getAttribute("theme") === "dark") return true;
  const scheme = getComputedStyle(body).colorScheme;
  return scheme.includes("dark") && (!scheme.includes("light") || matchMedia("(prefers-color-scheme: dark)").matches);
};

const arrays = { i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array };

/** The values of an array of a figure, which plotly writes as base64 if it came from numpy. */
const numbers = (values) => (values?.bdata ? [...new arrays[values.dtype](Uint8Array.from(atob(values.bdata), (char) => char.charCodeAt(0)).buffer)] : values ?? []);

/** The layout at a width in pixels: titles shrink until those side by side fit, and steps that do not fit have no label. */
function fitted(data, layout, width) {
  const texts = (text) => Math.max(1, ...String(text ?? "").split("<br>").map((line) => line.replace(/<[^>]*>/g, "").length));
  const sizeOf = (item, usual, room) => Math.max(8, Math.min(item.font?.size ?? usual, Math.floor(room / (0.56 * texts(item.text)))));
  const shrink = (items, usual, room) => ({ ...items[0], font: { ...items[0].font, size: Math.min(...items.map((item) => sizeOf(item, usual, room))) } });
  const within = ({ x, xref, xanchor }) => (xref === "paper" && xanchor === "center" && x > 0 && x < 1 ? 2 * Math.min(x, 1 - x) * width : width); // inside of the figure
  const notes = layout.annotations ?? [];
  const annotations = notes.map((note) => {
    const row = notes.filter(({ y, yref }) => yref === "paper" && y === note.y); // titles side by side have one size
    return note.yref === "paper" ? shrink([note, ...row], 14, Math.min((0.9 * width) / row.length, ...row.map(within))) : note;
  });
  const made = { ...layout, annotations, title: layout.title?.text ? shrink([layout.title], 15, width - 80) : layout.title };
  for (const [name, axis] of Object.entries(layout)) {
    if (!/^xaxis\d*$/.test(name) || axis.dtick !== 1) continue;
    const xs = data.filter((trace) => (trace.xaxis ?? "x") === name.replace("axis", "")).flatMap((trace) => numbers(trace.x));
    if (!xs.length) continue;
    const [low, high] = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
    const [from, to] = axis.domain ?? [0, 1];
    const needed = (high - low + 1) * (10 + 8 * String(high).length);
    made[name] = { ...axis, dtick: Math.max(1, Math.ceil(needed / ((to - from) * (width - 80)))), tickangle: 0 };
  }
  return made;
}

/** The layout on the page's own background. On a dark page, its template is replaced by the dark one. */
function themed(layout, darkTemplate) {
  if (!isDark()) return layout;
  return { ...layout, template: darkTemplate, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
}

/** Draw a figure into an element; returns {draw, close}. figure(): {data, layout}. darkTemplate(): plotly template of dark
 *  pages. linked(): whether points open rollouts. send(points): a click or a selection, [[trace, point], ...]. resized: element
 *  whose size the figure follows. fills: figure() depends on the height of this element. */
export function drawFigure({ Plotly, box, resized, figure, darkTemplate, linked, send, fills = false }) {
  const at = (figure) => fitted(figure.data ?? [], figure.layout ?? {}, resized.clientWidth || 700);
  let fits; // the layout that was drawn last
  const draw = () => {
    if (fills && box.data && !box.offsetWidth) return null; // hidden; drawn when it has a size again
    const made = figure();
    fits = at(made);
    // A box selection is the default drag if points open rollouts.
    const drag = linked() ? { dragmode: "select", selectdirection: "any" } : {};
    return Plotly.react(box, made.data ?? [], { clickmode: "event+select", ...drag, ...themed(fits, darkTemplate()), hovermode: "closest", autosize: true }, { displaylogo: false, modeBarButtonsToAdd: ["select2d"] });
  };
  const listen = () => {
    const chosen = (event) => event?.points?.length && send(event.points.map((point) => [point.curveNumber, point.pointIndex ?? point.pointNumber]));
    box.on("plotly_click", chosen);
    box.on("plotly_selected", chosen);
    const clear = async () => {
      await Plotly.restyle(box, { selectedpoints: [null] });
      await Plotly.relayout(box, { selections: [] });
    };
    // A double click emits one of the two events, depending on the drag mode. Plotly's own action comes after the event.
    for (const event of ["plotly_doubleclick", "plotly_deselect"]) box.on(event, () => {
      setTimeout(clear, 0);
      send([]);
    });
  };
  const same = () => JSON.stringify(at(figure())) === JSON.stringify(fits);
  const fit = new ResizeObserver(() => box.offsetWidth && (fills || !same() ? draw() : Plotly.Plots.resize(box)));
  // While JupyterLab loads a theme, elements have no size.
  const themeChanged = (tries = 0) => (fills && !box.offsetWidth && tries < 60 ? setTimeout(themeChanged, 50, tries + 1) : draw());
  const theme = new MutationObserver(() => themeChanged());
  const ready = draw().then(() => {
    listen();
    fit.observe(resized);
    theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  });
  return {
    draw, ready,
    close() {
      theme.disconnect();
      fit.disconnect();
      Plotly.purge(box);
    },
  };
}
