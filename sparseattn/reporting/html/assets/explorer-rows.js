// The rows of one head in two forms: along the whole context, and the heaviest in a table.
"use strict";

const EDGE = 4; // pixels left and right of the strip
const LANE = 13; // of a method's lane
const TALL = 64; // of all the attention

/** The context from left to right: attention as bars, and under them a lane a method; a click goes to that row. */
function drawStrip(host, told, goTo) {
  const methods = told.shown;
  const width = host.clientWidth;
  const rows = told.last + 1;
  const bins = Math.max(40, Math.floor((width - 2 * EDGE) / 3));
  const step = (width - 2 * EDGE) / bins;
  const wide = (gap) => Math.max(0, step - gap);
  const height = TALL + 6 + LANE * methods.length + 18;
  const svg = d3.create("svg");
  const draw = (name, attributes) => {
    const one = svg.append(name);
    for (const [key, value] of Object.entries(attributes)) one.attr(key, value);
    return one;
  };
  svg.attr("width", width).attr("height", height).attr("role", "img");
  svg.attr("aria-label", "Attention along the context, and below it the tokens that each method read");

  const most = new Float32Array(bins);
  const got = methods.map(() => new Float32Array(bins)); // share of a bin's rows that is read
  const lost = methods.map(() => new Uint8Array(bins)); // whether a needed one is not
  const needed = new Set(told.needed);
  for (let row = 0; row < rows; row += 1) {
    const bin = Math.min(bins - 1, Math.floor((row * bins) / rows));
    most[bin] = Math.max(most[bin], told.level(row) / 255);
    methods.forEach((i, k) => {
      if (told.isRead(i, row)) got[k][bin] += bins / rows;
      else if (needed.has(row)) lost[k][bin] = 1;
    });
  }
  for (let bin = 0; bin < bins; bin += 1) {
    const x = EDGE + bin * step;
    const high = TALL * most[bin];
    if (high > 0.5) draw("rect", { x, y: TALL - high, width: wide(0.5), height: high, fill: "var(--glow)" });
    methods.forEach((i, k) => {
      const y = TALL + 6 + k * LANE;
      if (got[k][bin]) {
        const opacity = 0.25 + 0.75 * Math.min(1, got[k][bin]);
        const fill = colourOf(told.methods[i].label);
        draw("rect", { class: "read", x, y, width: wide(0.4), height: LANE - 4, fill, opacity });
      }
      if (lost[k][bin]) {
        const width = Math.max(2, wide(0.4));
        draw("rect", { class: "missed", x, y: y + LANE - 6, width, height: 3, fill: "var(--miss)" });
      }
    });
  }
  draw("line", { x1: EDGE, x2: width - EDGE, y1: TALL + 0.5, y2: TALL + 0.5, stroke: "var(--line)" });
  const label = (x, anchor, words) =>
    draw("text", { x, y: height - 4, "text-anchor": anchor, "font-size": 11, fill: "var(--soft)" }).text(words);
  label(EDGE, "start", "token 0");
  label(width - EDGE, "end", `token ${told.last.toLocaleString("en")}`);
  if (width > 620)
    label(width / 2, "middle", "one lane per method, red where it missed needed tokens; click to read there");
  host.replaceChildren(svg.node());
  host.onclick = (event) => {
    const part = (event.clientX - host.getBoundingClientRect().left - EDGE) / (width - 2 * EDGE);
    goTo(Math.max(0, Math.min(rows - 1, Math.round(part * rows))));
  };
}

/** The heaviest of the needed rows beyond sink and window, and who reads them. */
function drawHeaviest(host, told, goTo, most = 20) {
  const methods = told.shown;
  const rows = told.needed.filter((row) => !told.always(row)).slice(0, most);
  if (!rows.length) {
    host.replaceChildren(make("p", { class: "none" }, "All that this head needs is in the sink and the window."));
    return;
  }
  const around = (from, to) => {
    const near = d3.range(Math.max(0, from), Math.min(told.last + 1, to));
    return near
      .map((row) => told.piece(row))
      .join("")
      .replace(/[\s⏎]+/g, " ");
  };
  const line = (row) => {
    const link = make("button", { type: "button", class: "link", onclick: () => goTo(row) }, row.toLocaleString("en"));
    const mark = make("mark", {}, told.pieces ? told.piece(row) : told.word(row));
    const words = told.pieces ? [`…${around(row - 5, row)}`, mark, `${around(row + 1, row + 5)}…`] : [mark];
    return make(
      "tr",
      {},
      make("td", { class: "number" }, link),
      make("td", { class: "number" }, show(told.share(row), "share")),
      ...methods.map((i) =>
        make("td", told.isRead(i, row) ? { class: "yes" } : { class: "no" }, told.isRead(i, row) ? "read" : "missed"),
      ),
      make("td", { class: "words" }, ...words),
    );
  };
  const name = ({ label }) => [swatch(label), make("span", { class: "name" }, label)];
  const head = tableHead(["token", "attention", ...methods.map((i) => name(told.methods[i])), "in the text"], -1, 2);
  const columns = `--methods: ${methods.length}`;
  host.replaceChildren(
    make("table", { class: "heaviest", style: columns }, head, make("tbody", {}, ...rows.map(line))),
  );
}
