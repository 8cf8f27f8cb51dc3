// The text, coloured by attention: rows that a method read are underlined, needed ones that it missed framed.
"use strict";

const NEAR = 5; // rows around one that matters
const ENDING = 24; // rows at the end that are always shown

class RowsText {
  /**
   * `which` is the place of its method among those compared. `panes` are all texts that are shown, this among them: they
   * show the same parts, and what is picked in one is picked in all. `asked(i)` is called when a token that asks, number
   * i, is clicked, and `say(row)` when there is something to be said of a row.
   */
  constructor(told, which, panes, { asked, say }) {
    Object.assign(this, { told, which, panes, asked, say });
    this.title = make("h4", { class: "pane-title" });
    const name = "The text. Left and right go from needed token to needed token.";
    this.host = make("div", { class: "text", tabindex: "0", role: "region" });
    this.pane = make("div", { class: "pane" }, this.title, this.host);
    this.name = (label) => this.host.setAttribute("aria-label", `${label}: ${name[0].toLowerCase()}${name.slice(1)}`);
    const rowOf = (event) => event.target.closest("[data-row]")?.dataset.row;
    this.host.onclick = (event) => rowOf(event) && this.click(Number(rowOf(event)));
    this.host.onpointerover = (event) => rowOf(event) && say(Number(rowOf(event)));
    this.host.onpointerleave = () => say(told.picked);
    this.host.onkeydown = (event) => this.press(event);
    this.host.onscroll = () => this.follow();
  }

  get method() {
    return this.told.compared[this.which];
  }

  draw() {
    const { told, method } = this;
    const { label } = told.methods[method];
    this.needed = new Set(told.needed);
    this.fresh = new Set(told.fresh(method));
    this.name(label);
    this.host.style.setProperty("--read", colourOf(label));
    this.title.replaceChildren(swatch(label), nameOf(label));
    const rows = Math.max(...told.asking) + 1; // those of tokens that ask later can be clicked
    const keep = new Uint8Array(rows);
    for (let row = 0; row < rows; row += 1) {
      if (this.matters(row)) keep.fill(1, Math.max(0, row - NEAR), Math.min(rows, row + NEAR + 1));
    }
    const parts = [];
    for (let row = 0; row < rows; row += 1) {
      if (keep[row]) {
        parts.push(this.token(row));
        continue;
      }
      let end = row;
      while (end < rows && !keep[end]) end += 1;
      parts.push(this.gap(row, end));
      row = end - 1;
    }
    this.host.replaceChildren(...parts);
  }

  matters(row) {
    const { told } = this;
    if (told.whole || row > told.last - ENDING || told.opened.has(row) || row === told.picked) return true;
    const paged = (method) => told.methods[method].page > 1 && told.isRead(method, row); // a page is text that can be read
    return !told.always(row) && (this.needed.has(row) || told.compared.some(paged));
  }

  gap(from, to) {
    const open = () => {
      for (let row = from; row < to; row += 1) this.told.opened.add(row);
      this.panes.forEach((pane) => pane.draw());
    };
    return make(
      "button",
      { type: "button", class: "gap", onclick: open },
      `⋯ ${(to - from).toLocaleString("en")} tokens ⋯`,
    );
  }

  token(row) {
    const { told, method } = this;
    const names = [];
    if (row > told.last) names.push("later");
    else if (told.always(row)) names.push("always");
    else if (told.isRead(method, row)) names.push(...(this.fresh.has(row) ? ["read", "fresh"] : ["read"]));
    else if (this.needed.has(row)) names.push("missed");
    if (told.asking.includes(row)) names.push(row === told.last ? "asking" : "ask");
    if (row === told.picked) names.push("picked");
    if (told.page(method, row) > told.page(method, row - 1)) names.push("page-start");
    const piece = told.piece(row) || "·";
    const words = told.whole ? piece.replace(/⏎/g, "⏎\n") : piece.replace(/ +/g, " ");
    const one = make("span", { class: names.join(" ") || false, "data-row": row }, words);
    const glow = row > told.last ? 0 : Math.round(92 * told.glow(row));
    if (glow > 1) one.style.backgroundColor = `color-mix(in srgb, var(--glow) ${glow}%, transparent)`;
    return one;
  }

  click(row) {
    const asking = this.told.asking.indexOf(row);
    if (asking >= 0 && asking !== this.told.token) this.asked(asking);
    else this.pick(row);
  }

  press(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.target !== this.host) return;
    event.preventDefault();
    const order = [...this.needed].filter((row) => !this.told.always(row)).sort((a, b) => step * (a - b));
    const from = this.told.picked < 0 && step < 0 ? Infinity : this.told.picked;
    const next = order.find((row) => step * (row - from) > 0);
    if (next !== undefined) this.goTo(next);
  }

  find(row) {
    return this.host.querySelector(`[data-row="${row}"]`);
  }

  pick(row) {
    this.told.picked = row;
    for (const pane of this.panes) {
      pane.host.querySelectorAll(".picked").forEach((one) => one.classList.remove("picked"));
      pane.find(row)?.classList.add("picked");
    }
    this.say(row);
  }

  /** Brings a row into view, and the text around it. */
  goTo(row) {
    this.pick(row);
    if (!this.find(row)) this.panes.forEach((pane) => pane.draw());
    const off = this.find(row).getBoundingClientRect().top - this.host.getBoundingClientRect().top;
    this.host.scrollTop += off - this.host.clientHeight / 3;
  }

  /** Lets the other texts show the part that this one is scrolled to. */
  follow() {
    for (const pane of this.panes) {
      if (pane !== this && pane.host.scrollTop !== this.host.scrollTop) pane.host.scrollTop = this.host.scrollTop;
    }
  }
}
