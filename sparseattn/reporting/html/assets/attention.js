// What the explorer knows of a trace: full attention's weights, the rows that methods read, and what is chosen of them.
"use strict";

class Attention {
  /** `data` as the page holds it; the weights are there once `load` is through. */
  constructor(data) {
    Object.assign(this, data);
    Object.assign(this, data.start); // token, layer, head, method: those chosen, as numbers in their lists
    this.beside = -1; // number of a second method whose text is shown too
    this.asking = data.tokens;
    this.stride = Math.ceil(data.rows / 8); // bytes of a head's bits
  }

  async load() {
    const bytes = async (text) => {
      const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
      const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
      return new Uint8Array(await new Response(stream).arrayBuffer());
    };
    const unpacked = [this.levels, ...this.methods.map((one) => one.rows)].map(bytes);
    [this.weights, ...this.read] = await Promise.all(unpacked);
  }

  /** Where a head of the token that asks stands in lists of all heads. */
  at(layer = this.layer, head = this.head, token = this.token) {
    return (token * this.layers.length + layer) * this.heads + head;
  }

  /** The row of the token that asks, its last. */
  get last() {
    return this.asking[this.token];
  }

  /** Numbers of the methods that are switched on. */
  get shown() {
    return this.methods.map((_, i) => i).filter((i) => isShown(this.methods[i].label));
  }

  /** The method whose rows the text shows. */
  get chosen() {
    return this.methods[this.method];
  }

  /** Numbers of the methods whose texts are shown: one, or two side by side. */
  get compared() {
    return this.beside < 0 ? [this.method] : [this.method, this.beside];
  }

  level(row) {
    return this.weights[this.at() * this.rows + row];
  }

  /** The share of the attention that a row has. */
  share(row) {
    const level = this.level(row);
    return level ? 10 ** (this.decades * (level / 255 - 1)) : 0;
  }

  /** How far a row glows, 0 to 1: from one in ten thousand of the attention to a quarter of it. */
  glow(row) {
    return Math.max(0, Math.min(1, (this.decades * (this.level(row) / 255 - 1) + 4) / 3.4));
  }

  isRead(method, row, at = this.at()) {
    return Boolean((this.read[method][at * this.stride + (row >> 3)] >> (row & 7)) & 1);
  }

  /** The rows beyond sink and window that a method reads, and did not read at the token before. */
  fresh(method) {
    if (!this.token) return [];
    const before = this.at(this.layer, this.head, this.token - 1);
    const rows = d3.range(this.sink, this.last - this.window + 1);
    return rows.filter((row) => this.isRead(method, row) && !this.isRead(method, row, before));
  }

  /** Whether every method reads a row, as it is of the sink or the window. */
  always(row) {
    return row < this.sink || row > this.last - this.window;
  }

  /** The fewest rows that hold most of the attention, heaviest first. */
  get needed() {
    const rows = d3.range(this.last + 1).filter((row) => this.level(row) > 0);
    return rows.sort((a, b) => this.level(b) - this.level(a) || b - a).slice(0, this.counts[this.at()]);
  }

  /** The number of a method's page that a row is in; -1 where it has none. */
  page(method, row) {
    const size = this.methods[method].page;
    return size > 1 && row >= this.sink && !this.always(row) ? Math.floor((row - this.sink) / size) : -1;
  }

  /** The text of a row, or its number; line ends as signs. */
  piece(row) {
    return this.pieces ? this.pieces[row].replace(/\n/g, "⏎") : `${row} `;
  }

  /** The same alone, where nothing stands around it. */
  word(row) {
    return this.piece(row).trim() || (this.piece(row) ? "␣" : "·");
  }
}
