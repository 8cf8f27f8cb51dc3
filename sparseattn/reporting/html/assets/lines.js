// Quality against cost: one plot with a switch of what it is of, one line per method, one point per budget.
"use strict";

const LABELLED = 560; // pixels of a plot from which on names stand at its lines
const LETTERS = 22; // of a name in one line
const NEAR_RULE = 4; // times the rule: an axis whose points come so near is drawn down to it

views.lines = (figure, view) => {
  const facets = [...new Set(view.points.map((point) => point.facet))];
  const usable = (measures) => measures.filter((one) => view.points.some((point) => point.values[one.key] != null));
  let [x = view.x[0]] = usable(view.x),
    [y = view.y[0]] = usable(view.y),
    [facet] = facets;
  const bar = make("div", { class: "bar" });
  if (facets.length > 1) {
    const change = (i) => {
      facet = facets[i];
      draw();
    };
    const name = view.facet[0].toUpperCase() + view.facet.slice(1);
    const short = facets.length < 5 && facets.join("").length < 50;
    bar.append(short ? segments(name, facets, change) : choice(name, Object.keys(facets), change, facets));
  }
  const pick = (label, measures, changed) => {
    const some = usable(measures);
    if (some.length < 2) return;
    const change = (key) => {
      changed(some.find((one) => one.key === key));
      draw();
    };
    const [keys, names] = ["key", "label"].map((field) => some.map((one) => one[field]));
    bar.append(choice(label, keys, change, names));
  };
  pick("y axis", view.y, (one) => {
    y = one;
  });
  pick("x axis", view.x, (one) => {
    x = one;
  });
  const host = make("div", { class: "plot" });
  figure.append(
    bar,
    host,
    legendOf([...new Set(view.points.map((point) => point.method))].filter((name) => numberOf.has(name))),
  );

  function draw() {
    const known = view.points.filter((point) => point.facet === facet && isShown(point.method) && drawn(point));
    const methods = [...new Set(known.map((point) => point.method))];
    const marked = view.marked.filter((one) => one.facet === facet && drawn(one));
    const none = "No method that is switched on has points here.";
    host.replaceChildren();
    if (!known.length) return host.append(make("p", { class: "none" }, none));
    const width = host.clientWidth;
    const letters = Math.max(
      ...methods.map((name) => Math.max(...brokenName(name, LETTERS).map((line) => line.length))),
    );
    const right = width < LABELLED ? 14 : 26 + letters * NAME_LETTER;
    const height = Math.round(Math.max(280, Math.min(460, 0.52 * width)));
    const every = [...known, ...marked];
    const svg = Plot.plot({
      width,
      height,
      marginLeft: 52,
      marginRight: right,
      marginTop: 26,
      marginBottom: 42,
      x: { type: x.log ? "log" : "linear", domain: domain(every, x), axis: null },
      y: { type: y.log ? "log" : "linear", domain: domain(every, y), axis: null },
      marks: [
        ...axis("X", x, domain(every, x), width < 400 ? 4 : 7),
        ...axis("Y", y, domain(every, y), 7),
        ...rule(every),
        ...methods.flatMap((name) => marksOf(name, known)),
      ],
      style: { background: "none" },
    });
    svg.setAttribute("aria-hidden", "true");
    for (const kind of ["line", "dot"]) {
      svg.querySelectorAll(`g[aria-label='${kind}']`).forEach((group, i) => {
        group.dataset.method = methods[i];
      });
    }
    host.append(svg);
    const at = (one) => ({ x: svg.scale("x").apply(one.values[x.key]), y: svg.scale("y").apply(one.values[y.key]) });
    const places = known.map((point) => ({
      ...at(point),
      line: point.method,
      lines: [point.method, point.at, ...said(point)],
    }));
    places.sort((a, b) => a.x - b.x);
    if (width >= LABELLED) {
      const lines = methods.map((name) => ({ name, points: places.filter((one) => one.line === name) }));
      nameLines(svg, lines, width - right + 16, height - 40, LETTERS);
    }
    for (const one of marked) places.push(drawPlan(svg, one, at(one)));
    probe(host, `${view.title}, ${facet}: ${methods.length} methods`, places, { lit: (line) => light(svg, line) });
  }

  function marksOf(name, known) {
    const mine = known.filter((point) => point.method === name).sort((a, b) => a.values[x.key] - b.values[x.key]);
    const { symbol, dash } = methodOf(name);
    const colour = colourOf(name);
    const places = { x: (point) => point.values[x.key], y: (point) => point.values[y.key] };
    return [
      Plot.line(mine, { ...places, stroke: colour, strokeWidth: 1.8, strokeDasharray: dash }),
      Plot.dot(mine, {
        ...places,
        fill: colour,
        symbol: symbols[symbol],
        r: 4.5,
        stroke: "var(--card)",
        strokeWidth: 0.75,
      }),
    ];
  }

  /** The line of what is aimed at, where the axis reaches it. */
  function rule(points) {
    if (y.rule == null || domain(points, y)[0] > y.rule) return [];
    return [Plot.ruleY([y.rule], { stroke: "var(--rule)", strokeDasharray: "4 3", strokeWidth: 1.2 })];
  }

  /** A plan as a dot, with the single method beside it that loses as much; returns its place. */
  function drawPlan(svg, plan, { x: left, y: top }) {
    const best = x === view.x[0] ? plan.beside[y.key] : undefined;
    const group = d3.select(svg).append("g").attr("class", "plan");
    const words = [`${plan.name}: ${show(plan.values[x.key], x.form)}`];
    if (best) {
      const there = Math.min(svg.scale("x").apply(best.value), svg.scale("x").range[1]);
      group.append("line").attr("x1", left).attr("x2", there).attr("y1", top).attr("y2", top);
      group.append("circle").attr("class", "single").attr("cx", there).attr("cy", top).attr("r", 6);
      words.push(...brokenName(`${best.method} alone: ${show(best.value, x.form)}`, LETTERS));
    }
    group.append("circle").attr("cx", left).attr("cy", top).attr("r", 6.5);
    const written = svg.clientWidth < LABELLED ? words.slice(0, 1) : words;
    const wide = Math.max(...written.map((line) => line.length)) * 1.1 * NAME_LETTER; // bold letters are wider
    const fits = left - 12 - wide > 52;
    written.forEach((line, i) => {
      const text = group
        .append("text")
        .attr("font-size", NAME_SIZE)
        .attr("font-weight", i ? 400 : 650)
        .text(line);
      const down = fits ? 4 + (i - (written.length - 1) / 2) * NAME_LINE : 22 + i * NAME_LINE;
      const x = fits ? left - 12 : Math.min(left - 6, svg.clientWidth - wide);
      text
        .attr("x", x)
        .attr("y", top + down)
        .attr("text-anchor", fits ? "end" : "start");
    });
    const more = best ? [`${best.method} with one budget for all layers: ${show(best.value, x.form)}`] : [];
    return { x: left, y: top, line: plan.name, lines: [plan.name, ...said(plan), ...more] };
  }

  const said = (point) => [y, x].map((measure) => `${measure.label}: ${show(point.values[measure.key], measure.form)}`);

  /** Lets all lines but one fade. */
  function light(svg, line) {
    for (const group of svg.querySelectorAll("g[data-method]")) {
      group.style.opacity = line === undefined || group.dataset.method === line || !numberOf.has(line) ? 1 : 0.2;
    }
  }

  /** Whether both axes have a place for a point. */
  function drawn(point) {
    return [x, y].every(({ key, log }) => point.values[key] != null && (!log || point.values[key] > 0));
  }

  function domain(points, measure) {
    let [low, high] = d3.extent(points, (point) => point.values[measure.key]);
    if (measure.log) {
      if (measure.rule != null && low <= NEAR_RULE * measure.rule) low = Math.min(low, measure.rule);
      if (measure.form === "share" && high > 0.5) high = Math.max(1, high);
      return [low / 1.25, high * 1.12];
    }
    low = Math.min(0, low);
    return [low, measure.top != null ? Math.max(measure.top, high) : high + 0.05 * (high - low || 1)];
  }

  /** The marks of an axis, "X" or "Y", and its grid. */
  function axis(which, measure, range, count) {
    const better = { high: " (higher is better)", low: " (lower is better)" }[measure.better] ?? "";
    const label =
      NAME_LETTER * (measure.label + better).length < host.clientWidth ? measure.label + better : measure.label;
    const form = (value) => {
      if (measure.form === "share") return `${Number((100 * value).toPrecision(3))}\u00a0%`;
      return Math.abs(value) >= 1000 ? d3.format("~s")(value) : String(value);
    };
    const ticks = measure.log ? logTicks(range, count) : d3.ticks(...range, count);
    return [Plot[`grid${which}`](ticks), Plot[`axis${which}`](ticks, { text: form, label, labelArrow: "none" })];
  }

  /** Round numbers in a range, `count` at most unless even the powers of ten are more. */
  function logTicks([low, high], count) {
    let made = [];
    for (const steps of [[1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3], [1]]) {
      const powers = d3.range(Math.floor(Math.log10(low)), Math.ceil(Math.log10(high)) + 1);
      made = powers.flatMap((power) => steps.map((step) => Number((step * 10 ** power).toPrecision(3))));
      made = made.filter((tick) => tick >= low && tick <= high);
      if (made.length <= count) break;
    }
    return made;
  }

  draw();
  return draw;
};
