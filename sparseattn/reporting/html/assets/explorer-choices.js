// What the explorer can be asked: which token, which layer and head, which method.
"use strict";

/** The tokens that ask; `choose(change, host)` is told of another, with the host if keys did it. */
function drawAsks(host, told, choose) {
  const buttons = told.asking.map((row) =>
    make("button", { type: "button", "data-token": row, title: `token ${row.toLocaleString("en")}` }, told.word(row)),
  );
  radios(buttons, told.token, 1, (i, keys) => choose({ token: i }, keys && host));
  host.replaceChildren(...buttons);
}

/** Layers by heads, coloured by the error of the chosen method. */
function drawHeads(host, told, choose) {
  const buttons = [];
  const grid = make("div", { class: "grid", role: "radiogroup", "aria-label": "Layer and head" });
  grid.style.gridTemplateColumns = `auto repeat(${told.heads}, minmax(6px, 1fr))`;
  told.layers.forEach((number, layer) => {
    grid.append(make("span", {}, String(number)));
    for (let head = 0; head < told.heads; head += 1) {
      const error = told.chosen.error[told.at(layer, head)];
      const name = `layer ${number}, head ${head}: error ${show(error, "share")}`;
      const button = make("button", { type: "button", "aria-label": name, title: name });
      button.style.background = shade(Math.sqrt(error), true);
      buttons.push(button);
      grid.append(button);
    }
  });
  radios(buttons, told.layer * told.heads + told.head, told.heads, (i, keys) =>
    choose({ layer: Math.floor(i / told.heads), head: i % told.heads }, keys && host),
  );
  const title = make("h4", {}, `Error of ${told.chosen.label} by layer and head`);
  host.replaceChildren(
    title,
    grid,
    ramp(
      [0, 0.25, 1].map((error) => `${error === 1 ? "≥\u00a0" : ""}${show(error, "share")}`),
      true,
    ),
  );
}

/** What the head needs, and what each method read of it; a method is chosen by its name. */
function drawFacts(host, told, choose) {
  const needed = told.needed;
  const k = told.at();
  const buttons = [];
  const rows = told.shown.map((i) => {
    const one = told.methods[i];
    const missed = needed.filter((row) => !told.isRead(i, row)).length;
    const fresh = told.token ? told.fresh(i).length : "–";
    buttons.push(make("button", { type: "button", class: "pick" }, swatch(one.label), nameOf(one.label)));
    const cells = [
      show(one.attended[k], "count"),
      show(one.mass[k], "share"),
      show(one.error[k], "share"),
      missed,
      fresh,
    ];
    return tableRow(buttons.at(-1), cells, told.compared.includes(i) ? "chosen" : false);
  });
  radios(buttons, told.shown.indexOf(told.method), 1, (i, keys) => choose({ method: told.shown[i] }, keys && host));
  const lead = make(
    "p",
    {},
    "Token ",
    make("strong", {}, told.word(told.last)),
    `, layer ${told.layers[told.layer]}, head ${told.head}: `,
    make("strong", {}, needed.length === 1 ? "1 token" : `${show(needed.length, "count")} tokens`),
    ` of ${(told.last + 1).toLocaleString("en")} ${needed.length === 1 ? "holds" : "hold"} ${show(told.part, "share")} of its attention. `,
    `${show(told.far[k], "share")} of it is on tokens other than the first ${told.sink} and the last ${told.window}.`,
  );
  const meant =
    "Mass: share of the attention on the tokens read. Error: of attention's output. Missed: needed tokens that are not read. " +
    "New: tokens read that the step before did not read.";
  const table = make(
    "table",
    {},
    tableHead(["method", "tokens read", "mass", "error", "missed", "new"], 0),
    make("tbody", {}, ...rows),
  );
  const group = { class: "ruled", role: "radiogroup", "aria-label": "Method" };
  host.replaceChildren(lead, make("p", { class: "none" }, meant), make("div", group, table));
}

/** A row of a small table: its head, and cells of numbers. */
function tableRow(head, cells, kind) {
  const numbers = cells.map((cell) => make("td", { class: "number" }, String(cell)));
  return make("tr", { class: kind }, make("th", { scope: "row" }, head), ...numbers);
}

/** The head of a small table; columns from `first` to `end` hold numbers. */
function tableHead(names, first, end = names.length) {
  const cells = names.map((name, i) =>
    make("th", { scope: "col", class: i > first && i < end ? "number" : false }, ...[name].flat()),
  );
  return make("thead", {}, make("tr", {}, ...cells));
}
