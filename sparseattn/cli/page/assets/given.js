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
    const width = host.clientWidth,
      left = 64,
      layers = shown.layers.map((layer) => String(layer.layer)),
      heads = d3.range(d3.max(shown.layers, (layer) => layer.heads.length)).map(String),
      inner = (width - left - 8) / layers.length,
      height = Math.max(16, Math.min(30, inner));
    const cells = shown.layers
      .flatMap(({ layer, heads: own }) => own.map((one, head) => ({ layer: String(layer), head: String(head), ...one })))
      .filter((cell) => !numberOf.has(cell.method) || isShown(cell.method));
    const every = Math.max(1, Math.ceil(24 / inner));
    const svg = Plot.plot({
      width,
      height: heads.length * height + 40,
      marginLeft: left,
      marginRight: 4,
      marginTop: 4,
      marginBottom: 36,
      padding: 0.04,
      style: { background: "none" },
      x: { type: "band", domain: layers, label: "layer", labelArrow: "none", ticks: layers.filter((_, k) => k % every === 0) },
      y: { type: "band", domain: heads, label: null, tickFormat: (head) => `head ${head}` },
      marks: [
        Plot.cell(cells, {
          x: "layer",
          y: "head",
          fill: (cell) => colourOf(cell.method),
          fillOpacity: inner >= 26 ? 0.4 : 0.85,
          rx: 1.5,
        }),
        inner >= 26 ? Plot.text(cells, { x: "layer", y: "head", text: "budget", fontSize: 10 }) : null,
      ],
      color: { type: "identity" },
    });
    svg.setAttribute("aria-hidden", "true");
    host.replaceChildren(svg);
    const [sx, sy] = [svg.scale("x"), svg.scale("y")];
    const places = cells.map((cell) => ({
      x: sx.apply(cell.layer) + sx.bandwidth / 2,
      y: sy.apply(cell.head) + sy.bandwidth / 2,
      lines: [`layer ${cell.layer}, KV head ${cell.head}`, cell.method, ...(cell.budget ? [`budget ${cell.budget}`] : [])],
    }));
    probe(host, `${view.title}, ${shown.name}`, places, Math.max(30, inner));
  }

  draw();
  return draw;
};
