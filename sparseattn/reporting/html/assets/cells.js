// A map of cells in columns and rows, drawn into a host element and read by pointer and keys.
"use strict";

/**
 * Draws cells {column, row, fill, lines} with a text in each where `text` says one, into `host`, in place of what it holds.
 *
 * `columns` and `rows` are names in order; `left` and `height` are the room of the rows' names and of a row, in pixels;
 * `axis` names the columns. `lines` are what is said of a cell, and `label` names the map.
 */
function drawCells(host, { cells, columns, rows, left, height, axis, label, text, named = (row) => row, ...more }) {
  const width = Math.max(host.clientWidth, left + 12 + columns.length), // no cell has less than nothing
    inner = (width - left - 8) / columns.length;
  const every = Math.max(1, Math.ceil(columns.length / Math.max(1, Math.floor((width - left) / 26))));
  const svg = Plot.plot({
    width,
    height: rows.length * height + 40,
    marginLeft: left,
    marginRight: 4,
    marginTop: 4,
    marginBottom: 36,
    padding: 0.04,
    style: { background: "none" },
    x: {
      type: "band",
      domain: columns,
      label: axis,
      labelArrow: "none",
      ticks: columns.filter((_, k) => k % every === 0),
    },
    y: { type: "band", domain: rows, label: null, tickFormat: named },
    marks: [
      Plot.cell(
        cells.filter((cell) => cell.fill != null),
        { x: "column", y: "row", fill: "fill", rx: 1.5, ...more },
      ),
      text
        ? Plot.text(
            cells.filter((cell) => cell.fill != null),
            { x: "column", y: "row", fontSize: 11, ...text },
          )
        : null,
    ],
    color: { type: "identity" },
  });
  svg.setAttribute("aria-hidden", "true");
  host.replaceChildren(svg);
  const [sx, sy] = [svg.scale("x"), svg.scale("y")];
  const places = cells.map((cell) => ({
    x: sx.apply(cell.column) + sx.bandwidth / 2,
    y: sy.apply(cell.row) + sy.bandwidth / 2,
    lines: cell.lines,
  }));
  probe(host, label, places, { reach: Math.max(30, inner), gap: sy.bandwidth / 2 + 4 });
}
