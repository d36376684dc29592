// What part is in view, and how it is drawn. Lengths are in CSS pixels.
// --- the view ------------------------------------------------------------------------------------------------

const view = {start: 0, end: length};
let width = 0, height = 0, ratio = 1, total = 0, theme = {}, fills = [], waiting = false;
let chosen = null, lane = 0, hovered = null, drawn = 0, arrows = 0, frame = 0;
const MOST_ARROWS = 400;

function setView(start, end) {
  const span = end - start > length * (1 - 1e-9) ? length : Math.max(NARROWEST, end - start);
  view.start = span === length ? 0 : Math.max(0, Math.min(length - span, start + (end - start - span) / 2));
  view.end = span === length ? length : view.start + span;
  redraw();
}
const scale = () => (width - LEFT - RIGHT) / (view.end - view.start);
const toX = (time) => LEFT + (time - view.start) * scale();
const toTime = (x) => view.start + (x - LEFT) / scale();
function zoom(factor, x) {
  const at = x === undefined ? (view.start + view.end) / 2 : toTime(Math.max(LEFT, Math.min(width - RIGHT, x)));
  setView(at - (at - view.start) * factor, at + (view.end - at) * factor);
}
function move(share) {
  const by = (view.end - view.start) * share;
  setView(view.start + by, view.end + by);
}
function goStep(by) {
  if (!stepList.length) return;
  const middle = (view.start + view.end) / 2;
  const all = view.end - view.start >= length;
  const inside = stepList.filter((step) => step.start <= middle).length - 1;
  const next = all ? (by > 0 ? 0 : stepList.length - 1) : Math.max(0, Math.min(stepList.length - 1, inside + by));
  setView(stepList[next].start, stepList[next].end);
}

// Lanes as high as all of them fit; below the least height the chart scrolls.
function layout() {
  const limit = Math.max(300, window.innerHeight * 0.68);
  const fixed = AXIS + 4 + HEAD * DATA.timelines.length + GAP * ranks.length;
  const talk = talks ? (ranks.length <= 16 ? 6 : 4) : 0;
  const each = Math.floor((limit - fixed) / Math.max(1, ranks.length)) - 2 * talk;
  const large = Math.max(16, Math.min(44, each));
  let y = AXIS;
  for (const line of lanes) {
    line.y = y;
    if (line.title !== undefined) { y += HEAD; continue; }
    line.height = large + 2 * talk;
    line.tops = [0, large, large + talk];
    line.heights = [large, talk, talk];
    y += line.height + GAP;
  }
  total = y + 4;
  $("space").style.height = `${total}px`;
  height = Math.min(total, limit);
  width = chart.clientWidth;
  ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  chart.style.height = `${height}px`;
  makeTheme();
  redraw();
}

function makeTheme() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "text", "faint", "line", "ground", "hatch", "focus"])
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  fills = KINDS.map((kind) => {
    const ground = kind.kind === "wait" ? theme.ground : kind.fill;
    const stroke = kind.kind === "wait" ? theme.hatch : kind.stroke;
    if (!kind.path) return {plain: ground, pattern: ground};
    const tile = document.createElement("canvas");
    tile.width = tile.height = Math.round(DATA.tile * ratio);
    const brush = tile.getContext("2d");
    brush.scale(tile.width / DATA.tile, tile.height / DATA.tile);
    brush.fillStyle = ground;
    brush.fillRect(0, 0, DATA.tile, DATA.tile);
    brush.strokeStyle = stroke;
    brush.lineWidth = kind.width;
    brush.stroke(new Path2D(kind.path));
    return {plain: kind.kind === "wait" ? theme.hatch : ground, pattern: context.createPattern(tile, "repeat"), tile};
  });
}

// --- drawing -------------------------------------------------------------------------------------------------

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function draw() {
  const began = performance.now(), top = chart.scrollTop;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, width, height);
  const batches = new Map(), numbers = [];
  const shown = lanes.filter((line) => line.y - top < height && line.y + (line.height || HEAD) - top > AXIS);
  context.fillStyle = theme.ground;
  for (const line of shown) {
    const x = Math.max(LEFT, toX(0)), right = Math.min(width - RIGHT, toX(line.timeline.length));
    if (line.rank && right > x) context.fillRect(x, line.y - top, right - x, line.height);
  }
  drawn = 0;
  for (const line of shown) {
    if (line.rank) line.rows.forEach((row, n) => collect(row, line.y - top + line.tops[n], line.heights[n], batches, numbers));
  }
  drawTicks(top, false);
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, width - LEFT - RIGHT, height);
  context.clip();
  fillBatches(batches);
  drawNumbers(numbers);
  drawMessages(top);
  drawChosen(top);
  context.restore();
  for (const line of shown) drawNames(line, line.y - top);
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, width, AXIS - 4);
  drawTicks(top, true);
  const unit = unitOf(view.end - view.start);
  $("range").textContent = `${inUnit(view.start, unit)} to ${inUnit(view.end, unit)} ${unit.name}`;
  const middle = (view.start + view.end) / 2;
  const inside = stepList.filter((step) => step.start <= middle && middle <= step.end);
  $("step").textContent = inside.length && view.end - view.start < length ? `step ${inside[0].step}` : `${stepList.length} steps`;
  frame = performance.now() - began;
}

// Puts the row's visible spans into batches of one fill each. Spans below a pixel are merged: each column gets the
// kind that has most of it, the fainter the less of the column is filled.
function collect(row, y, rowHeight, batches, numbers) {
  const perPixel = 1 / scale(), spread = new Float64Array(KINDS.length);
  let column = -1;
  const put = (kind, fill, alpha, x, w) => {
    const key = (kind * 2 + fill) * 8 + alpha;
    let batch = batches.get(key);
    if (!batch) batches.set(key, (batch = []));
    const last = batch.length - 4;
    if (w === 1 && column >= 0 && last >= 0 && batch[last] + batch[last + 2] === x && batch[last + 1] > y && batch[last + 1] < y + rowHeight) {
      batch[last + 2] += 1;
      return;
    }
    const inset = FULL.has(kind) || rowHeight < 12 ? (rowHeight < 12 ? 0.5 : 2) : rowHeight / 4;
    batch.push(x, y + inset, w, rowHeight - 2 * inset);
    drawn++;
  };
  const flush = () => {
    if (column < 0) return;
    let sum = 0, most = 0;
    for (let kind = 0; kind < spread.length; kind++) {
      sum += spread[kind];
      if (spread[kind] > spread[most]) most = kind;
    }
    if (sum > 0) put(most, 0, Math.min(7, 1 + 2 * Math.floor(sum * scale() * 3.3)), column, 1);
    spread.fill(0);
    column = -1;
  };
  for (let i = above(row.reached, view.start); i < row.start.length && row.start[i] < view.end; i++) {
    if (row.end[i] < view.start) continue;
    const span = row.end[i] - row.start[i], x = Math.max(toX(row.start[i]), LEFT - 20);
    if (span < perPixel) {
      const at = Math.floor(x);
      if (at !== column) { flush(); column = at; }
      spread[row.kind[i]] += Math.max(span, perPixel / 50);
      continue;
    }
    flush();
    const w = Math.min(toX(row.end[i]), width - RIGHT + 20) - x;
    put(row.kind[i], w >= 5 ? 1 : 0, 7, x, w > 4 ? w - 0.75 : w);
    const microbatch = row.rank.spans.microbatch[row.index[i]];
    if (WORK.has(row.kind[i]) && microbatch >= 0 && rowHeight >= 14 && w >= 8 + 7 * `${microbatch}`.length)
      numbers.push({x: x + w / 2, y: y + rowHeight / 2, text: `${microbatch}`, ink: KINDS[row.kind[i]].ink});
  }
  flush();
}

function fillBatches(batches) {
  const shift = -((view.start * scale()) % DATA.tile) + LEFT;
  for (const [key, rects] of batches) {
    const kind = key >> 4, {plain, pattern, tile} = fills[kind];
    if ((key >> 3) & 1) {
      if (tile) pattern.setTransform(new DOMMatrix([DATA.tile / tile.width, 0, 0, DATA.tile / tile.width, shift, 0]));
      context.fillStyle = pattern;
    } else context.fillStyle = plain;
    context.globalAlpha = (key & 7) / 7;
    for (let i = 0; i < rects.length; i += 4) context.fillRect(rects[i], rects[i + 1], rects[i + 2], rects[i + 3]);
  }
  context.globalAlpha = 1;
}

function drawNumbers(numbers) {
  context.font = `12px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const number of numbers) {
    context.fillStyle = number.ink;
    context.fillText(number.text, number.x, number.y + 0.5);
  }
}

// An arrow from where each message was ready to where it arrived; none where they would cover what they explain.
function drawMessages(top) {
  const seen = messages.filter((message) => message.end > view.start && message.start < view.end);
  arrows = seen.length <= MOST_ARROWS ? seen.length : 0;
  if (!arrows) return;
  context.strokeStyle = context.fillStyle = theme.text;
  context.lineWidth = 1;
  context.globalAlpha = 0.55;
  for (const message of seen) {
    const down = message.to.y > message.from.y;
    const edge = (line, below) => line.y - top + (below ? line.heights[0] : 0);
    const x = toX(message.start), y = edge(message.from, down), toRight = toX(message.end), toY = edge(message.to, !down);
    const turn = Math.atan2(toY - y, toRight - x);
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(toRight, toY);
    context.stroke();
    context.beginPath();
    context.moveTo(toRight, toY);
    for (const side of [-0.4, 0.4]) context.lineTo(toRight - 7 * Math.cos(turn + side), toY - 7 * Math.sin(turn + side));
    context.fill();
  }
  context.globalAlpha = 1;
}

function drawNames(line, y) {
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.font = line.rank ? `13px ${FONT}` : `600 13px ${FONT}`;
  context.fillStyle = theme.text;
  if (!line.rank) {
    context.fillStyle = theme.paper;
    context.fillRect(0, y + 1, context.measureText(line.title).width + 8, HEAD - 3);
    context.fillStyle = theme.text;
    context.fillText(line.title, 0, y + HEAD / 2 + 1, width - RIGHT);
    context.font = `12px ${FONT}`;
    context.fillStyle = theme.faint;
    context.textAlign = "right";
    context.fillText("idle", width - 4, y + HEAD / 2 + 1);
    return;
  }
  context.fillText(`rank ${line.rank.rank}`, 6, y + line.heights[0] / 2, LEFT - 10);
  context.textAlign = "right";
  context.fillText(percent(idle(line)), width - 4, y + line.heights[0] / 2);
  if (line === ranks[lane] && document.activeElement === canvas) {
    context.fillStyle = theme.focus;
    context.fillRect(0, y, 3, line.height);
  }
}

// The share of what is in view, and inside the lane's own timeline, without work.
function idle(line) {
  const start = Math.min(view.start, line.timeline.length), end = Math.min(view.end, line.timeline.length);
  return end > start ? 1 - (line.busy(end) - line.busy(start)) / (end - start) : 0;
}

function drawChosen(top) {
  if (!chosen) return;
  const {line, row, i} = chosen, n = line.rows.indexOf(row);
  const x = toX(row.start[i]), w = Math.max(2, toX(row.end[i]) - x);
  context.strokeStyle = theme.focus;
  context.lineWidth = 2;
  context.strokeRect(x, line.y - top + line.tops[n] + 1, w, Math.max(3, line.heights[n] - 2));
}

function drawTicks(top, names) {
  const unit = unitOf(view.end - view.start), step = roundStep((view.end - view.start) / Math.max(2, (width - LEFT - RIGHT) / 110));
  context.lineWidth = 1;
  context.font = `12px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  const digits = Math.max(0, Math.ceil(-Math.log10(step / unit.size) - 1e-9));
  for (let time = Math.ceil(view.start / step) * step; time <= view.end; time += step) {
    const x = toX(time);
    context.fillStyle = theme.line;
    if (!names) context.fillRect(x, AXIS - 4, 1, Math.min(height, total - top) - AXIS + 4);
    context.fillStyle = theme.faint;
    if (names) context.fillText((time / unit.size).toFixed(digits), x, 12);
  }
  if (!names) return;
  context.textAlign = "left";
  context.fillStyle = theme.faint;
  context.fillText(unit.name, 6, 12);
  let free = LEFT;
  for (const step of stepList.length > 1 ? stepList : []) {
    const x = toX(step.start);
    if (x < free || x > width - RIGHT - 40) continue;
    context.fillRect(x, AXIS - 14, 1, 10);
    context.fillText(`step ${step.step}`, x + 4, AXIS - 9);
    free = x + 60;
  }
}
