"use strict";
// The figures were made in Python. Here they are drawn, by step or by time, linked, and fitted to a finger.
(() => {
  // A finger scrolls the page, it does not draw a box; the numbers are shown at a touch.
  const touch = matchMedia("(pointer: coarse)").matches;
  const plots = [...document.querySelectorAll(".plot")];
  for (const plot of plots) plot.figure = JSON.parse(plot.nextElementSibling.textContent);
  const linked = plots.filter((plot) => plot.figure.layout.meta);
  const hidden = new Set(); // names in the legend that were clicked away
  const visible = (trace) => !hidden.has(trace.legendgroup ?? trace.name);

  function draw(byTime) {
    for (const plot of plots) {
      const { data, layout } = plot.figure;
      const shown = structuredClone(byTime ? { ...layout, ...layout.meta } : layout);
      if (touch) shown.dragmode = !(shown.xaxis.fixedrange = shown.yaxis.fixedrange = true);
      const traces = data.map((trace) => ({ ...trace, x: byTime && trace.meta ? trace.meta : trace.x, visible: visible(trace) }));
      Plotly.react(plot, traces, shown, { responsive: true, displayModeBar: false });
    }
  }

  // A zoom in one chart is a zoom in all.
  let following = false;
  async function follow(plot, change) {
    const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    const wanted = range[0] === undefined ? change["xaxis.autorange"] && { "xaxis.autorange": true } : { "xaxis.range": range };
    if (following || !wanted) return;
    following = true;
    await Promise.all(linked.filter((other) => other !== plot).map((other) => Plotly.relayout(other, structuredClone(wanted))));
    following = false;
  }

  const press = (button, on) => button.setAttribute("aria-pressed", String(on));
  const buttons = [...document.querySelectorAll("[data-axis]")];
  for (const button of buttons)
    button.onclick = () => {
      for (const other of buttons) press(other, other === button);
      draw(button.dataset.axis === "seconds");
    };
  for (const button of document.querySelectorAll("[data-series]"))
    button.onclick = () => {
      const name = button.dataset.series;
      if (!hidden.delete(name)) hidden.add(name);
      press(button, !hidden.has(name));
      for (const plot of linked) Plotly.restyle(plot, { visible: plot.data.map(visible) });
    };
  draw(false);
  for (const plot of linked) plot.on("plotly_relayout", (change) => follow(plot, change));
})();
