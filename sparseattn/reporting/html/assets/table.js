// Rows that can be sorted by a click on a column's head and filtered by words.
"use strict";

views.table = (figure, view) => {
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
  const heads = view.columns.map((column, i) => {
    const button = make("button", { type: "button", onclick: () => sort(i) }, column.label);
    return make("th", { scope: "col", "aria-sort": "none", class: column.form === "text" ? "" : "number" }, button);
  });
  const body = make("tbody");
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body);
  figure.append(
    make("div", { class: "bar" }, make("label", { class: "choice" }, make("span", {}, "Filter"), input), count),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": view.title }, table),
  );

  function sort(i) {
    falling = by === i ? !falling : false;
    by = i;
    heads.forEach((head, k) => head.setAttribute("aria-sort", k !== i ? "none" : falling ? "descending" : "ascending"));
    draw();
  }

  function draw() {
    const text = (row) =>
      row
        .map((cell, i) => show(cell, view.columns[i].form))
        .join(" ")
        .toLowerCase();
    let rows = view.rows.filter(
      (row) => (view.method == null || isShown(row[view.method])) && words.every((word) => text(row).includes(word)),
    );
    if (by != null) {
      const less = (a, b) =>
        typeof a === "string" || typeof b === "string"
          ? String(a).localeCompare(String(b), "en", { numeric: true })
          : a - b;
      rows = rows.slice().sort((a, b) => (a[by] == null) - (b[by] == null) || (falling ? -1 : 1) * less(a[by], b[by]));
    }
    count.textContent =
      rows.length === view.rows.length ? `${rows.length} rows` : `${rows.length} of ${view.rows.length} rows`;
    body.replaceChildren(
      ...rows.map((row) =>
        make(
          "tr",
          {},
          ...row.map((cell, i) => {
            const shown = show(cell, view.columns[i].form);
            return i === view.method
              ? make("th", { scope: "row" }, swatch(cell), ` ${shown}`)
              : make("td", { class: view.columns[i].form === "text" ? "" : "number" }, shown);
          }),
        ),
      ),
    );
  }

  draw();
  return draw;
};
