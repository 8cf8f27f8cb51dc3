// The page: what scripts draw in it, and light or dark. A view's own script is in `views`.
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
    return `${percent.toFixed(digits)}\u00a0%`;
  }
  if (form === "count") return Math.round(value).toLocaleString("en");
  if (value === 0) return "0";
  return Math.abs(value) >= 1000 || Math.abs(value) < 0.001
    ? value.toPrecision(2)
    : String(Number(value.toPrecision(3)));
}

/** The colour of a part from 0 to 1, in one hue from light to dark: one for errors, another for what is no error. */
function shade(part, error) {
  const percent = Math.round(100 * Math.max(0, Math.min(1, part)));
  const hue = error ? "error" : "amount";
  return `color-mix(in oklab, var(--${hue}-most) ${percent}%, var(--${hue}-least))`;
}

/** The scale of colours of maps, with what stands at its beginning, its middle and its end. */
function ramp(labels, error, what) {
  const colours = make("span", { class: "ramp", "aria-hidden": "true" });
  colours.style.background = `linear-gradient(90deg in oklab,${shade(0, error)},${shade(1, error)})`;
  return make(
    "div",
    { class: "scale" },
    what ? make("span", { class: "what" }, what) : null,
    make("span", { class: "ends" }, colours, ...labels.map((label) => make("span", {}, label))),
  );
}

/** A list to choose from, with its label; calls `changed` with the value. */
function choice(label, options, changed, names = options) {
  const select = make("select", { onchange: () => changed(select.value) });
  options.forEach((option, i) => select.append(make("option", { value: option }, names[i])));
  return make("label", { class: "choice" }, make("span", {}, label), select);
}

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

/** One of a few short names to choose from, side by side; calls `changed` with its number. */
function segments(label, names, changed) {
  const buttons = names.map((name) => make("button", { type: "button" }, name));
  const pick = (i, keys) => {
    radios(buttons, i, 1, pick);
    if (keys) buttons[i].focus();
    changed(i);
  };
  radios(buttons, 0, 1, pick);
  return make("div", { class: "segments", role: "radiogroup", "aria-label": label }, ...buttons);
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
  const on = (i, colour) => `--on-method-${i}:${d3.lab(colour).l > 55 ? "#111" : "#fff"};`;
  const rule = (key) => page.methods.map((method, i) => `--method-${i}:${method[key]};${on(i, method[key])}`).join("");
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
