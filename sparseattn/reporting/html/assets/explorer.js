// One token's attention over its text: which rows hold it, which of them a method read, and which it missed.
"use strict";

views.explorer = (figure, view) => {
  const told = new Attention(view.data);
  Object.assign(told, { whole: false, picked: -1, opened: new Set() }); // what all texts show
  const asks = make("div", { class: "asks", role: "radiogroup", "aria-label": "Token that asks" });
  const heads = make("div", { class: "heads" });
  const facts = make("div", { class: "facts-of" });
  const strip = make("div", { class: "strip" });
  const list = make("div", { class: "ruled" });
  const said = make("p", { class: "row-said", role: "status" });
  const say = (row) => said.replaceChildren(...sentenceOf(told, row));
  const panes = [];
  const texts = make("div", { class: "texts" });
  const all = [0, 1].map((which) => new RowsText(told, which, panes, { asked: (token) => choose({ token }), say }));
  const goTo = (row) => panes[0].goTo(row);
  const play = player(told, (token) => step(token));
  const whole = make("button", { type: "button", class: "quiet" });
  whole.onclick = () => {
    told.whole = !told.whole;
    drawTexts();
  };
  const second = make("label", { class: "choice" });
  const views_of = segments("View", ["One method", "Two side by side"], (i) => {
    told.beside = i ? (told.shown.find((one) => one !== told.method) ?? -1) : -1;
    draw();
  });
  const key = (name, words) => make("span", { class: `key ${name}` }, words);
  const bare = "This trace has no text, so tokens are shown by number. Capture it with --with-text to see their text.";
  figure.append(
    make("div", { class: "bar" }, make("h4", {}, "Token that asks"), play.button),
    asks,
    make("div", { class: "where" }, heads, facts),
    make("h4", {}, "The whole context, from the first token to the last"),
    strip,
    make("div", { class: "bar" }, views_of, second, whole),
    make(
      "div",
      { class: "legend" },
      key("glow", "more attention"),
      key("read", "read by the method"),
      key("missed", "needed and not read"),
      key("always", "always read: sink and window"),
    ),
    ...(told.pieces ? [] : [make("p", { class: "none" }, bare)]),
    said,
    texts,
    make("h4", {}, "The tokens outside sink and window with the most attention"),
    list,
  );

  /** Draws another token, layer, head or method; `within` has the group whose chosen button takes the focus. */
  function choose(change, within) {
    play.stop();
    if (change.method === told.beside) change.beside = told.method;
    Object.assign(told, change, { picked: -1 });
    told.opened.clear();
    for (const pane of panes) pane.host.scrollTop = 0;
    draw();
    if (within) within.querySelector("[aria-checked=true]").focus({ preventScroll: true });
  }

  /** Draws the next token in place: the text stays where it is, so that one sees what moves. */
  function step(token) {
    Object.assign(told, { token, picked: -1 });
    const tops = panes.map((pane) => pane.host.scrollTop);
    draw();
    panes.forEach((pane, i) => (pane.host.scrollTop = tops[i]));
  }

  function draw() {
    if (!told.weights) return;
    if (told.shown.length && !told.shown.includes(told.method)) told.method = told.shown[0];
    if (told.beside === told.method || !told.shown.includes(told.beside)) {
      const others = told.shown.filter((one) => one !== told.method);
      told.beside = told.beside < 0 ? -1 : (others[0] ?? -1);
    }
    drawAsks(asks, told, choose);
    drawHeads(heads, told, choose);
    drawFacts(facts, told, choose);
    drawStrip(strip, told, goTo);
    drawTexts();
    drawHeaviest(list, told, goTo);
  }

  function drawTexts() {
    panes.splice(0, panes.length, ...all.slice(0, told.compared.length));
    texts.replaceChildren(...panes.map((pane) => pane.pane));
    texts.classList.toggle("two", panes.length > 1);
    for (const pane of panes) pane.draw();
    whole.textContent = told.whole ? "Show the parts that matter" : "Show the whole text";
    drawSecond();
    say(told.picked);
  }

  /** The list to choose the second method from. */
  function drawSecond() {
    second.replaceChildren();
    if (told.beside < 0) return;
    const others = told.shown.filter((one) => one !== told.method);
    const change = (event) => choose({ beside: Number(event.target.value) });
    const list = make("select", { onchange: change });
    for (const i of others)
      list.append(make("option", { value: i, selected: i === told.beside }, told.methods[i].label));
    second.append(make("span", {}, `${told.chosen.label} beside`), list);
  }

  if (window.DecompressionStream) {
    told.load().then(() => {
      draw();
      figure.dataset.ready = "yes";
    });
  } else {
    said.textContent = "This browser is too old to unpack the weights: Chrome 111, Firefox 113 and Safari 16.4 can.";
  }
  return draw;
};

/** What a row weighs, and who reads it. */
function sentenceOf(told, row) {
  if (row < 0) return ["Point at a token, or click it, to see its weight and which methods read it."];
  const number = `Token ${row.toLocaleString("en")}`;
  if (row > told.last) return [`${number} comes after the token that asks.`];
  const by = told.shown.map((i) => `${told.methods[i].label} ${told.isRead(i, row) ? "reads it" : "does not"}`);
  const who = told.always(row) ? "every method reads it, because it is in the sink or the window" : by.join(", ");
  const page = told.page(told.method, row) < 0 ? "" : `, page ${told.page(told.method, row)}`;
  const weight = `${show(told.share(row), "share")} of the attention`;
  return [make("strong", {}, `“${told.word(row)}”`), ` ${number.toLowerCase()}${page}: ${weight}; ${who}.`];
}
