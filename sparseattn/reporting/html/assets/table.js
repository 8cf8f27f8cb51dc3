// Rows that can be sorted by a click on a column's head and filtered by words.
"use strict";

views.table = (figure) => {
  const scroll = figure.querySelector(".scroll"),
    body = scroll.querySelector("tbody"),
    rows = [...body.rows];
  let by = null,
    falling = false,
    words = [];
  const count = make("span", { class: "count", role: "status" });
  const input = make("input", {
    type: "search",
    placeholder: "such as prose 256",
    oninput: () => {
      words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      draw();
    },
  });
  const heads = [...scroll.querySelectorAll("thead th")];
  heads.forEach((head, i) => {
    head.setAttribute("aria-sort", "none");
    head.replaceChildren(make("button", { type: "button", onclick: () => sort(i) }, head.textContent));
  });
  const methods = new Map(rows.map((row) => [row, row.querySelector("th")?.textContent])); // of rows that name one
  for (const [row, name] of methods) if (name != null) row.querySelector("th").prepend(swatch(name), " ");
  scroll.before(
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
    body.replaceChildren(...shown);
  }

  draw();
  return draw;
};
