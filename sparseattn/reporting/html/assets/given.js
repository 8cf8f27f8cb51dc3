// What a plan gives: a cell for each layer and KV head, in the colour of its method, with its budget. A plan is shown
// whole, whichever methods are switched on.
"use strict";

views.given = (figure, view) => {
  let shown = view.plans[0];
  const host = make("div", { class: "plot" });
  if (view.plans.length > 1) {
    const names = view.plans.map((plan) => plan.name);
    const pick = (i) => {
      shown = view.plans[i];
      draw();
    };
    figure.append(make("div", { class: "bar" }, choice("Plan", Object.keys(names), pick, names)));
  }
  const methods = view.plans.flatMap((plan) => plan.layers.flatMap((layer) => layer.heads.map((head) => head.method)));
  const legend = make("div", { class: "legend" });
  for (const name of new Set(methods)) legend.append(make("span", {}, patch(name), nameOf(name)));
  figure.append(host, legend);

  function patch(name) {
    const one = make("span", { class: "patch", "aria-hidden": "true" });
    one.style.background = colourOf(name);
    return one;
  }

  function draw() {
    const left = 64,
      columns = shown.layers.map((layer) => String(layer.layer)),
      rows = d3.range(d3.max(shown.layers, (layer) => layer.heads.length)).map(String),
      inner = (host.clientWidth - left - 8) / columns.length,
      room = inner >= 24;
    const cells = shown.layers
      .flatMap(({ layer, heads }) => heads.map((one, head) => ({ column: String(layer), row: String(head), ...one })))
      .map((cell) => ({
        ...cell,
        fill: colourOf(cell.method),
        lines: [
          `layer ${cell.column}, KV head ${cell.row}`,
          cell.method,
          ...(cell.budget ? [`budget ${cell.budget}`] : []),
        ],
      }));
    drawCells(host, {
      cells,
      columns,
      rows,
      left,
      height: Math.max(18, Math.min(30, inner)),
      axis: "layer",
      label: `${view.title}, ${shown.name}`,
      named: (head) => `head ${head}`,
      text: room ? { text: (cell) => cell.budget || "–", fill: (cell) => inkOn(cell.method) } : null,
    });
  }

  draw();
  return draw;
};
