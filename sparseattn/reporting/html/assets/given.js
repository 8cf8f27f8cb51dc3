// What a plan gives: a cell for each layer and KV head, in the colour of its method, with its budget.
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
  figure.append(host);

  function draw() {
    const left = 64,
      columns = shown.layers.map((layer) => String(layer.layer)),
      rows = d3.range(d3.max(shown.layers, (layer) => layer.heads.length)).map(String),
      inner = (host.clientWidth - left - 8) / columns.length,
      room = inner >= 26;
    const cells = shown.layers
      .flatMap(({ layer, heads }) => heads.map((one, head) => ({ column: String(layer), row: String(head), ...one })))
      .filter((cell) => !numberOf.has(cell.method) || isShown(cell.method))
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
      height: Math.max(16, Math.min(30, inner)),
      axis: "layer",
      label: `${view.title}, ${shown.name}`,
      named: (head) => `head ${head}`,
      text: room ? { text: "budget" } : null,
      fillOpacity: room ? 0.4 : 0.85,
    });
  }

  draw();
  return draw;
};
