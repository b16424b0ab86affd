// The values under the pointer: a line at the nearest step of the chart, and a box that names each curve's value there.
"use strict";

for (const figure of document.querySelectorAll("figure.chart")) {
  const source = figure.querySelector("script");
  if (source) follow(figure.querySelector(".plot"), JSON.parse(source.textContent));
}

function follow(plot, data) {
  const line = plot.appendChild(element("div", "cursor"));
  const box = plot.appendChild(element("div", "reading"));
  const hide = () => plot.classList.remove("reads");
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("pointercancel", hide);
  for (const kind of ["pointermove", "pointerdown"]) {
    plot.addEventListener(kind, (event) => {
      const bounds = plot.getBoundingClientRect();
      const part = Math.min(1, Math.max(0, (event.clientX - bounds.left) / bounds.width));
      show(plot, line, box, data, part);
    });
  }
}

function show(plot, line, box, data, part) {
  const wanted = data.x[0] + part * (data.x[1] - data.x[0]);
  // The curve with the nearest point leads; another is read where it has the same step, or at its own nearest, said so.
  const readings = data.curves.map((curve) => [curve, nearest(curve[data.across], wanted)]);
  const lead = readings.reduce((a, b) => (distance(data, a, wanted) <= distance(data, b, wanted) ? a : b));
  const [tokens, step] = [lead[0].tokens[lead[1]], lead[0].steps[lead[1]]];
  const place = (lead[0][data.across][lead[1]] - data.x[0]) / (data.x[1] - data.x[0]);
  box.replaceChildren(element("div", "where", `step ${step.toLocaleString("en")} \u00b7 ${tokens.toLocaleString("en")} tokens`));
  for (const [curve, n] of readings) {
    const row = box.appendChild(element("div", `row ${curve.tone}`));
    const own = curve.steps[n];
    row.append(element("span", "", own === step ? curve.name : `${curve.name}, step ${own.toLocaleString("en")}`));
    row.append(element("b", "", number(curve.values[n])));
  }
  box.classList.toggle("many", readings.length > 12);
  plot.classList.add("reads");
  // Beside the line, on the side that has room.
  const [at, width] = [place * plot.clientWidth, box.offsetWidth];
  const left = at + 10 + width <= plot.clientWidth ? at + 10 : at - 10 - width;
  line.style.left = `${at}px`;
  box.style.left = `${Math.max(0, left)}px`;
}

function number(value) {
  return Math.abs(value) >= 1000 ? value.toLocaleString("en") : String(value);
}

function distance(data, [curve, n], wanted) {
  return Math.abs(curve[data.across][n] - wanted);
}

function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle; else high = middle;
  }
  return wanted - sorted[low] <= sorted[high] - wanted ? low : high;
}

function element(tag, kind, text = "") {
  const made = document.createElement(tag);
  made.className = kind;
  made.textContent = text;
  return made;
}
