// What the page says, and what it does when it is pointed at or typed on.
// --- words ---------------------------------------------------------------------------------------------------

const UNITS = [{name: "ns", size: 1}, {name: "µs", size: 1e3}, {name: "ms", size: 1e6}, {name: "s", size: 1e9}];
const unitOf = (time) => UNITS[time < 2e3 ? 0 : time < 1e6 ? 1 : time < 1e10 ? 2 : 3];
const inUnit = (time, unit) => (time / unit.size).toFixed(unit.size === 1 ? 0 : 3);
const told = (time) => { const unit = unitOf(time); return `${inUnit(time, unit)} ${unit.name}`; };
const percent = (share) => `${(share * 100).toFixed(1)}%`;
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * 0.999);
}

function describe(row, i) {
  const spans = row.rank.spans, index = row.index[i];
  const number = (name) => (spans[name][index] >= 0 ? [`${name} ${spans[name][index]}`] : []);
  const label = spans.labels[spans.label[index]];
  return [`${KINDS[row.kind[i]].name}${label ? `: ${label}` : ""}`,
    [`rank ${row.rank.rank}`, ...number("microbatch"), ...number("stage"), ...number("step")].join(", "),
    `${told(row.end[i] - row.start[i])}, from ${(row.start[i] / 1e6).toFixed(4)} to ${(row.end[i] / 1e6).toFixed(4)} ms`];
}

// --- pointer and keys ----------------------------------------------------------------------------------------

function find(x, y) {
  if (x < LEFT || x > width - RIGHT || y < AXIS) return null;
  const at = y + chart.scrollTop;
  const line = ranks.find((candidate) => at >= candidate.y && at < candidate.y + candidate.height);
  if (!line) return null;
  const n = talks ? line.tops.filter((offset) => at - line.y >= offset).length - 1 : 0;
  const row = line.rows[n], time = toTime(x), near = 2 / scale();
  let best = null;
  for (let i = above(row.reached, time - near); i < row.start.length && row.start[i] <= time + near; i++) {
    const away = Math.max(row.start[i] - time, time - row.end[i], 0);
    if (row.end[i] >= time - near && (!best || away <= best.away)) best = {line, row, i, away};
  }
  return best;
}

function showTip(x, y, found) {
  hovered = found;
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = describe(found.row, found.i).join("\n");
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > window.innerHeight ? y - box.height - 10 : y + 18}px`;
}

function choose(line, row, i) {
  chosen = {line, row, i};
  $("said").textContent = describe(row, i).join(" · ");
  const span = view.end - view.start;
  if (row.end[i] < view.start || row.start[i] > view.end) setView(row.start[i] - span / 2, row.start[i] + span / 2);
  reveal(line);
  redraw();
}
function reveal(line) {
  if (line.y - AXIS - HEAD < chart.scrollTop) chart.scrollTop = line.y - AXIS - HEAD;
  if (line.y + line.height > chart.scrollTop + height) chart.scrollTop = line.y + line.height - height;
}
function walk(by) {
  const line = ranks[lane], row = line && line.rows[0];
  if (!row || !row.start.length) return;
  let i = by > 0 ? above(row.reached, view.start) : above(row.start, view.end) - 1;
  if (chosen && chosen.line === line && chosen.row === row) i = chosen.i + by;
  choose(line, row, Math.max(0, Math.min(row.start.length - 1, i)));
}
function turnTo(by) {
  lane = Math.max(0, Math.min(ranks.length - 1, lane + by));
  const line = ranks[lane];
  if (!line) return;
  chosen = null;
  $("said").textContent = `${line.timeline.name}, rank ${line.rank.rank}: idle ${percent(idle(line))} of what is in view`;
  reveal(line);
  redraw();
}
function toChosen() {
  if (!chosen) return;
  const start = chosen.row.start[chosen.i], end = chosen.row.end[chosen.i], around = Math.max(NARROWEST, end - start);
  setView(start - around, end + around);
}
function leave() { chosen = null; $("said").textContent = ""; showTip(0, 0, null); redraw(); }

const ACTIONS = {
  in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.2), right: () => move(0.2), all: () => setView(0, length),
  before: () => goStep(-1), after: () => goStep(1),
};
const KEYS = {
  "+": ACTIONS.in, "=": ACTIONS.in, "-": ACTIONS.out, "_": ACTIONS.out, ArrowLeft: ACTIONS.left, ArrowRight: ACTIONS.right,
  Home: ACTIONS.all, "0": ACTIONS.all, ArrowUp: () => turnTo(-1), ArrowDown: () => turnTo(1), ",": () => walk(-1),
  ".": () => walk(1), Enter: toChosen, Escape: leave, "[": ACTIONS.before, "]": ACTIONS.after,
};
canvas.addEventListener("keydown", (event) => {
  const action = KEYS[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
});
$("bar").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) ACTIONS[button.dataset.do]();
});
canvas.addEventListener("wheel", (event) => {
  if (event.ctrlKey && event.deltaY === 0) return;
  event.preventDefault();
  const pixels = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? height : 1;
  const aside = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
  if (Math.abs(aside) > Math.abs(event.shiftKey ? 0 : event.deltaY)) move((aside * pixels) / (width - LEFT - RIGHT));
  else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * pixels * 0.002))), event.offsetX);
}, {passive: false});
let drag = null;
canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  drag = {x: event.offsetX, y: event.offsetY, start: view.start, end: view.end, moved: false};
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) { showTip(event.clientX, event.clientY, find(event.offsetX, event.offsetY)); return; }
  if (Math.abs(event.offsetX - drag.x) > 3) drag.moved = true;
  if (!drag.moved) return;
  canvas.classList.add("dragging");
  showTip(0, 0, null);
  const by = (drag.x - event.offsetX) / scale();
  setView(drag.start + by, drag.end + by);
});
canvas.addEventListener("pointerup", (event) => {
  const found = drag && !drag.moved && find(event.offsetX, event.offsetY);
  if (found) { lane = ranks.indexOf(found.line); choose(found.line, found.row, found.i); }
  drag = null;
  canvas.classList.remove("dragging");
});
canvas.addEventListener("pointercancel", () => { drag = null; canvas.classList.remove("dragging"); });
canvas.addEventListener("pointerleave", () => showTip(0, 0, null));
canvas.addEventListener("dblclick", (event) => zoom(0.5, event.offsetX));
for (const name of ["focus", "blur"]) canvas.addEventListener(name, redraw);
chart.addEventListener("scroll", () => { showTip(0, 0, null); redraw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { makeTheme(); redraw(); });
new ResizeObserver(layout).observe(document.body);
window.addEventListener("resize", layout);
$("stepping").hidden = stepList.length < 2;

// A page of a run names steps in a list and beside its findings.
function showStep(number) {
  const step = steps[number];
  if (!step) return;
  const around = (step.end - step.start) * 0.02;
  setView(step.start - around, step.end + around);
}
const picker = $("pick");
if (picker) {
  picker.disabled = false;
  picker.addEventListener("change", () => (picker.value ? showStep(picker.value) : setView(0, length)));
}
for (const link of document.querySelectorAll("a[data-step]")) link.addEventListener("click", (event) => {
  event.preventDefault();
  $("timeline").scrollIntoView();
  showStep(link.dataset.step);
  if (picker) picker.value = link.dataset.step;
  canvas.focus({preventScroll: true});
});

// For tests and for the curious: what is in view, and the figures as they are shown.
window.weft = Object.freeze({
  view: () => ({...view, drawn, arrows, frame}),
  setView,
  idle: () => ranks.map((line) => ({timeline: line.timeline.name, rank: line.rank.rank, idle: idle(line)})),
  place: (rank, time) => ({x: toX(time), y: ranks[rank].y - chart.scrollTop + ranks[rank].heights[0] / 2}),
  hovered: () => (hovered ? describe(hovered.row, hovered.i) : null),
  draw,
});
layout();
if (DATA.first !== undefined) showStep(DATA.first);
