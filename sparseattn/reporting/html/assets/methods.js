// Which methods are shown: switches beside the page and at plots, and how each method looks.
"use strict";

const symbols = {
  circle: d3.symbolCircle,
  square: d3.symbolSquare,
  diamond: d3.symbolDiamond,
  triangle: d3.symbolTriangle,
  wye: d3.symbolWye,
  cross: d3.symbolCross,
  star: d3.symbolStar,
};
const redraws = [];
const numberOf = new Map(page.methods.map((method, i) => [method.name, i]));
const hidden = new Set(page.methods.filter((method) => !method.shown).map((method) => method.name));
const isShown = (name) => !hidden.has(name);
const colourOf = (name) => (numberOf.has(name) ? `var(--method-${numberOf.get(name)})` : "var(--soft)");
const inkOn = (name) => (numberOf.has(name) ? `var(--on-method-${numberOf.get(name)})` : "var(--card)");
const methodOf = (name) => page.methods[numberOf.get(name)] ?? { symbol: "circle", dash: "2 3" }; // full attention: grey, never hidden

/** The parts of a method's name that stay in one line: it breaks before its arguments, and behind commas. */
const partsOf = (name) => name.split(/(?<=[:(,])/);

/** A method's name that breaks between its parts. */
function nameOf(name) {
  return make("span", {}, ...partsOf(name).flatMap((part, i) => (i ? [make("wbr"), part] : [part])));
}

function redraw() {
  for (const one of redraws) one();
}

/** Shows or hides methods in all views. */
function switchMethods(names, on) {
  for (const name of names) on ? hidden.delete(name) : hidden.add(name);
  redraw();
}

/** The mark of a method, as its lines have it. */
function swatch(name) {
  const { symbol, dash } = methodOf(name);
  const svg = d3.create("svg").attr("viewBox", "-14 -7 28 14").attr("class", "swatch").attr("aria-hidden", "true");
  const line = svg.append("line").attr("x1", -14).attr("x2", 14);
  line.attr("stroke", colourOf(name)).attr("stroke-width", 2).attr("stroke-dasharray", dash);
  svg.append("path").attr("d", d3.symbol(symbols[symbol], 46)()).attr("fill", colourOf(name));
  return svg.node();
}

/** The list of all methods, at the side of the page or, where it is narrow, above. */
function drawMethods() {
  const box = document.getElementById("methods");
  if (!page.methods.length) return box.remove();
  const all = page.methods.map((method) => method.name);
  const inputs = all.map((name) => {
    const change = (event) => switchMethods([name], event.target.checked);
    return make("input", { type: "checkbox", "data-method": name, onchange: change });
  });
  const list = make("ul");
  all.forEach((name, i) => list.append(make("li", {}, make("label", {}, inputs[i], swatch(name), nameOf(name)))));
  const button = (words, on) =>
    make("button", { type: "button", class: "quiet", onclick: () => switchMethods(all, on) }, words);
  box.append(list, make("div", { class: "pair" }, button("all", true), button("none", false)));
  if (window.matchMedia("(max-width: 800px)").matches) box.open = false;
  const update = () => {
    for (const input of inputs) input.checked = isShown(input.dataset.method);
    const left = all.length - hidden.size;
    box.querySelector("summary").textContent = hidden.size ? `Methods, ${left} of ${all.length} shown` : "Methods";
  };
  redraws.push(update);
  update();
}

/** Switches of some methods, for a plot of them where the list of all is not in sight. */
function legendOf(names) {
  const buttons = names.map((name) =>
    make(
      "button",
      { type: "button", onclick: () => switchMethods([name], !isShown(name)) },
      swatch(name),
      nameOf(name),
    ),
  );
  const update = () => buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(isShown(names[i]))));
  redraws.push(update);
  update();
  return make("div", { class: "switches", role: "group", "aria-label": "Methods of this plot" }, ...buttons);
}
