"use strict";
(() => {
  const { runs } = JSON.parse(document.getElementById("curves").textContent);
  const percent = (values) => values.map((v) => (v === null ? null : 100 * v));
  // Each chart: title, unit, and which curve of the training and of the held-out lines it shows.
  const charts = [
    { title: "Masked-LM loss", unit: "nats", train: "mlm_loss", held: "mlm_loss" },
    { title: "Masked-LM accuracy", unit: "%, held out", held: "mlm_accuracy", scale: percent },
    { title: "NSP loss", unit: "nats", train: "nsp_loss", held: "nsp_loss" },
    { title: "NSP accuracy", unit: "%, held out", held: "nsp_accuracy", scale: percent },
    { title: "Learning rate", unit: "", train: "lr", zero: true },
    { title: "Gradient norm", unit: "before clipping", train: "grad_norm", zero: true },
    { title: "Throughput", unit: "tokens/s", train: "tokens_per_s", zero: true },
    { title: "Throughput", unit: "sequences/s", train: "sequences_per_s", zero: true },
  ].filter((c) => runs.some((r) => (c.train && r.train[c.train]) || (c.held && r.eval[c.held])));

  const several = runs.length > 1;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (i) => css(`--c${i % 8}`);
  const trainColour = (i) => (several ? colour(i) : css("--pale"));
  let axis = "step";

  const longest = Math.max(1, ...runs.flatMap((r) => [...r.train.seconds, ...r.eval.seconds]));
  const [unit, divisor] = longest < 180 ? ["seconds", 1] : longest < 7200 ? ["minutes", 60] : ["hours", 3600];
  const along = (curve) => (axis === "step" ? curve.step : curve.seconds.map((s) => s / divisor));

  function traces(chart) {
    return runs.flatMap((run, i) => {
      const found = [];
      const add = (curve, values, style) =>
        found.push({ type: "scatter", x: along(curve), y: chart.scale ? chart.scale(values) : values, hoverinfo: "x+y+name", ...style });
      if (chart.train && run.train[chart.train]) {
        const line = { color: trainColour(i), width: chart.held ? 1.3 : 1.8 };
        const alone = !chart.held && !several ? { ...line, color: colour(0) } : line;
        add(run.train, run.train[chart.train], { mode: "lines", line: alone, opacity: several && chart.held ? 0.5 : 1, name: several ? `${run.name}, training` : "training" });
      }
      if (chart.held && run.eval[chart.held]) {
        const marks = run.eval.step.length > 60 ? "lines" : "lines+markers";
        add(run.eval, run.eval[chart.held], { mode: marks, line: { color: colour(i), width: 2.2 }, marker: { size: 6 }, name: several ? `${run.name}, held out` : "held out" });
      }
      return found;
    });
  }

  // A line where a phase begins; its name where there is only one run.
  function phaseMarks() {
    const shapes = [], annotations = [], seen = new Set();
    for (const run of runs) {
      for (const [k, phase] of run.phases.entries()) {
        const x = axis === "step" ? phase.step : phase.seconds / divisor;
        if (!several) annotations.push({ x, y: 1, xref: "x", yref: "paper", yanchor: "bottom", xanchor: "left", xshift: 1, text: phase.name.replaceAll("<", "&lt;"), showarrow: false, font: { size: 11, color: css("--soft") } });
        if (k === 0 || seen.has(x)) continue;
        seen.add(x);
        shapes.push({ type: "line", x0: x, x1: x, y0: 0, y1: 1, xref: "x", yref: "paper", line: { color: css("--soft"), width: 1, dash: "dot" } });
      }
    }
    return { shapes, annotations };
  }

  function layout(chart) {
    const lines = { gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, automargin: true };
    return {
      margin: { l: 52, r: 14, t: 20, b: 40 }, showlegend: false, hovermode: several ? "closest" : "x unified",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, -apple-system, Segoe UI, Helvetica Neue, Arial, sans-serif", size: 12, color: css("--soft") },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: -1 },
      xaxis: { ...lines, showgrid: false, ticks: "outside", tickcolor: css("--line"), title: { text: axis === "step" ? "step" : `training time, ${unit}`, standoff: 8 }, rangemode: "tozero" },
      yaxis: { ...lines, rangemode: chart.zero ? "tozero" : "normal", nticks: 6, exponentformat: chart.train === "lr" ? "e" : "SI" },
      ...phaseMarks(),
    };
  }

  function legend() {
    const entry = (text, tint, thin) => {
      const span = document.createElement("span");
      if (tint) {
        const mark = document.createElement("i");
        mark.style.borderColor = tint;
        mark.className = thin ? "thin" : "";
        span.append(mark);
      }
      span.append(text);
      return span;
    };
    const place = document.getElementById("legend");
    place.replaceChildren(...(several
      ? [...runs.map((run, i) => entry(run.name, colour(i))), entry("thick: held out, thin: training")]
      : [entry("training", css("--pale"), true), entry("held out", colour(0))]), entry("drag to zoom, double-click to go back"));
  }

  const grid = document.getElementById("charts");
  for (const chart of charts) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), note = document.createElement("small");
    chart.plot = document.createElement("div");
    chart.plot.className = "plot";
    note.textContent = chart.unit ? `  ${chart.unit}` : "";
    caption.append(chart.title, note);
    figure.append(caption, chart.plot);
    grid.append(figure);
  }
  if (!charts.length) grid.textContent = "No curve was written yet.";

  function draw() {
    legend();
    for (const chart of charts) Plotly.react(chart.plot, traces(chart), layout(chart), { responsive: true, displayModeBar: false });
  }

  const buttons = document.querySelectorAll("[data-axis]");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      axis = button.dataset.axis;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      draw();
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
