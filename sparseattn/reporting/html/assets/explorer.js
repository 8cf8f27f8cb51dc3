// One token's attention over its text: which rows hold it, which of them a method read, and which it missed.
"use strict";

views.explorer = (figure, view) => {
  const told = new Attention(view.data);
  const asks = make("div", { class: "asks", role: "radiogroup", "aria-label": "Token that asks" });
  const heads = make("div", { class: "heads" });
  const facts = make("div", { class: "facts-of" });
  const strip = make("div", { class: "strip" });
  const list = make("div", { class: "scroll" });
  const text = new RowsText(told, (token) => choose({ token }));
  const goTo = (row) => text.goTo(row);
  const key = (name, words) => make("span", { class: `key ${name}` }, words);
  const bare = "This trace holds no text, so rows stand as their numbers: capture it with --with-text.";
  figure.append(
    make("h4", {}, "Token that asks"),
    asks,
    make("div", { class: "where" }, heads, facts),
    make("h4", {}, "The whole context, from its first row to its last"),
    strip,
    make(
      "div",
      { class: "legend" },
      key("glow", "more attention"),
      key("read", "read by the method"),
      key("missed", "needed and not read"),
      key("always", "always read: sink and window"),
      text.toggle,
    ),
    ...(told.pieces ? [] : [make("p", { class: "none" }, bare)]),
    text.said,
    text.host,
    make("h4", {}, "The rows that hold most beyond sink and window"),
    list,
  );

  /** Draws another token, layer, head or method; `within` has the group whose chosen button takes the focus. */
  function choose(change, within) {
    Object.assign(told, change);
    text.reset();
    draw();
    if (within) within.querySelector("[aria-checked=true]").focus({ preventScroll: true });
  }

  function draw() {
    if (!told.weights) return;
    if (told.shown.length && !told.shown.includes(told.method)) told.method = told.shown[0];
    drawAsks(asks, told, choose);
    drawHeads(heads, told, choose);
    drawFacts(facts, told, choose);
    drawStrip(strip, told, goTo);
    text.draw();
    drawHeaviest(list, told, goTo);
  }

  if (window.DecompressionStream) {
    told.load().then(() => {
      draw();
      figure.dataset.ready = "yes";
    });
  } else {
    text.said.textContent =
      "This browser is too old to unpack the weights: Chrome 111, Firefox 113 and Safari 16.4 can.";
  }
  return draw;
};
