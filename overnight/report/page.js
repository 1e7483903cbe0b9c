"use strict";
(() => {
  const { runs, routine } = JSON.parse(document.getElementById("curves").textContent);
  const ROUTINE = new Set(routine);
  const percent = (values) => values.map((v) => (v === null ? null : 100 * v));
  // Each chart: how a number of it is written, title, unit, and which curve of the training and of the held-out lines it shows.
  const charts = [
    { format: ".3f", suffix: " nats", title: "Masked-LM loss", unit: "nats", train: "mlm_loss", held: "mlm_loss" },
    { format: ".1f", suffix: " %", title: "Masked-LM accuracy", unit: "%, held out", held: "mlm_accuracy", scale: percent },
    { format: ".3f", suffix: " nats", title: "NSP loss", unit: "nats", train: "nsp_loss", held: "nsp_loss" },
    { format: ".1f", suffix: " %", title: "NSP accuracy", unit: "%, held out", held: "nsp_accuracy", scale: percent },
    { format: ".3f", suffix: " bits", title: "Bits per character", unit: "", train: "byte_loss", held: "byte_loss", scale: (values) => values.map((v) => v && v / Math.LN2) },
    { format: ".1f", suffix: " %", title: "Byte accuracy", unit: "%, held out", held: "byte_accuracy", scale: percent },
    { format: ".4f", suffix: "", title: "Label loss", unit: "squared error", train: "label_loss", held: "label_loss" },
    { format: ".3g", suffix: "", title: "Learning rate", unit: "", train: "lr", zero: true },
    { format: ".3g", suffix: "", title: "Gradient norm", unit: "before clipping", train: "grad_norm", zero: true },
    { format: ",.0f", suffix: " sequences", title: "Gradient noise scale", unit: "sequences; dotted: the batch; a gap: unknown", noise: true },
    { format: ",.0f", suffix: " tokens/s", title: "Throughput", unit: "tokens/s", train: "tokens_per_s", zero: true },
    { format: ",.1f", suffix: " sequences/s", title: "Throughput", unit: "sequences/s", train: "sequences_per_s", zero: true },
    { format: ".1f", suffix: " %", title: "Model FLOP utilisation", unit: "% of the peak", train: "mfu", scale: percent, zero: true },
    { format: ".2f", suffix: " GB", title: "Memory", unit: "GB", train: "memory_gb", zero: true },
    { format: ".0f", suffix: " powers of 2", title: "Loss scale", unit: "fp16, powers of 2", train: "loss_scale", scale: (values) => values.map((v) => v && Math.log2(v)) },
    { format: ",.0f", suffix: " steps", title: "Skipped steps", unit: "so far", train: "skipped", zero: true, above: 0 },
    { format: ".1f", suffix: " %", title: "Waiting for data", unit: "% of the time", train: "loader_wait", scale: percent, zero: true, above: 0.005 },
    { title: "Events", unit: "also the short marks in the other charts", events: true },
  ].filter((c) => runs.some((r) => (c.train && r.train[c.train] && r.train[c.train].some((v) => v > (c.above ?? -Infinity)))
    || (c.held && r.eval[c.held]) || (c.noise && r.noise) || (c.events && r.events.length)));

  const several = runs.length > 1;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const plain = (text) => text.replaceAll("<", "&lt;"); // plotly reads tags
  const colour = (i) => css(`--c${i % 8}`);
  const trainColour = (i) => (several ? colour(i) : css("--pale"));
  let axis = "step";
  let range = null; // of the horizontal axis that all charts share; null shows all of it
  const hidden = new Set(); // names in the legend that were clicked away
  // A finger scrolls the page, it does not draw a box; the numbers are shown at a touch.
  const touch = matchMedia("(pointer: coarse)").matches;

  const longest = Math.max(1, ...runs.flatMap((r) => [...r.train.seconds, ...r.eval.seconds]));
  const [unit, divisor] = longest < 180 ? ["seconds", 1] : longest < 7200 ? ["minutes", 60] : ["hours", 3600];
  const along = (curve) => (axis === "step" ? curve.step : curve.seconds.map((s) => s / divisor));

  const hoverX = () => (axis === "step" ? "step %{x:,d}" : `%{x:.1f} ${unit}`);

  function traces(chart) {
    return runs.flatMap((run, i) => {
      const found = [];
      const add = (curve, values, style) =>
        found.push({
          type: "scatter", x: along(curve), y: chart.scale ? chart.scale(values) : values, ...style, visible: !hidden.has(several ? run.name : style.name),
          hovertemplate: `${several ? `${hoverX()}<br>` : ""}%{y:${chart.format}}${chart.suffix}<extra>${plain(style.name)}</extra>`,
        });
      if (chart.train && run.train[chart.train]) {
        const line = { color: trainColour(i), width: chart.held ? 1.3 : 1.8 };
        const alone = !chart.held && !several ? { ...line, color: colour(0) } : line;
        add(run.train, run.train[chart.train], { mode: "lines", line: alone, opacity: several && chart.held ? 0.5 : 1, name: several ? `${run.name}, training` : "training" });
      }
      if (chart.noise && run.noise) {
        const { batch, groups } = run.noise;
        // The groups of the optimizer are shown where there is one run; the batch is a staircase.
        for (const [name, values] of several ? [] : Object.entries(groups).filter(([name]) => name !== "run"))
          add(run.noise, values, { mode: "lines", line: { color: colour(1 + Object.keys(groups).indexOf(name)), width: 1.2 }, opacity: 0.7, name: plain(name) });
        add(run.noise, batch, { mode: "lines", line: { color: several ? colour(i) : css("--soft"), width: 1.4, dash: "dot", shape: "hv" }, name: several ? `${run.name}, batch` : "batch" });
        add(run.noise, groups.run, { mode: "lines", line: { color: colour(i), width: 2.2 }, name: several ? `${run.name}, noise scale` : "all tensors" });
      }
      for (const what of chart.events ? kinds : []) {
        const mine = run.events.filter((event) => event.what === what);
        const text = mine.map((event) => plain(event.message.length > 160 ? `${event.message.slice(0, 160)} ...` : event.message));
        found.push({
          type: "scatter", mode: "markers", x: mine.map((event) => (axis === "step" ? event.step : event.seconds / divisor)), y: mine.map(() => plain(what)), text,
          marker: { size: 9, symbol: "line-ns-open", line: { width: 2 }, color: several ? colour(i) : eventColour(what) },
          visible: !hidden.has(run.name),
          hovertemplate: `${hoverX()}<br>%{text}<extra>${plain(several ? run.name : what)}</extra>`,
        });
      }
      if (chart.held && run.eval[chart.held]) {
        const marks = run.eval.step.length > 60 ? "lines" : "lines+markers";
        add(run.eval, run.eval[chart.held], { mode: marks, line: { color: colour(i), width: 2.2 }, marker: { size: 6 }, name: several ? `${run.name}, held out` : "held out" });
      }
      return found;
    });
  }

  // Checkpoints and what was measured of the memory are routine, a resume is common; the rest is worth a look.
  const kinds = [...new Set(runs.flatMap((run) => run.events.map((event) => event.what)))].sort((a, b) => rank(b) - rank(a));
  function rank(what) { return ROUTINE.has(what) ? 2 : what === "resumed" ? 1 : 0; }
  const eventColour = (what) => css(["--lose", "--c0", "--pale"][rank(what)]);

  // Short marks on the axis of steps where something happened.
  function eventMarks(shown) {
    return shown.flatMap((run) => run.events.filter((event) => !ROUTINE.has(event.what)).map((event) => {
      const x = axis === "step" ? event.step : event.seconds / divisor, tint = several ? colour(runs.indexOf(run)) : eventColour(event.what);
      return { type: "line", x0: x, x1: x, y0: 0, y1: 0.05, xref: "x", yref: "paper", line: { color: tint, width: 1.5 } };
    }));
  }

  // A line where a phase begins, with its name where there is only one run, and what happened.
  function marks(shown, events) {
    const shapes = [], annotations = [], seen = new Set();
    for (const run of shown) {
      for (const [k, phase] of run.phases.entries()) {
        const x = axis === "step" ? phase.step : phase.seconds / divisor;
        if (shown.length === 1) annotations.push({ x, y: 1, xref: "x", yref: "paper", yanchor: "bottom", xanchor: "left", xshift: 1, text: plain(phase.name), showarrow: false, font: { size: 11, color: css("--soft") } });
        if (k === 0 || seen.has(x)) continue;
        seen.add(x);
        shapes.push({ type: "line", x0: x, x1: x, y0: 0, y1: 1, xref: "x", yref: "paper", line: { color: css("--soft"), width: 1, dash: "dot" } });
      }
    }
    return { shapes: events ? [...shapes, ...eventMarks(shown)] : shapes, annotations };
  }

  function layout(chart, shown = runs) {
    const named = Boolean(chart.noise) && !several;
    const lines = { gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, automargin: true };
    return {
      margin: { l: 52, r: 14, t: 20, b: named ? 64 : 40 }, showlegend: named, legend: { orientation: "h", x: 0, y: -0.3, yanchor: "top", font: { size: 11 } }, hovermode: several || chart.events ? "closest" : "x unified",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, -apple-system, Segoe UI, Helvetica Neue, Arial, sans-serif", size: 12, color: css("--soft") },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: -1 },
      xaxis: { ...lines, showgrid: false, ticks: "outside", tickcolor: css("--line"), title: { text: axis === "step" ? "step" : `training time, ${unit}`, standoff: 8 }, rangemode: "tozero", fixedrange: touch, ...(range ? { range: [...range] } : {}), unifiedhovertitle: { text: hoverX() } },
      dragmode: touch ? false : "zoom",
      yaxis: { ...lines, fixedrange: touch, ...(chart.noise ? logAxis() : chart.events ? { type: "category", categoryarray: kinds.map(plain) } : {}), rangemode: chart.zero ? "tozero" : "normal", nticks: 6, exponentformat: chart.train === "lr" ? "e" : "SI" },
      ...marks(shown, !chart.events),
    };
  }

  function legend() {
    const entry = (text, tint, thin) => {
      const span = document.createElement(tint ? "button" : "span");
      if (tint) {
        span.type = "button";
        span.setAttribute("aria-pressed", String(!hidden.has(text)));
        span.title = "click to hide, click again to show";
        span.addEventListener("click", () => {
          if (!hidden.delete(text)) hidden.add(text);
          draw();
        });
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
      : [entry("training", css("--pale"), true), entry("held out", colour(0))]), entry(touch ? "touch a curve for its numbers" : "click a name to hide it; drag to zoom all charts, double-click to go back"));
  }

  // A titled frame at the end of a place; returns the element to plot in.
  function figure(place, title, unit) {
    const frame = document.createElement("figure"), caption = document.createElement("figcaption"), note = document.createElement("small");
    const plot = document.createElement("div");
    plot.className = "plot";
    note.textContent = unit ? `  ${unit}` : "";
    caption.append(title, note);
    frame.append(caption, plot);
    place.append(frame);
    return plot;
  }

  const grid = document.getElementById("charts");
  for (const chart of charts) {
    chart.plot = figure(grid, chart.title, chart.unit);
    for (const run of chart.noise ? runs.filter((r) => r.noise) : []) {
      const words = document.createElement("small");
      words.textContent = several ? `${run.name}, ${run.noise.says}` : run.noise.says;
      chart.plot.before(words);
    }
  }
  if (!charts.length) grid.textContent = "No curve was written yet.";

  // Heat maps: a row a tensor, a column a measured step, the colour on a log scale that all runs share.
  const maps = [
    { key: "ratio", title: "Trust ratio", unit: "of the tensors that are adapted" },
    { key: "change", title: "Update over weight", unit: "|Δx| / |x| of one step" },
  ].flatMap((map) => {
    const measured = runs.filter((run) => run.tensors && run.tensors[map.key].names.length);
    const logs = measured.flatMap((run) => run.tensors[map.key].values.flat()).filter((v) => v !== null).map(Math.log10).sort((a, b) => a - b);
    // A hundredth at each end is left to the last colour: few first steps would else flatten all others.
    const [low, high] = [0.01, 0.99].map((q) => logs[Math.round(q * (logs.length - 1))]);
    return measured.map((run) => ({ ...map, run, low, high: Math.max(high, low + 0.05) }));
  });

  function logTicks(low, high) {
    const steps = high - low > 3.2 ? [1] : high - low > 0.7 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
    const ticks = [];
    for (let power = Math.floor(low); power <= high; power++) for (const s of steps) ticks.push(Math.log10(s) + power);
    return ticks.filter((t) => t >= low && t <= high);
  }

  function logAxis() {
    const found = runs.filter((run) => run.noise).flatMap((run) => [run.noise.batch, ...Object.values(run.noise.groups)].flat()).filter((v) => v !== null).map(Math.log10);
    const ticks = logTicks(Math.min(...found) - 0.3, Math.max(...found) + 0.3);
    return { type: "log", tickvals: ticks.map((t) => 10 ** t), ticktext: ticks.map((t) => Math.round(10 ** t).toLocaleString("en")) };
  }

  const short = (v) => (v === null ? "-" : v < 1e-3 || v >= 1e5 ? Number(v.toPrecision(2)).toExponential() : String(Number(v.toPrecision(3))));

  // The layer of a tensor: up to its number, else the first part of its name.
  const block = (name) => (name.match(/^.*?\.\d+(?=\.)/) || [name.split(".")[0]])[0];

  function drawMap(map) {
    const { values } = map.run.tensors[map.key], names = map.run.tensors[map.key].names.map(plain);
    const high = Math.max(3, Math.min(15, Math.floor(960 / names.length)));
    const starts = names.map((name, row) => (row === 0 || block(name) !== block(names[row - 1]) ? row : -1)).filter((row) => row >= 0);
    // Every row has its name where there is room, else every layer, the names that would lie on the one above left out.
    const rows = high >= 11 ? names.map((name, row) => [row, name]) : starts.map((row, at) => [(row + (starts[at + 1] ?? names.length) - 1) / 2, block(names[row])]);
    const labels = [];
    for (const [row, name] of rows) if (!labels.length || (row - labels.at(-1)[0]) * high >= 11) labels.push([row, name]);
    const ticks = logTicks(map.low, map.high);
    const base = layout({}, [map.run]);
    const lines = starts.slice(1).map((row) => ({ type: "line", x0: 0, x1: 1, y0: row - 0.5, y1: row - 0.5, xref: "paper", yref: "y", line: { color: css("--card"), width: 1 } }));
    map.plot.style.height = `${names.length * high + 64}px`;
    Plotly.react(map.plot, [{
      type: "heatmap", x: along(map.run.tensors), y: names.map((_, row) => row), z: values.map((row) => row.map((v) => (v === null ? null : Math.log10(v)))),
      zmin: map.low, zmax: map.high, colorscale: "Viridis", customdata: values.map((row, at) => row.map((v) => [names[at], short(v)])),
      hovertemplate: `%{customdata[0]}<br>${hoverX()}: %{customdata[1]}<extra></extra>`, hoverongaps: false,
      colorbar: { thickness: 12, outlinewidth: 0, tickvals: ticks, ticktext: ticks.map((t) => short(10 ** t)), len: 1, y: 0.5 },
    }], {
      ...base, margin: { l: 40, r: 10, t: 20, b: 44 }, hovermode: "closest",
      xaxis: { ...base.xaxis, rangemode: "normal" },
      yaxis: {
        fixedrange: touch,
        autorange: "reversed", showgrid: false, zeroline: false, automargin: true, ticks: "", tickfont: { size: 11 },
        tickvals: labels.map(([row]) => row), ticktext: labels.map(([, name]) => name),
      },
      shapes: [...lines, ...base.shapes.map((shape) => ({ ...shape, line: { color: css("--card"), width: 1.5 } }))],
    }, { responsive: true, displayModeBar: false });
  }

  for (const map of maps) {
    const title = several ? `${map.title}, ${map.run.name}` : map.title;
    map.plot = figure(document.getElementById("maps"), title, map.unit);
  }

  // Charts share their horizontal axis: a zoom in one is a zoom in all.
  let following = false;
  async function follow(plot, change) {
    const from = change["xaxis.range[0]"], to = change["xaxis.range[1]"];
    if (following || (from === undefined && !change["xaxis.autorange"])) return;
    range = from === undefined ? null : [from, to];
    following = true;
    const others = [...charts, ...maps].map((chart) => chart.plot).filter((other) => other !== plot);
    await Promise.all(others.map((other) => Plotly.relayout(other, range ? { "xaxis.range": [...range] } : { "xaxis.autorange": true })));
    following = false;
  }

  function draw() {
    legend();
    for (const map of maps) drawMap(map);
    for (const chart of charts) Plotly.react(chart.plot, traces(chart), layout(chart), { responsive: true, displayModeBar: false });
  }

  const buttons = document.querySelectorAll("[data-axis]");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      axis = button.dataset.axis;
      range = null;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      draw();
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
  for (const { plot } of [...charts, ...maps]) plot.on("plotly_relayout", (change) => follow(plot, change));
})();
