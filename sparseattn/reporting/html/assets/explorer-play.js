// Steps through the tokens that ask, so that one sees choices move.
"use strict";

const PAUSE = 1200; // milliseconds at a token

/**
 * A button that plays the tokens from the chosen one on, from the first if that is the last, and stops at the last; where
 * motion is to be reduced, each press goes one token on. `show(i)` shows token number i. Returns the button, and `stop`.
 */
function player(told, show) {
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");
  const end = told.asking.length - 1;
  let timer = 0;
  const button = make("button", { type: "button", class: "quiet play", onclick: () => (timer ? stop() : start()) });

  function name() {
    button.textContent = timer ? "❚❚\u00a0Pause" : still.matches ? "Next token" : "▶\u00a0Play tokens";
  }

  function stop() {
    window.clearTimeout(timer);
    timer = 0;
    name();
  }

  function start() {
    show(told.token < end ? told.token + 1 : 0);
    if (!still.matches) timer = window.setTimeout(step, PAUSE);
    name();
  }

  function step() {
    if (told.token < end) show(told.token + 1);
    if (told.token === end) return stop();
    timer = window.setTimeout(step, PAUSE);
  }

  still.addEventListener("change", stop);
  name();
  return { button, stop };
}
