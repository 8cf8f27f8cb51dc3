// Quality against cost: a panel each value of the facet, a line a method, a point a budget.
"use strict";

views.lines = (figure, view) => {
  let x = view.x[0],
    y = view.y[0];
  const facets = [...new Set(view.points.map((point) => point.facet))];
  const usable = (measures) => measures.filter((one) => view.points.some((point) => point.values[one.key] != null));
  const bar = make("div", { class: "bar" });
  const pick = (label, measures, changed) => {
    const some = usable(measures);
    if (some.length < 2) return;
    bar.append(
      choice(
        label,
        some.map((one) => one.key),
        (key) => {
          changed(some.find((one) => one.key === key));
          draw();
        },
        some.map((one) => one.label),
      ),
    );
  };
  [x = view.x[0]] = usable(view.x);
  [y = view.y[0]] = usable(view.y);
  pick("Up", view.y, (one) => {
    y = one;
  });
  pick("Across", view.x, (one) => {
    x = one;
  });
  const panels = make("div", { class: "panels" });
  figure.append(bar, panels);

  function draw() {
    const known = view.points.filter((point) => place(point, x) != null && place(point, y) != null);
    const columns = Math.max(1, Math.min(facets.length, Math.floor(panels.clientWidth / 262)));
    panels.style.gridTemplateColumns = `repeat(${columns}, minmax(0, ${columns === 1 ? "680px" : "1fr"}))`;
    panels.replaceChildren();
    const across = domain(known, x),
      up = domain(known, y);
    for (const facet of facets) {
      const host = make("div", { class: "plot" });
      const panel = make("div", { class: "panel" }, make("h4", {}, facet), host);
      panels.append(panel);
      drawPanel(
        host,
        facet,
        known.filter((point) => point.facet === facet),
        across,
        up,
      );
    }
  }

  function drawPanel(host, facet, points, across, up) {
    const methods = [...new Set(points.map((point) => point.method))].filter(isShown);
    const width = host.clientWidth,
      marks = [];
    if (y.rule != null) marks.push(Plot.ruleY([y.rule], { stroke: "var(--rule)", strokeDasharray: "2 3" }));
    const at = (measure) => (point) => point.values[measure.key];
    for (const name of methods) {
      const mine = points.filter((point) => point.method === name).sort((a, b) => a.values[x.key] - b.values[x.key]);
      const { symbol, dash } = methodOf(name),
        stroke = colourOf(name);
      marks.push(Plot.line(mine, { x: at(x), y: at(y), stroke, strokeWidth: 1.6, strokeDasharray: dash }));
      marks.push(
        Plot.dot(mine, {
          x: at(x),
          y: at(y),
          fill: stroke,
          symbol: symbols[symbol],
          r: 4,
          stroke: "var(--page)",
          strokeWidth: 0.75,
        }),
      );
    }
    const svg = Plot.plot({
      width,
      height: Math.round(Math.min(320, Math.max(220, 0.72 * width))),
      marginLeft: 46,
      marginRight: 14,
      marginTop: 22,
      marginBottom: 40,
      x: axis(x, across, width < 340 ? 4 : 6),
      y: axis(y, up, 6),
      marks,
      style: { background: "none" },
    });
    svg.setAttribute("aria-hidden", "true");
    svg.querySelectorAll("g[aria-label='line']").forEach((group, i) => {
      group.dataset.method = methods[i];
    });
    svg.querySelectorAll("g[aria-label='dot']").forEach((group, i) => {
      group.dataset.method = methods[i];
    });
    host.append(svg);
    const [sx, sy] = [svg.scale("x"), svg.scale("y")];
    const places = points
      .filter((point) => isShown(point.method))
      .map((point) => ({
        x: sx.apply(point.values[x.key]),
        y: sy.apply(point.values[y.key]),
        line: point.method,
        lines: [
          point.method,
          point.at,
          `${y.label}: ${show(point.values[y.key], y.form)}`,
          `${x.label}: ${show(point.values[x.key], x.form)}`,
        ],
      }))
      .sort((a, b) => a.x - b.x);
    probe(host, `${view.title}, ${facet}: ${methods.length} methods`, places);
  }

  /** The value of a point, or nothing where its axis has no place for it. */
  function place(point, measure) {
    const value = point.values[measure.key];
    return value == null || (measure.log && value <= 0) ? null : value;
  }

  function domain(points, measure) {
    let [low, high] = d3.extent(points, (point) => point.values[measure.key]);
    if (low == null) return measure.log ? [0.1, 1] : [0, 1];
    if (measure.log) return [low / 1.15, high * 1.15];
    low = Math.min(0, low);
    return [low, measure.top != null ? Math.max(measure.top, high) : high + 0.05 * (high - low || 1)];
  }

  function axis(measure, range, count) {
    const shared = {
      label: `${measure.label}${measure.better ? (measure.better === "high" ? " (more is better)" : " (less is better)") : ""}`,
      labelArrow: "none",
      domain: range,
      grid: true,
    };
    const form = (value) =>
      measure.form === "share"
        ? `${Number((100 * value).toPrecision(3))}%`
        : Math.abs(value) >= 1000
          ? d3.format("~s")(value)
          : String(value);
    if (!measure.log) return { ...shared, ticks: count, tickFormat: form };
    return { ...shared, type: "log", ticks: logTicks(range, count), tickFormat: form };
  }

  function logTicks([low, high], count) {
    let made = [];
    for (const steps of [[1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3], [1]]) {
      made = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
        for (const step of steps) {
          const tick = step * 10 ** power;
          if (tick >= low && tick <= high) made.push(Number(tick.toPrecision(3)));
        }
      }
      if (made.length <= count) break;
    }
    return made;
  }

  draw();
  return draw;
};
