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
    const error = measure.better === "low";
    const colour = (value) => ({ fill: shade(part(value), error), strong: part(value) > 0.5 });
    const clipped = measure.top == null && values[values.length - 1] > most;
    legend.replaceChildren(
      ramp(
        [
          show(least, measure.form),
          show(middle, measure.form),
          `${clipped ? "≥\u00a0" : ""}${show(most, measure.form)}`,
        ],
        error,
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
      const name = one.method == null ? null : make("h4", {}, swatch(one.method), nameOf(one.method));
      const panel = make("div", { class: "panel", "data-method": one.method ?? false }, name, host);
      panels.append(panel);
      drawPanel(host, one, colour);
    }
  }

  function drawPanel(host, one, colour) {
    const rows = one.rows.map(String),
      columns = one.columns.map((column) => show(column, typeof column === "number" ? "count" : "text")),
      names = rows.filter((row) => !view.methods || isShown(row));
    const cells = rows.flatMap((row, i) =>
      columns.map((column, k) => {
        const value = one.values[measure.key][i][k];
        return {
          row,
          column,
          value,
          ...(value == null ? { fill: null } : colour(value)),
          lines: [
            `${view.y} ${row}, ${view.x} ${column}`,
            ...(one.method ? [one.method] : []),
            `${measure.label}: ${show(value, measure.form)}`,
          ],
        };
      }),
    );
    const width = host.clientWidth,
      left = Math.min(0.45 * width, 14 + d3.max(names, (row) => row.length) * 6.6 || 0),
      inner = (width - left - 8) / columns.length,
      height = view.methods ? 24 : Math.max(14, Math.min(26, inner)),
      letters = Math.floor((left - 10) / 6.4);
    drawCells(host, {
      cells: cells.filter((cell) => names.includes(cell.row)),
      columns,
      rows: names,
      left,
      height,
      axis: view.x,
      label: `${view.title}${one.method ? `, ${one.method}` : ""}`,
      named: (row) => (row.length > letters ? `${row.slice(0, letters - 1)}…` : row),
      text:
        inner >= 36 && height >= 18
          ? {
              text: (cell) => show(cell.value, measure.form).replace("\u00a0%", ""),
              fill: (cell) => (cell.strong ? "var(--card)" : "var(--ink)"),
            }
          : null,
    });
  }

  draw();
  return draw;
};
