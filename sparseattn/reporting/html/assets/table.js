// Rows that can be sorted by a click on a column's head and filtered by words, a screen's worth of them until all are
// asked for. Where there is no room for columns, each row is a card: the style sheet names its cells by `data-head`.
"use strict";

const SCREENFUL = 15; // rows of a table that is longer, before all of them are asked for

views.table = (figure) => {
  const table = figure.querySelector("table"),
    body = table.querySelector("tbody"),
    rows = [...body.rows];
  let by = null,
    falling = false,
    whole = rows.length <= SCREENFUL + 3,
    words = [];
  const count = make("span", { class: "count", role: "status" });
  const input = make("input", {
    type: "search",
    placeholder: `such as ${rows[0]?.cells[0].textContent ?? "prose"}`,
    oninput: () => {
      words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      draw();
    },
  });
  const rest = make("button", {
    type: "button",
    class: "rest",
    onclick: () => {
      whole = true;
      draw();
    },
  });
  table.after(rest);
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, i) => {
    head.setAttribute("aria-sort", "none");
    head.replaceChildren(make("button", { type: "button", onclick: () => sort(i) }, head.textContent));
  });
  const methods = new Map(rows.map((row) => [row, row.querySelector("th")?.textContent])); // of rows that name one
  for (const row of rows) [...row.cells].forEach((cell, i) => (cell.dataset.head = heads[i].textContent));
  for (const [row, name] of methods) {
    if (name == null) continue;
    row.querySelector("th").replaceChildren(make("span", { class: "method" }, swatch(name), nameOf(name)));
  }
  table.before(
    make("div", { class: "bar" }, make("label", { class: "choice" }, make("span", {}, "Filter"), input), count),
  );

  function sort(i) {
    falling = by === i ? !falling : false;
    by = i;
    heads.forEach((head, k) => head.setAttribute("aria-sort", k !== i ? "none" : falling ? "descending" : "ascending"));
    draw();
  }

  /** A cell's number, its text where it has none, and nothing where it is empty. */
  function valueOf(row) {
    const cell = row.cells[by];
    if ("missing" in cell.dataset) return null;
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  }

  function draw() {
    let shown = rows.filter((row) => {
      const text = row.textContent.toLowerCase();
      return (methods.get(row) == null || isShown(methods.get(row))) && words.every((word) => text.includes(word));
    });
    if (by != null) {
      const less = (a, b) =>
        typeof a === "string" || typeof b === "string"
          ? String(a).localeCompare(String(b), "en", { numeric: true })
          : a - b;
      const keyed = shown.map((row) => [valueOf(row), row]);
      keyed.sort(([a], [b]) => (a == null) - (b == null) || (falling ? -1 : 1) * less(a, b));
      shown = keyed.map(([, row]) => row);
    }
    count.textContent = shown.length === rows.length ? `${rows.length} rows` : `${shown.length} of ${rows.length} rows`;
    rest.hidden = whole || shown.length <= SCREENFUL;
    rest.textContent = `Show all ${shown.length} rows`;
    body.replaceChildren(...(rest.hidden ? shown : shown.slice(0, SCREENFUL)));
  }

  draw();
  return draw;
};
