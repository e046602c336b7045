import { connect, greet, hideStatic } from "./dom.js";

/** Load plotly from the kernel, once per page. */
function plotly(model) {
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

export default {
  initialize({ model }) {
    return greet(model);
  },
  async render({ model, el }) {
    const box = document.createElement("div");
    box.className = "rl-figure";
    el.append(box);
    hideStatic(el);
    const Plotly = await plotly(model);
    const draw = () => {
      const { data, layout } = JSON.parse(model.get("figure_json"));
      // A box selection is the default drag if points open rollouts.
      const drag = model.get("linked") ? { dragmode: "select", selectdirection: "any" } : {};
      return Plotly.react(box, data ?? [], { clickmode: "event+select", ...drag, ...themed(layout ?? {}, model.get("dark_template")), hovermode: "closest", autosize: true }, { displaylogo: false, modeBarButtonsToAdd: ["select2d"] });
    };
    await draw();
    const fit = new ResizeObserver(() => box.offsetWidth && Plotly.Plots.resize(box));
    fit.observe(el);
    const send = (event) => event?.points?.length && model.send({ op: "points", points: event.points.map((point) => [point.curveNumber, point.pointIndex ?? point.pointNumber]) });
    box.on("plotly_click", send);
    box.on("plotly_selected", send);
    const clear = async () => {
      await Plotly.restyle(box, { selectedpoints: [null] });
      await Plotly.relayout(box, { selections: [] });
    };
    // A double click emits one of the two events, depending on the drag mode. Plotly's own action comes after the event.
    for (const event of ["plotly_doubleclick", "plotly_deselect"]) box.on(event, () => {
      setTimeout(clear, 0);
      model.send({ op: "points", points: [] });
    });
    model.on("change:figure_json", draw);
    const theme = new MutationObserver(draw);
    theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
    return () => {
      theme.disconnect();
      fit.disconnect();
      model.off("change:figure_json", draw);
      Plotly.purge(box);
    };
  },
};
