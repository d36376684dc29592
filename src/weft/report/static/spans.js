// The page's data: lanes of spans in which a moment is found by halving. Times are in nanoseconds.
const DATA = JSON.parse(document.getElementById("data").textContent);
const KINDS = DATA.kinds, STEP = KINDS.length;
const CODE = Object.fromEntries(KINDS.map((kind, code) => [kind.kind, code]));
const WORK = new Set(["F", "B", "I", "W"].map((kind) => CODE[kind]));
const FULL = new Set([...WORK, CODE.wait]);
const LEFT = 74, RIGHT = 64, AXIS = 34, HEAD = 22, GAP = 4, NARROWEST = 50;
const FONT = 'system-ui, "DejaVu Sans", Verdana, Helvetica, Arial, sans-serif';
const $ = (id) => document.getElementById(id);
const canvas = $("canvas"), chart = $("chart"), tip = $("tip");
const context = canvas.getContext("2d", {alpha: false});
for (const timeline of DATA.timelines) timeline.length *= DATA.tick;
const length = Math.max(1, ...DATA.timelines.map((timeline) => timeline.length));

// --- the data, as typed arrays in which a time is found by halving -------------------------------------------

// Index of the first element of `sorted` that is above `value`.
function above(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

// Columns as they were before they were made short: starts and steps are differences, times are in ticks.
function unfold(spans) {
  const sums = (values, factor) => { let sum = 0; return values.map((value) => (sum += value) * factor); };
  spans.start = sums(spans.start, DATA.tick);
  spans.end = spans.start.map((start, i) => start + spans.duration[i] * DATA.tick);
  spans.step = sums(spans.step, 1);
}

// The same spans once for each moment, as far as they end before the next one: an ideal step above every recorded one.
function repeat(spans, moments) {
  const columns = ["kind", "microbatch", "stage", "step", "label", "start", "end"], once = {...spans};
  for (const name of columns) spans[name] = [];
  moments.forEach((moment, n) => once.end.forEach((end, i) => {
    if (end + moment > (moments[n + 1] ?? Infinity)) return;
    for (const name of columns) spans[name].push(once[name][i] + (name === "start" || name === "end" ? moment : 0));
  }));
}

// Spans of one row of a lane. `reached[i]` is the latest end up to span i: it ascends even where spans overlap.
function makeRow(rank, kinds) {
  const spans = rank.spans, chosen = [];
  spans.kind.forEach((kind, index) => { if (kinds(kind)) chosen.push(index); });
  const start = Float64Array.from(chosen, (i) => spans.start[i]);
  const end = Float64Array.from(chosen, (i) => spans.end[i]);
  let latest = -1;
  const reached = end.map((time) => (latest = Math.max(latest, time)));
  return {rank, start, end, reached, index: chosen, kind: Uint8Array.from(chosen, (i) => spans.kind[i])};
}

// The time worked up to any moment: what overlaps counts once.
function makeBusy(row) {
  const from = [], to = [], before = [];
  let sum = 0;
  for (let i = 0; i < row.start.length; i++) {
    if (!WORK.has(row.kind[i])) continue;
    const last = to.length - 1;
    if (last >= 0 && row.start[i] <= to[last]) {
      if (row.end[i] > to[last]) { sum += row.end[i] - to[last]; to[last] = row.end[i]; }
      continue;
    }
    from.push(row.start[i]); to.push(row.end[i]); before.push(sum);
    sum += row.end[i] - row.start[i];
  }
  return (time) => {
    const i = above(from, time) - 1;
    return i < 0 ? 0 : before[i] + Math.min(time, to[i]) - from[i];
  };
}

const talks = DATA.timelines.some((timeline) => timeline.ranks.some(
  (rank) => rank.spans.kind.some((kind) => kind === CODE.send || kind === CODE.recv)));
const lanes = [], steps = [];
DATA.timelines.forEach((timeline, number) => {
  lanes.push({title: timeline.name, timeline});
  for (const rank of timeline.ranks) {
    unfold(rank.spans);
    if (timeline.moments) repeat(rank.spans, timeline.moments.map((moment) => moment * DATA.tick));
    const work = makeRow(rank, (kind) => kind < STEP && kind !== CODE.send && kind !== CODE.recv);
    const rows = [work];
    if (talks) rows.push(makeRow(rank, (kind) => kind === CODE.send), makeRow(rank, (kind) => kind === CODE.recv));
    lanes.push({rank, timeline, rows, busy: makeBusy(work)});
    const spans = rank.spans;
    if (number === DATA.timelines.length - 1) spans.kind.forEach((kind, i) => {
      if (spans.step[i] < 0) return;
      let step = steps[spans.step[i]];
      if (!step) step = steps[spans.step[i]] = {step: spans.step[i], start: Infinity, end: 0};
      step.start = Math.min(step.start, spans.start[i]);
      step.end = Math.max(step.end, spans.end[i]);
    });
  }
});
const stepList = steps.filter(Boolean);
const ranks = lanes.filter((lane) => lane.rank);

// Messages by arrival: from the lane of the sender to that of the receiver.
const messages = DATA.timelines.flatMap((timeline) => {
  if (!timeline.messages) return [];
  const own = new Map(ranks.filter((lane) => lane.timeline === timeline).map((lane) => [lane.rank.rank, lane]));
  const {sender, receiver, arrived, taken} = timeline.messages;
  let now = 0;
  return sender.map((rank, i) => {
    now += arrived[i] * DATA.tick;
    return {from: own.get(rank), to: own.get(receiver[i]), start: now - taken[i] * DATA.tick, end: now};
  }).filter((message) => message.from && message.to);
});
