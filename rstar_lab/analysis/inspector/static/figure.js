import { greet, hideStatic } from "./dom.js";
import { plotly, drawFigure } from "./plot.js";

export default {
  initialize({ model }) {
    return greet(model);
  },
  async render({ model, el }) {
    const box = document.createElement("div");
    box.className = "rl-figure";
    box.textContent = "Loading the figure …";
    el.append(box);
    hideStatic(el);
    const Plotly = await plotly(model);
    box.textContent = "";
    const shown = drawFigure({
      Plotly, box, resized: el, figure: () => JSON.parse(model.get("figure_json")), darkTemplate: () => model.get("dark_template"),
      linked: () => model.get("linked"), send: (points) => model.send({ op: "points", points }),
    });
    await shown.ready;
    model.on("change:figure_json", shown.draw);
    return () => {
      model.off("change:figure_json", shown.draw);
      shown.close();
    };
  },
};
