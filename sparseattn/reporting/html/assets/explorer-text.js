// The text, coloured by attention: rows that the chosen method read are underlined, needed ones that it missed framed.
"use strict";

const NEAR = 5; // rows around one that matters
const ENDING = 24; // rows at the end that are always shown

class RowsText {
  /** `asked(i)` is called when a token that asks, number i, is clicked. */
  constructor(told, asked) {
    this.told = told;
    this.asked = asked;
    this.whole = false;
    this.opened = new Set(); // rows of parts that were opened
    this.picked = -1;
    this.said = make("p", { class: "row-said", role: "status" });
    const name = "The text. Left and right go from needed row to needed row.";
    this.host = make("div", { class: "text", tabindex: "0", role: "region", "aria-label": name });
    this.toggle = make("button", { type: "button", class: "quiet" });
    this.toggle.onclick = () => {
      this.whole = !this.whole;
      this.draw();
    };
    const rowOf = (event) => event.target.closest("[data-row]")?.dataset.row;
    this.host.onclick = (event) => rowOf(event) && this.click(Number(rowOf(event)));
    this.host.onpointerover = (event) => rowOf(event) && this.say(Number(rowOf(event)));
    this.host.onpointerleave = () => this.say(this.picked);
    this.host.onkeydown = (event) => this.press(event);
  }

  /** Forgets what was picked and opened, before another head is drawn. */
  reset() {
    this.picked = -1;
    this.opened.clear();
    this.host.scrollTop = 0;
  }

  draw() {
    const { told } = this;
    this.needed = new Set(told.needed);
    this.host.style.setProperty("--read", colourOf(told.chosen.label));
    this.toggle.textContent = this.whole ? "Show the parts that matter" : "Show the whole text";
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
    this.say(this.picked);
  }

  matters(row) {
    const { told } = this;
    if (this.whole || row > told.last - ENDING || this.opened.has(row) || row === this.picked) return true;
    const read = told.chosen.page > 1 && told.isRead(told.method, row); // a page is text that can be read
    return !told.always(row) && (this.needed.has(row) || read);
  }

  gap(from, to) {
    const open = () => {
      for (let row = from; row < to; row += 1) this.opened.add(row);
      this.draw();
    };
    return make(
      "button",
      { type: "button", class: "gap", onclick: open },
      `⋯ ${(to - from).toLocaleString("en")} tokens ⋯`,
    );
  }

  token(row) {
    const { told } = this;
    const names = [];
    if (row > told.last) names.push("later");
    else if (told.always(row)) names.push("always");
    else if (told.isRead(told.method, row)) names.push("read");
    else if (this.needed.has(row)) names.push("missed");
    if (told.asking.includes(row)) names.push(row === told.last ? "asking" : "ask");
    if (row === this.picked) names.push("picked");
    if (told.page(row) > told.page(row - 1)) names.push("page-start");
    const piece = told.piece(row) || "·";
    const words = this.whole ? piece.replace(/⏎/g, "⏎\n") : piece.replace(/ +/g, " ");
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
    const from = this.picked < 0 && step < 0 ? Infinity : this.picked;
    const next = order.find((row) => step * (row - from) > 0);
    if (next !== undefined) this.goTo(next);
  }

  /** Says of a row what it weighs and who reads it. */
  say(row) {
    const { told } = this;
    if (row < 0) {
      this.said.textContent = "Point at a token, or click one, to see what it weighs and who reads it.";
    } else if (row > told.last) {
      this.said.textContent = `Row ${row.toLocaleString("en")} comes after the token that asks.`;
    } else {
      const by = told.shown.map((i) => `${told.methods[i].label} ${told.isRead(i, row) ? "reads it" : "does not"}`);
      const who = told.always(row) ? "every method reads it, as it is of the sink or the window" : by.join(", ");
      const page = told.page(row) < 0 ? "" : `, page ${told.page(row)}`;
      const weighs = `${show(told.share(row), "share")} of the attention`;
      const where = ` row ${row.toLocaleString("en")}${page}: ${weighs}; ${who}.`;
      this.said.replaceChildren(make("strong", {}, `“${told.word(row)}”`), where);
    }
  }

  find(row) {
    return this.host.querySelector(`[data-row="${row}"]`);
  }

  pick(row) {
    this.host.querySelectorAll(".picked").forEach((one) => one.classList.remove("picked"));
    this.picked = row;
    this.find(row)?.classList.add("picked");
    this.say(row);
  }

  /** Brings a row into view, and the text around it. */
  goTo(row) {
    this.pick(row);
    if (!this.find(row)) this.draw();
    const off = this.find(row).getBoundingClientRect().top - this.host.getBoundingClientRect().top;
    this.host.scrollTop += off - this.host.clientHeight / 3;
  }
}
