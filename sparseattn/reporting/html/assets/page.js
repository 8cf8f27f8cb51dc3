// The page: what scripts draw in it, which methods are shown, light or dark. A view's own script is in `views`.
"use strict";

const views = {}; // kind -> draws a view: (element, view) -> what to call when the shown methods or the width change
const page = JSON.parse(document.getElementById("page-data").textContent);

/** An element with attributes and children; `on...` attributes are listeners. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/** A number as people read it: "share" in percent, "count" whole, "text" as it is, others with three digits. */
function show(value, form) {
  if (value == null) return "–";
  if (form === "text") return String(value);
  if (form === "share") {
    const percent = 100 * value;
    const digits =
      percent === 0 || Math.abs(percent) >= 99.95
        ? 0
        : Math.abs(percent) >= 9.95
          ? 0
          : Math.abs(percent) >= 0.995
            ? 1
            : 2;
    return `${percent.toFixed(digits)} %`;
  }
  if (form === "count") return Math.round(value).toLocaleString("en");
  if (value === 0) return "0";
  return Math.abs(value) >= 1000 || Math.abs(value) < 0.001
    ? value.toPrecision(2)
    : String(Number(value.toPrecision(3)));
}

/** The scale of colours that all maps share, with what stands at its beginning, its middle and its end. */
function ramp(labels, what) {
  const colours = make("span", { class: "ramp", "aria-hidden": "true" });
  colours.style.background = `linear-gradient(90deg,${d3
    .range(0, 1.01, 0.1)
    .map((t) => d3.interpolateCividis(t))
    .join(",")})`;
  return make(
    "div",
    { class: "scale" },
    make("span", { class: "ends" }, colours, ...labels.map((label) => make("span", {}, label))),
    what ? make("span", { class: "what" }, what) : null,
  );
}

/** A list to choose from, with its label; calls `changed` with the value. */
function choice(label, options, changed, names = options) {
  const select = make("select", { onchange: () => changed(select.value) });
  options.forEach((option, i) => select.append(make("option", { value: option }, names[i])));
  return make("label", { class: "choice" }, make("span", {}, label), select);
}

// -- methods -----------------------------------------------------------------------------------------------------------

const hidden = new Set();
const redraws = [];
const numberOf = new Map(page.methods.map((method, i) => [method.name, i]));
const isShown = (name) => !hidden.has(name);
const colourOf = (name) => (numberOf.has(name) ? `var(--method-${numberOf.get(name)})` : "var(--soft)");
const methodOf = (name) => page.methods[numberOf.get(name)] ?? { symbol: "circle", dash: "2 3" }; // full attention: grey, never hidden

/** The mark of a method, as its lines have it. */
function swatch(name) {
  const { symbol, dash } = methodOf(name);
  const svg = d3.create("svg").attr("viewBox", "-14 -7 28 14").attr("class", "swatch").attr("aria-hidden", "true");
  svg
    .append("line")
    .attr("x1", -14)
    .attr("x2", 14)
    .attr("stroke", colourOf(name))
    .attr("stroke-width", 2)
    .attr("stroke-dasharray", dash);
  svg.append("path").attr("d", d3.symbol(symbols[symbol], 46)()).attr("fill", colourOf(name));
  return svg.node();
}

const symbols = {
  circle: d3.symbolCircle,
  square: d3.symbolSquare,
  diamond: d3.symbolDiamond,
  triangle: d3.symbolTriangle,
  wye: d3.symbolWye,
  cross: d3.symbolCross,
  star: d3.symbolStar,
};

function drawMethods() {
  const box = document.getElementById("methods");
  if (!page.methods.length) return box.remove();
  const summary = box.querySelector("summary");
  const inputs = page.methods.map(({ name }) => {
    const input = make("input", {
      type: "checkbox",
      checked: true,
      "data-method": name,
      onchange: () => set([name], input.checked),
    });
    return input;
  });
  function set(names, on) {
    for (const name of names) on ? hidden.delete(name) : hidden.add(name);
    for (const input of inputs) input.checked = isShown(input.dataset.method);
    const left = page.methods.length - hidden.size;
    summary.textContent = hidden.size ? `Methods, ${left} of ${page.methods.length} shown` : "Methods";
    redraw();
  }
  const all = page.methods.map((method) => method.name);
  const list = make("ul");
  page.methods.forEach(({ name }, i) =>
    list.append(make("li", {}, make("label", {}, inputs[i], swatch(name), make("span", {}, name)))),
  );
  const buttons = make(
    "div",
    { class: "pair" },
    make("button", { type: "button", class: "quiet", onclick: () => set(all, true) }, "all"),
    make("button", { type: "button", class: "quiet", onclick: () => set(all, false) }, "none"),
  );
  box.append(list, buttons);
  if (window.matchMedia("(max-width: 800px)").matches) box.open = false;
}

function redraw() {
  for (const one of redraws) one();
}

// -- light and dark ----------------------------------------------------------------------------------------------------

function drawTheme() {
  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const now = () => document.documentElement.dataset.theme || (system.matches ? "dark" : "light");
  const say = () => {
    button.textContent = now() === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `${button.textContent} colours`);
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = now() === "dark" ? "light" : "dark";
    say();
  });
  system.addEventListener("change", say);
  say();
  const rule = (key) => page.methods.map((method, i) => `--method-${i}:${method[key]};`).join("");
  document.head.append(
    make(
      "style",
      {},
      `:root{${rule("light")}}
@media (prefers-color-scheme: dark){:root{${rule("dark")}}}
:root[data-theme=light]{${rule("light")}}:root[data-theme=dark]{${rule("dark")}}`,
    ),
  );
}

// -- views -------------------------------------------------------------------------------------------------------------

/** Draws what the template left to scripts, in its figures; notes stay below. */
function drawViews() {
  for (const figure of document.querySelectorAll("figure.view")) {
    const draw = views[figure.dataset.kind];
    if (!draw) continue;
    const note = figure.querySelector("figcaption");
    const update = draw(figure, page.figures[figure.id]);
    if (note) figure.append(note);
    if (update) redraws.push(update);
  }
}

function start() {
  drawTheme();
  drawMethods();
  drawViews();
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) {
      width = window.innerWidth;
      redraw();
    }
  });
  document.documentElement.dataset.ready = "yes";
}
