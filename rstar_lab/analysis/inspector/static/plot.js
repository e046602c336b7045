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

const isDark = () => document.body.dataset.jpThemeLight === "false" || document.body.classList.contains("vscode-dark");

/** The layout on the page's own background. On a dark page, its template is replaced by the dark one. */
function themed(layout, darkTemplate) {
  if (!isDark()) return layout;
  return { ...layout, template: darkTemplate, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
}

/** Draw a figure into an element; returns {draw, close}. figure(): {data, layout}. darkTemplate(): plotly template of dark
 *  pages. linked(): whether points open rollouts. send(points): a click or a selection, [[trace, point], ...]. resized: element
 *  whose size the figure follows. fills: figure() depends on the height of this element. */
export function drawFigure({ Plotly, box, resized, figure, darkTemplate, linked, send, fills = false }) {
  const draw = () => {
    if (fills && box.data && !box.offsetWidth) return null; // hidden; drawn when it has a size again
    const { data, layout } = figure();
    // A box selection is the default drag if points open rollouts.
    const drag = linked() ? { dragmode: "select", selectdirection: "any" } : {};
    return Plotly.react(box, data ?? [], { clickmode: "event+select", ...drag, ...themed(layout ?? {}, darkTemplate()), hovermode: "closest", autosize: true }, { displaylogo: false, modeBarButtonsToAdd: ["select2d"] });
  };
  const listen = () => {
    const chosen = (event) => event?.points?.length && send(event.points.map((point) => [point.curveNumber, point.pointIndex ?? point.pointNumber]));
    box.on("plotly_click", chosen);
    box.on("plotly_treemapclick", (event) => (chosen(event), false)); // without zooming in
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
  const fit = new ResizeObserver(() => box.offsetWidth && (fills ? draw() : Plotly.Plots.resize(box)));
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
