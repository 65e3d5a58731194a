/* Shows the words of the mark nearest to the pointer, or of the next one with the arrow keys. A chart's data-marks has
   [x, y, width, height, words] in the units of its drawing. */
"use strict";
const tip = document.getElementById("tip");
let ring = null;

function hide() {
  tip.hidden = true;
  if (ring) ring.remove();
  ring = null;
}

function show(drawing, svg, [x, y, w, h, words]) {
  hide();
  const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
  ring = document.createElementNS(svg.namespaceURI, w ? "rect" : "circle");
  const place = w ? { x, y, width: w, height: h } : { cx: x, cy: y, r: 6 };
  for (const [name, value] of Object.entries(place)) ring.setAttribute(name, value);
  ring.setAttribute("class", "ring");
  svg.append(ring);
  tip.textContent = words;
  tip.hidden = false;
  const middle = box.left + (x + w / 2) * scale, top = box.top + y * scale, room = document.documentElement.clientWidth;
  tip.style.left = Math.max(8, Math.min(room - tip.offsetWidth - 8, middle - tip.offsetWidth / 2)) + "px";
  const above = top - tip.offsetHeight - 12;
  tip.style.top = (above > 4 ? above : top + h * scale + 14) + "px";
}

function distance([x, y, w, h], a, b) {
  return Math.hypot(Math.max(x - a, 0, a - x - w), Math.max(y - b, 0, b - y - h));
}

for (const drawing of document.querySelectorAll("[data-marks]")) {
  const svg = drawing.querySelector("svg");
  let marks = null, at = -1;
  const read = () => marks ?? (marks = JSON.parse(drawing.dataset.marks));
  const point = (event) => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const a = (event.clientX - box.left) * scale, b = (event.clientY - box.top) * scale;
    let best = 24;
    at = -1;
    read().forEach((mark, i) => {
      const far = distance(mark, a, b);
      if (far < best) { best = far; at = i; }
    });
    if (at < 0) hide(); else show(drawing, svg, marks[at]);
  };
  drawing.addEventListener("pointermove", point);
  drawing.addEventListener("pointerdown", point);
  drawing.addEventListener("pointerleave", hide);
  drawing.addEventListener("blur", hide);
  drawing.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step || !read().length) return;
    event.preventDefault();
    at = (at + step + marks.length) % marks.length;
    show(drawing, svg, marks[at]);
  });
}
document.addEventListener("scroll", hide, { passive: true, capture: true });
window.addEventListener("beforeprint", hide);
