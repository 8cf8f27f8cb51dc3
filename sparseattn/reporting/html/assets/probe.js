// What a plot says of the place under the pointer, or of the place that the arrow keys have gone to.
"use strict";

/**
 * Lets a plot be read by pointer and keyboard.
 *
 * `host` is the element around the plot, which takes the focus; `places` are {x, y, lines, line} in its pixels: where,
 * what is said, and which line a place is of. Left and right go along a line, up and down to the nearest of another.
 * `reach` is how far from a place the pointer may be, `gap` how far from it the words stay, and `lit(line)` is told which
 * line is spoken of.
 */
function probe(host, label, places, { reach = 40, gap = 14, lit = () => {} } = {}) {
  host.setAttribute("tabindex", "0");
  host.setAttribute("role", "group");
  host.setAttribute("aria-label", `${label}. Arrow keys go from point to point.`);
  const tip = make("div", { class: "tip", role: "status" }),
    ring = make("div", { class: "ring" });
  tip.hidden = ring.hidden = true;
  host.append(ring, tip);
  let at = -1;
  function go(i) {
    at = i;
    tip.hidden = ring.hidden = i < 0;
    if (i < 0) return lit();
    const { x, y, lines } = places[i];
    tip.replaceChildren(...lines.map((line, k) => make(k ? "div" : "strong", {}, line)));
    ring.style.transform = `translate(${x}px, ${y}px)`;
    lit(places[i].line);
    const own = places[i].line === undefined ? [] : alongLines([places.filter((one) => one.line === places[i].line)]);
    const [width, height] = [tip.offsetWidth, tip.offsetHeight];
    const lefts = [x - width / 2, x + gap, x - gap - width].map((left) =>
      Math.max(0, Math.min(host.clientWidth - width, left)),
    );
    const corners = lefts.flatMap((left) => [y - gap - height, y + gap].map((top) => ({ left, top })));
    const covered = ({ left, top }) =>
      own.filter((one) => one.x > left - 4 && one.x < left + width + 4 && one.y > top - 4 && one.y < top + height + 4)
        .length;
    const { left, top } = d3.least(corners, covered); // the words hide as little as can be of the line that they are of
    tip.style.left = `${left}px`;
    tip.style.top = `${top}px`;
  }
  const nearest = (x, y, among, limit = Infinity) => {
    let best = -1,
      least = limit;
    for (const i of among) {
      const far = Math.hypot(places[i].x - x, places[i].y - y);
      if (far < least) [best, least] = [i, far];
    }
    return best;
  };
  const all = places.map((_, i) => i);
  host.onpointermove = (event) => {
    const box = host.getBoundingClientRect();
    go(nearest(event.clientX - box.left, event.clientY - box.top, all, reach));
  };
  host.onpointerleave = () => {
    if (document.activeElement !== host) go(-1);
  };
  host.onblur = () => go(-1);
  host.onkeydown = (event) => {
    if (event.key === "Escape") return go(-1);
    const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step || !places.length) return;
    event.preventDefault();
    if (at < 0) return go(0);
    const here = places[at],
      [dx, dy] = step;
    const ahead = all.filter((i) => (dx ? (places[i].x - here.x) * dx > 0.5 : (places[i].y - here.y) * dy > 0.5));
    const mine = ahead.filter((i) => {
      if (here.line !== undefined) return dx ? places[i].line === here.line : places[i].line !== here.line;
      return Math.abs(dx ? places[i].y - here.y : places[i].x - here.x) < 0.5;
    });
    const next = nearest(here.x, here.y, mine.length || here.line === undefined ? mine : ahead); // from a line's end on to another
    if (next >= 0) go(next);
  };
}
