// What the explorer can be asked: which token, which layer and head, which method.
"use strict";

/** Makes buttons a group of which one is chosen, by click or by arrow keys; `columns` of them stand in a row. */
function radios(buttons, chosen, columns, choose) {
  buttons.forEach((button, i) => {
    button.setAttribute("role", "radio");
    button.setAttribute("aria-checked", String(i === chosen));
    button.tabIndex = i === chosen ? 0 : -1;
    button.onclick = () => choose(i, false);
    button.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
      if (step === undefined || !buttons[i + step]) return;
      event.preventDefault();
      choose(i + step, true);
    };
  });
}

/** The tokens that ask; `choose(change, host)` is told of another, with the host if keys did it. */
function drawAsks(host, told, choose) {
  const buttons = told.asking.map((row) =>
    make("button", { type: "button", "data-token": row, title: `row ${row.toLocaleString("en")}` }, told.word(row)),
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
      const name = `layer ${number}, head ${head}: off by ${show(error, "share")}`;
      const button = make("button", { type: "button", "aria-label": name, title: name });
      button.style.background = d3.interpolateCividis(Math.min(1, Math.sqrt(error)));
      buttons.push(button);
      grid.append(button);
    }
  });
  radios(buttons, told.layer * told.heads + told.head, told.heads, (i, keys) =>
    choose({ layer: Math.floor(i / told.heads), head: i % told.heads }, keys && host),
  );
  const title = make("h4", {}, `Layer and head, by the error of ${told.chosen.label}`);
  host.replaceChildren(title, grid, ramp(["0 %", "25 %", "100 % or more"]));
}

/** What the head needs, and what each method read of it; a method is chosen by its name. */
function drawFacts(host, told, choose) {
  const needed = told.needed;
  const k = told.at();
  const buttons = [];
  const rows = told.shown.map((i) => {
    const one = told.methods[i];
    const missed = needed.filter((row) => !told.isRead(i, row)).length;
    const name = make("span", {}, one.label);
    buttons.push(make("button", { type: "button", class: "pick" }, swatch(one.label), name));
    const cells = [show(one.attended[k], "count"), show(one.mass[k], "share"), show(one.error[k], "share"), missed];
    return tableRow(buttons.at(-1), cells, i === told.method ? "chosen" : false);
  });
  radios(buttons, told.shown.indexOf(told.method), 1, (i, keys) => choose({ method: told.shown[i] }, keys && host));
  const lead = make(
    "p",
    {},
    "Token ",
    make("strong", {}, told.word(told.last)),
    `, layer ${told.layers[told.layer]}, head ${told.head}: `,
    make("strong", {}, `${show(needed.length, "count")} rows`),
    ` of ${(told.last + 1).toLocaleString("en")} hold ${show(told.part, "share")} of its attention; `,
    `${show(told.far[k], "share")} of it lies beyond sink and window.`,
  );
  const meant = "Held: of its attention, on the rows read. Off by: attention's output. Missed: of the rows needed.";
  const table = make(
    "table",
    {},
    tableHead(["method", "rows read", "held", "off by", "missed"], 0),
    make("tbody", {}, ...rows),
  );
  const group = { class: "scroll", role: "radiogroup", "aria-label": "Method" };
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
    make("th", { scope: "col", class: i > first && i < end ? "number" : false }, name),
  );
  return make("thead", {}, make("tr", {}, ...cells));
}
