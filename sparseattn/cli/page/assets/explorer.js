// One token's attention over its text: which rows hold it, which of them a method read, and which it missed.
"use strict";

views.explorer = (figure, view) => {
  const data = view.data, count = data.heads, layers = data.layers.length;
  const state = { ...data.start };
  const opened = new Set(); // first rows of parts of the text that were opened
  let levels = null, reads = [], whole = false, picked = -1;

  const bytes = async (text) => {
    const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };
  const at = (token = state.token, layer = state.layer, head = state.head) => (token * layers + layer) * count + head;
  const share = (level) => (level ? 10 ** (data.decades * (level / 255 - 1)) : 0);
  const last = () => data.tokens[state.token];
  const piece = (row) => (data.pieces ? data.pieces[row] : `${row}`);
  const words = (row) => piece(row).replace(/\n/g, "⏎").trim() || (piece(row) ? "␣" : "·");
  const always = (row) => row < data.sink || row > last() - data.window;
  const level = (row) => levels[at() * data.rows + row];
  const width = Math.ceil(data.rows / 8);
  const isRead = (method, row) => (reads[method][at() * width + (row >> 3)] >> (row & 7)) & 1;
  const methods = () => data.methods.map((_, i) => i).filter((i) => isShown(data.methods[i].label));

  const asks = make("div", { class: "asks", role: "radiogroup", "aria-label": "Token that asks" });
  const heads = make("div", { class: "heads" }), facts = make("div", { class: "facts-of" });
  const strip = make("div", { class: "strip" });
  const said = make("p", { class: "row-said", role: "status" });
  const text = make("div", { class: "text", tabindex: "0", role: "region", "aria-label": "The text. Left and right go from needed row to needed row." });
  const list = make("div", { class: "scroll" });
  const toggle = make("button", { type: "button", class: "quiet", onclick: () => { whole = !whole; drawText(); } });
  const parts = [
    make("h4", {}, "Token that asks"), asks,
    make("div", { class: "where" }, heads, facts),
    make("h4", {}, "The whole context, from its first row to its last"), strip,
    make("div", { class: "legend" },
      make("span", { class: "key glow" }, "more attention"), make("span", { class: "key read" }, "read by the method"),
      make("span", { class: "key missed" }, "needed and not read"), make("span", { class: "key always" }, "always read: sink and window"), toggle),
    data.pieces ? null : make("p", { class: "none" }, "This trace holds no text, so rows stand as their numbers: capture it with --with-text."),
    said, text, make("h4", {}, "The rows that hold most beyond sink and window"), list];
  figure.append(...parts.filter((part) => part));

  // -- what is chosen --------------------------------------------------------------------------------------------------

  /** Buttons of which one is chosen, by click or arrow keys; `columns` in a row. */
  function radios(buttons, chosen, columns, choose) {
    buttons.forEach((button, i) => {
      button.setAttribute("role", "radio");
      button.setAttribute("aria-checked", String(i === chosen));
      button.tabIndex = i === chosen ? 0 : -1;
      button.onclick = () => choose(i);
      button.onkeydown = (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
        if (step === undefined || i + step < 0 || i + step >= buttons.length) return;
        event.preventDefault();
        choose(i + step, true);
      };
    });
  }

  function choose(change, within) {
    Object.assign(state, change);
    picked = -1;
    opened.clear();
    draw();
    if (within) within.querySelector("[aria-checked=true]").focus({ preventScroll: true });
  }

  function drawAsks() {
    const buttons = data.tokens.map((row) => make("button", { type: "button", "data-token": row, title: `row ${row.toLocaleString("en")}` }, words(row)));
    radios(buttons, state.token, 1, (i, keys) => choose({ token: i }, keys && asks));
    asks.replaceChildren(...buttons);
  }

  function drawHeads() {
    const errors = data.methods[state.method].error;
    const buttons = [];
    for (let layer = 0; layer < layers; layer += 1) {
      for (let head = 0; head < count; head += 1) {
        const error = errors[at(state.token, layer, head)];
        const button = make("button", { type: "button", "aria-label": `layer ${data.layers[layer]}, head ${head}: off by ${show(error, "share")}`, title: `layer ${data.layers[layer]}, head ${head}: off by ${show(error, "share")}` });
        button.style.background = d3.interpolateCividis(Math.min(1, Math.sqrt(error)));
        buttons.push(button);
      }
    }
    radios(buttons, state.layer * count + state.head, count, (i, keys) => choose({ layer: Math.floor(i / count), head: i % count }, keys && heads));
    const grid = make("div", { class: "grid", role: "radiogroup", "aria-label": "Layer and head" });
    grid.style.gridTemplateColumns = `auto repeat(${count}, minmax(6px, 1fr))`;
    for (let layer = 0; layer < layers; layer += 1) grid.append(make("span", {}, String(data.layers[layer])), ...buttons.slice(layer * count, (layer + 1) * count));
    heads.replaceChildren(make("h4", {}, `Layer and head, by the error of ${data.methods[state.method].label}`), grid,
      ramp(["0 %", "25 %", "100 % or more"]));
  }

  function drawFacts(needed) {
    const shown = methods(), rows = shown.map((i) => {
      const one = data.methods[i], k = at(), missed = needed.filter((row) => !isRead(i, row)).length;
      const button = make("button", { type: "button", class: "pick" }, swatch(one.label), make("span", {}, one.label));
      return { i, button, row: make("tr", { class: i === state.method ? "chosen" : "" }, make("th", { scope: "row" }, button),
        ...[show(one.attended[k], "count"), show(one.mass[k], "share"), show(one.error[k], "share"), show(missed, "count")].map((cell) => make("td", { class: "number" }, cell))) };
    });
    radios(rows.map((one) => one.button), shown.indexOf(state.method), 1, (i, keys) => choose({ method: shown[i] }, keys && facts));
    const head = ["method", "rows read", "held", "off by", "missed"];
    facts.replaceChildren(
      make("p", {}, "Token ", make("strong", {}, words(last())), `, layer ${data.layers[state.layer]}, head ${state.head}: `,
        make("strong", {}, `${show(data.needed[at()], "count")} rows`), ` of ${(last() + 1).toLocaleString("en")} hold ${show(data.share, "share")} of its attention; ${show(data.far[at()], "share")} of it lies beyond sink and window.`),
      make("p", { class: "none" }, "Held: of its attention, on the rows read. Off by: attention's output. Missed: of the rows needed."),
      make("div", { class: "scroll", role: "radiogroup", "aria-label": "Method" }, make("table", {}, make("thead", {}, make("tr", {}, ...head.map((name, i) => make("th", { scope: "col", class: i ? "number" : "" }, name)))), make("tbody", {}, ...rows.map((one) => one.row)))));
  }

  // -- the rows --------------------------------------------------------------------------------------------------------

  /** The fewest rows that hold most of the attention, heaviest first. */
  function neededRows() {
    const rows = d3.range(last() + 1).filter((row) => level(row) > 0).sort((a, b) => level(b) - level(a) || b - a);
    return rows.slice(0, data.needed[at()]);
  }

  function drawStrip(needed) {
    const shown = methods(), wide = strip.clientWidth, left = 4, lane = 13, high = 64, bins = Math.max(40, Math.floor((wide - 2 * left) / 3)), rows = last() + 1;
    const step = (wide - 2 * left) / bins, per = rows / bins, tall = high + 6 + lane * shown.length + 18;
    const svg = d3.create("svg").attr("width", wide).attr("height", tall).attr("role", "img").attr("aria-label", "Attention along the context, and below it the rows that each method read");
    const most = new Float32Array(bins), got = shown.map(() => new Float32Array(bins)), lost = shown.map(() => new Uint8Array(bins)), isNeeded = new Uint8Array(rows);
    for (const row of needed) isNeeded[row] = 1;
    for (let row = 0; row < rows; row += 1) {
      const bin = Math.min(bins - 1, Math.floor(row / per));
      most[bin] = Math.max(most[bin], level(row));
      shown.forEach((i, k) => { if (isRead(i, row)) got[k][bin] += 1 / per; else if (isNeeded[row]) lost[k][bin] = 1; });
    }
    for (let bin = 0; bin < bins; bin += 1) {
      const x = left + bin * step, tallness = (high * most[bin]) / 255;
      if (tallness > 0.5) svg.append("rect").attr("x", x).attr("y", high - tallness).attr("width", step - 0.5).attr("height", tallness).attr("fill", "var(--glow)");
      shown.forEach((i, k) => {
        const y = high + 6 + k * lane;
        if (got[k][bin]) svg.append("rect").attr("class", "read").attr("x", x).attr("y", y).attr("width", step - 0.4).attr("height", lane - 4).attr("fill", colourOf(data.methods[i].label)).attr("opacity", 0.25 + 0.75 * Math.min(1, got[k][bin]));
        if (lost[k][bin]) svg.append("rect").attr("class", "missed").attr("x", x).attr("y", y + lane - 6).attr("width", Math.max(2, step - 0.4)).attr("height", 3).attr("fill", "var(--miss)");
      });
    }
    svg.append("line").attr("x1", left).attr("x2", wide - left).attr("y1", high + 0.5).attr("y2", high + 0.5).attr("stroke", "var(--line)");
    const label = (x, anchor, words) => svg.append("text").attr("x", x).attr("y", tall - 4).attr("text-anchor", anchor).attr("font-size", 11).attr("fill", "var(--soft)").text(words);
    label(left, "start", "row 0");
    label(wide - left, "end", `row ${last().toLocaleString("en")}`);
    if (wide > 500) label(wide / 2, "middle", "click to read there; a lane a method, red where it missed");
    strip.replaceChildren(svg.node());
    strip.onclick = (event) => {
      const x = event.clientX - strip.getBoundingClientRect().left - left;
      goTo(Math.max(0, Math.min(rows - 1, Math.round((x / (wide - 2 * left)) * rows))));
    };
  }

  function drawText() {
    const needed = new Set(neededRows()), page = data.methods[state.method].page, near = 5;
    const rows = d3.max(data.tokens) + 1; // tokens that come later and ask too can be clicked
    text.style.setProperty("--read", colourOf(data.methods[state.method].label));
    toggle.textContent = whole ? "Show the parts that matter" : "Show the whole text";
    const keep = new Uint8Array(rows);
    for (let row = 0; row < rows; row += 1) {
      if (whole || (needed.has(row) && !always(row)) || (isRead(state.method, row) && !always(row) && page > 1) || row > last() - 24 || row > last() || opened.has(row) || row === picked) {
        keep.fill(1, Math.max(0, row - near), Math.min(rows, row + near + 1));
      }
    }
    const parts = [];
    for (let row = 0; row < rows; row += 1) {
      if (!keep[row]) {
        let end = row;
        while (end < rows && !keep[end]) end += 1;
        const from = row, to = end;
        parts.push(make("button", { type: "button", class: "gap", onclick: () => { for (let i = from; i < to; i += 1) opened.add(i); drawText(); } }, `⋯ ${(to - from).toLocaleString("en")} tokens ⋯`));
        row = end - 1;
        continue;
      }
      parts.push(token(row, needed, page));
    }
    text.replaceChildren(...parts);
    text.onclick = (event) => {
      const found = event.target.closest("[data-row]");
      if (!found) return;
      const row = Number(found.dataset.row), asking = data.tokens.indexOf(row);
      if (asking >= 0 && asking !== state.token) choose({ token: asking });
      else pick(row);
    };
    text.onpointerover = (event) => {
      const found = event.target.closest("[data-row]");
      if (found) say(Number(found.dataset.row));
    };
    text.onpointerleave = () => say(picked);
    text.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || event.target !== text) return;
      event.preventDefault();
      const order = [...needed].filter((row) => !always(row)).sort((a, b) => a - b);
      const next = step > 0 ? order.find((row) => row > picked) : order.reverse().find((row) => row < (picked < 0 ? rows : picked));
      if (next !== undefined) goTo(next);
    };
  }

  function token(row, needed, page) {
    const names = [];
    if (row > last()) names.push("later");
    else if (always(row)) names.push("always");
    else if (isRead(state.method, row)) names.push("read");
    else if (needed.has(row)) names.push("missed");
    if (data.tokens.includes(row)) names.push(row === last() ? "asking" : "ask");
    if (row === picked) names.push("picked");
    if (page > 1 && row >= data.sink && (row - data.sink) % page === 0 && !always(row)) names.push("page-start");
    const raw = !data.pieces ? `${row} ` : whole ? piece(row).replace(/\n/g, "⏎\n") : piece(row).replace(/\n/g, "⏎").replace(/ +/g, " ");
    const one = make("span", { class: names.join(" ") || false, "data-row": row }, raw || "·");
    const glow = row > last() ? 0 : Math.max(0, Math.min(1, (data.decades * (level(row) / 255 - 1) + 4) / 3.4));
    if (glow > 0.02) one.style.backgroundColor = `color-mix(in srgb, var(--glow) ${Math.round(92 * glow)}%, transparent)`;
    return one;
  }

  function say(row) {
    if (row < 0) { said.textContent = "Point at a token, or click one, to see what it weighs and who reads it."; return; }
    if (row > last()) { said.textContent = `Row ${row.toLocaleString("en")} comes after the token that asks.`; return; }
    const by = methods().map((i) => `${data.methods[i].label} ${isRead(i, row) ? "reads it" : "does not"}`);
    const page = data.methods[state.method].page;
    const where = page > 1 && row >= data.sink && !always(row) ? `, page ${Math.floor((row - data.sink) / page)}` : "";
    const who = always(row) ? "every method reads it, as it is of the sink, the window or waits to be sealed" : by.join(", ");
    said.replaceChildren(make("strong", {}, `“${words(row)}”`), ` row ${row.toLocaleString("en")}${where}: ${show(share(level(row)), "share")} of the attention; ${who}.`);
  }

  function pick(row) {
    picked = row;
    text.querySelectorAll(".picked").forEach((one) => one.classList.remove("picked"));
    text.querySelector(`[data-row="${row}"]`)?.classList.add("picked");
    say(row);
  }

  function goTo(row) {
    picked = row;
    if (!text.querySelector(`[data-row="${row}"]`)) drawText();
    pick(row);
    const one = text.querySelector(`[data-row="${row}"]`);
    text.scrollTop += one.getBoundingClientRect().top - text.getBoundingClientRect().top - text.clientHeight / 3;
  }

  function drawList(needed) {
    const shown = methods(), rows = needed.filter((row) => !always(row)).slice(0, 20);
    const around = (from, to) => d3.range(Math.max(0, from), Math.min(last() + 1, to)).map(piece).join("").replace(/\s+/g, " ");
    const head = ["row", "attention", ...shown.map((i) => data.methods[i].label), "in the text"];
    const line = (row) => make("tr", {},
      make("td", { class: "number" }, make("button", { type: "button", class: "link", onclick: () => goTo(row) }, row.toLocaleString("en"))),
      make("td", { class: "number" }, show(share(level(row)), "share")),
      ...shown.map((i) => make("td", { class: isRead(i, row) ? "yes" : "no" }, isRead(i, row) ? "read" : "missed")),
      data.pieces
        ? make("td", { class: "words" }, `…${around(row - 5, row)}`, make("mark", {}, piece(row).replace(/\n/g, "⏎")), `${around(row + 1, row + 5)}…`)
        : make("td", { class: "words" }, make("mark", {}, words(row))));
    list.replaceChildren(make("table", { class: "heaviest" },
      make("thead", {}, make("tr", {}, ...head.map((name, i) => make("th", { scope: "col", class: i < 2 ? "number" : "" }, name)))),
      make("tbody", {}, ...rows.map(line))));
    if (!rows.length) list.replaceChildren(make("p", { class: "none" }, "All that this head needs is in the sink and the window."));
  }

  function draw() {
    if (!levels) return;
    const shown = methods();
    if (shown.length && !shown.includes(state.method)) state.method = shown[0];
    const needed = neededRows();
    drawAsks();
    drawHeads();
    drawFacts(needed);
    drawStrip(needed);
    drawText();
    drawList(needed);
    say(picked);
    if (picked < 0) text.scrollTop = 0;
  }

  if (!window.DecompressionStream) {
    said.textContent = "This browser is too old to unpack the weights: Chrome 111, Firefox 113 and Safari 16.4 can.";
    return draw;
  }
  Promise.all([bytes(data.levels), ...data.methods.map((one) => bytes(one.rows))]).then(([first, ...others]) => {
    levels = first;
    reads = others;
    draw();
    figure.dataset.ready = "yes";
  });
  return draw;
};
