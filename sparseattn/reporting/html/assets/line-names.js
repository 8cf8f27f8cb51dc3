// Names of lines in a plot: right behind a line's last point where there is room, else at the plot's right side.
"use strict";

const NAME_SIZE = 12; // pixels
const NAME_LINE = 14;
const NAME_LETTER = 6.4; // of a letter, on average
const NAME_GAP = 10; // between a line's last point and its name

/** A name in lines of at most so many letters. */
function brokenName(name, letters) {
  const lines = [];
  for (const part of partsOf(name)) {
    const last = lines.at(-1);
    if (last !== undefined && (last + part).trimEnd().length <= letters) lines[lines.length - 1] += part;
    else lines.push(part.trimStart());
  }
  return lines;
}

/** Points along lines, each a list of {x, y}, a few pixels apart: where no name may stand. */
function alongLines(lines) {
  const between = ([a, b]) => {
    const count = Math.ceil(Math.hypot(b.x - a.x, b.y - a.y) / 5);
    return d3.range(count + 1).map((i) => ({ x: a.x + ((b.x - a.x) * i) / count, y: a.y + ((b.y - a.y) * i) / count }));
  };
  return lines.flatMap((line) => [
    ...line,
    ...d3
      .pairs(line)
      .filter(([a, b]) => a.x !== b.x || a.y !== b.y)
      .flatMap(between),
  ]);
}

/**
 * Writes the names of lines into a plot. `lines` are {name, points}, whose points are {x, y} in pixels, from left to
 * right; names stand above `bottom`, and where none has room behind its line, from `side` on.
 */
function nameLines(svg, lines, side, bottom, letters) {
  const taken = alongLines(lines.map((line) => line.points));
  const boxes = [];
  const free = (box) =>
    box.y > 0 &&
    box.y + box.height < bottom &&
    !taken.some(
      (one) => one.x > box.x - 3 && one.x < box.x + box.width && one.y > box.y - 2 && one.y < box.y + box.height + 2,
    ) &&
    !boxes.some(
      (one) =>
        one.x < box.x + box.width &&
        box.x < one.x + one.width &&
        one.y < box.y + box.height &&
        box.y < one.y + one.height,
    );
  const group = d3.select(svg).append("g").attr("font-size", NAME_SIZE).attr("text-anchor", "start");
  const edge = svg.clientWidth;
  for (const { name, points } of d3.sort(lines, (line) => line.points.at(-1).y)) {
    const end = points.at(-1);
    const words = brokenName(name, letters);
    const width = 4 + NAME_LETTER * Math.max(...words.map((line) => line.length));
    const height = NAME_LINE * words.length;
    const at = (x, down) => ({ x, y: end.y - height / 2 + down, width, height });
    const near = [0, -7, 7, -14, 14, -21, 21, -28, 28]
      .map((down) => at(end.x + NAME_GAP, down))
      .filter((box) => box.x + width <= edge);
    const far = d3.sort(d3.range(-bottom, bottom, 5), Math.abs).map((down) => at(side, down));
    const box = [...near, ...far].find(free) ?? far[0];
    boxes.push(box);
    const one = group.append("g").attr("data-method", name);
    if (box.x === side) {
      const leader = one.append("path").attr("d", `M${end.x + 6},${end.y}L${side - 4},${box.y + height / 2}`);
      leader.attr("stroke", colourOf(name)).attr("stroke-dasharray", "1 3").attr("fill", "none");
    }
    const text = one.append("text").attr("fill", "var(--ink)");
    words.forEach((line, k) =>
      text
        .append("tspan")
        .attr("x", box.x)
        .attr("y", box.y + k * NAME_LINE + 11)
        .text(line),
    );
  }
}
