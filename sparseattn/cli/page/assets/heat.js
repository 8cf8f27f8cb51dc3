// Maps of coloured cells, all panels on one scale.
"use strict";

views.heat = (figure, view) => {
  let measure = view.measures[0];
  const chosen = {};
  const bar = make("div", { class: "bar" }),
    legend = make("div"),
    panels = make("div", { class: "panels" });
  for (const name of view.choices) {
    const values = [...new Set(view.panels.map((panel) => String(panel.choice[name])))];
    const first = values[Math.floor((values.length - 1) / 2)];
    chosen[name] = name === "budget" ? first : values[0];
    if (values.length < 2) continue;
    const list = choice(name[0].toUpperCase() + name.slice(1), values, (value) => {
      chosen[name] = value;
      draw();
    });
    list.querySelector("select").value = chosen[name];
    bar.append(list);
  }
  if (view.measures.length > 1) {
    bar.append(
      choice(
        "Shown",
        view.measures.map((one) => one.key),
        (key) => {
          measure = view.measures.find((one) => one.key === key);
          draw();
        },
        view.measures.map((one) => one.label),
      ),
    );
  }
  figure.append(bar, legend, panels);

  /** The panel of a method that fits what is chosen; what has one panel alone, such as full attention, is always shown. */
  function fitting() {
    const fits = (panel, but) =>
      view.choices.every((name) => name === but || String(panel.choice[name]) === chosen[name]);
    const exact = view.panels.filter((panel) => fits(panel));
    const others = view.panels.filter((panel) => view.choices.includes("budget") && fits(panel, "budget"));
    const alone = others.filter((panel) => others.filter((one) => one.method === panel.method).length === 1);
    return view.panels
      .filter((panel) => exact.includes(panel) || alone.includes(panel))
      .filter((panel) => panel.method == null || panel.method === "full" || isShown(panel.method));
  }

  function draw() {
    const shown = fitting();
    const values = view.panels
      .flatMap((panel) => panel.values[measure.key].flat())
      .filter((value) => value != null)
      .sort(d3.ascending);
    const most = measure.top ?? (d3.quantile(values, 0.98) || 1);
    const least = measure.log ? Math.max(d3.quantile(values, 0.02) || 1, 1e-12) : Math.min(0, values[0] ?? 0);
    const part = measure.log
      ? (value) => Math.log(Math.max(value, least) / least) / Math.log(most / least || 2)
      : measure.top == null
        ? (value) => Math.sqrt(Math.max(0, value - least) / (most - least || 1)) // few heads are far off, and the others differ too
        : (value) => (value - least) / (most - least || 1);
    const middle = measure.log ? Math.sqrt(least * most) : least + (most - least) * (measure.top == null ? 0.25 : 0.5);
    const colour = (value) => d3.interpolateCividis(Math.max(0, Math.min(1, part(value))));
    const clipped = measure.top == null && values[values.length - 1] > most;
    legend.replaceChildren(
      ramp(
        [
          show(least, measure.form),
          show(middle, measure.form),
          `${show(most, measure.form)}${clipped ? " or more" : ""}`,
        ],
        measure.label,
      ),
    );
    const wide = Math.max(...view.panels.map((panel) => panel.columns.length));
    const least_width = view.methods ? 340 : Math.max(140, Math.min(420, 48 + 12 * wide));
    const columns = Math.max(1, Math.min(shown.length, Math.floor(panels.clientWidth / least_width)));
    panels.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    panels.replaceChildren();
    if (!shown.length) panels.append(make("p", { class: "none" }, "No method that is switched on has such a map."));
    for (const one of shown) {
      const host = make("div", { class: "plot" });
      const name = one.method == null ? null : make("h4", {}, swatch(one.method), ` ${one.method}`);
      const panel = make("div", { class: "panel", "data-method": one.method ?? false }, name, host);
      panels.append(panel);
      drawPanel(host, one, colour);
    }
  }

  function drawPanel(host, one, colour) {
    const cells = [],
      rows = one.rows.map(String),
      columns = one.columns.map((column) => show(column, typeof column === "number" ? "count" : "text"));
    rows.forEach((row, i) => {
      if (view.methods && !isShown(row)) return;
      columns.forEach((column, k) => cells.push({ row, column, value: one.values[measure.key][i][k] }));
    });
    const names = rows.filter((row) => !view.methods || isShown(row)),
      width = host.clientWidth;
    const left = Math.min(0.45 * width, 14 + d3.max(names, (row) => row.length) * 6.6 || 0);
    const inner = (width - left - 8) / columns.length,
      height = view.methods ? 24 : Math.max(14, Math.min(26, inner));
    const room = inner >= 36 && height >= 18;
    const ink = (value) => (d3.lab(colour(value)).l > 55 ? "#111" : "#fff");
    const letters = Math.floor((left - 10) / 6.4);
    const every = Math.max(1, Math.ceil(columns.length / Math.max(1, Math.floor((width - left) / 26))));
    const svg = Plot.plot({
      width,
      height: names.length * height + 40,
      marginLeft: left,
      marginRight: 4,
      marginTop: 4,
      marginBottom: 36,
      padding: 0.04,
      style: { background: "none" },
      x: {
        type: "band",
        domain: columns,
        label: view.x,
        labelArrow: "none",
        ticks: columns.filter((_, k) => k % every === 0),
      },
      y: {
        type: "band",
        domain: names,
        label: null,
        tickFormat: (row) => (row.length > letters ? `${row.slice(0, letters - 1)}…` : row),
      },
      marks: [
        Plot.cell(
          cells.filter((cell) => cell.value != null),
          { x: "column", y: "row", fill: (cell) => colour(cell.value), rx: 1.5 },
        ),
        room
          ? Plot.text(
              cells.filter((cell) => cell.value != null),
              {
                x: "column",
                y: "row",
                text: (cell) => show(cell.value, measure.form).replace(" %", ""),
                fill: (cell) => ink(cell.value),
                fontSize: 10,
              },
            )
          : null,
      ],
      color: { type: "identity" },
    });
    svg.setAttribute("aria-hidden", "true");
    host.append(svg);
    const [sx, sy] = [svg.scale("x"), svg.scale("y")];
    const places = cells.map((cell) => ({
      x: sx.apply(cell.column) + sx.bandwidth / 2,
      y: sy.apply(cell.row) + sy.bandwidth / 2,
      lines: [
        `${view.y} ${cell.row}, ${view.x} ${cell.column}`,
        ...(one.method ? [one.method] : []),
        `${measure.label}: ${show(cell.value, measure.form)}`,
      ],
    }));
    probe(host, `${view.title}${one.method ? `, ${one.method}` : ""}`, places, Math.max(30, inner));
  }

  draw();
  return draw;
};
