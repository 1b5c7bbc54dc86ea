"use strict";
// Shows views as they come. What users named is only ever set as text, never parsed as HTML.

const STATES = {
  w: "working", r: "waiting for rows", f: "waiting for space", a: "held back by admit",
  m: "moving bytes", s: "no processor time",
};
const REASONS = {
  no_rows: "no rows left", field: "a field is missing", open_group: "groups are incomplete",
  too_few: "too few rows, not sealed", filter: "its filter excludes the rows", leased: "the rest is leased",
  behind: "behind older claims", plan: "its plan", lag: "admit: too far ahead",
  room_open: "room for new groups", room_continue: "room for begun groups",
  room_pull: "room for other hosts' values", room_metadata: "room for metadata",
};
const HUES = { no_rows: 45, field: 20, open_group: 300, too_few: 200, filter: 330, leased: 260, behind: 230, plan: 180 };
const PRODUCER = "rollout (puts)";
const LABELS = 76, FULLEST = 8;

const $ = id => document.getElementById(id);
let view = null, received = 0, connected = false, chosen = 0, picture = null, cursor = null;

function el(tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name === "style") Object.assign(made.style, value);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function put(id, ...children) { $(id).replaceChildren(...children); }

function text(id, said) { if ($(id).textContent !== said) $(id).textContent = said; }

function seconds(s) {
  if (s > 0 && s < 0.01) return `${(1000 * s).toPrecision(1)} ms`;
  if (s < 9.95) return `${+(+s.toFixed(2)).toPrecision(2)} s`;
  if (s < 99.5) return `${s.toFixed(0)} s`;
  return s < 5970 ? `${(s / 60).toFixed(0)} min` : `${(s / 3600).toFixed(1)} h`;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < 4) { n /= 1024; unit++; }
  return `${unit && n < 100 ? n.toFixed(1) : n.toFixed(0)} ${units[unit]}`;
}

const percent = share => `${Math.round(100 * share)} %`;
const stageName = stage => stage || PRODUCER;
const byName = (a, b) => a.localeCompare(b, undefined, { numeric: true });

function table(caption, heads, rows) {
  const cell = (value, n) => el("td", { className: n ? "" : "name", title: n ? "" : value }, value);
  return el("div", {}, ...(caption ? [el("p", { className: "hint" }, caption)] : []), el("table", {},
    el("thead", {}, el("tr", {}, ...heads.map(head => el("th", { scope: "col" }, head)))),
    el("tbody", {}, ...rows.map(row => el("tr", {}, ...row.map(cell))))));
}

function none(said) { return el("p", { className: "soft" }, said); }

function more(count, what) { return count ? [none(`and ${count} more ${what}`)] : []; }

// the top

function showState() {
  const age = view ? view.age_s + (performance.now() - received) / 1000 : 0;
  const late = view && age > 3 * view.every_s + 5;
  document.body.classList.toggle("stale", Boolean(view) && (late || !connected));
  const known = view ? `run ${view.run} · ${view.hosts.length} host${view.hosts.length === 1 ? "" : "s"} · known ${seconds(age)} ago` : "";
  if (!connected && received) {
    text("state", `No connection to \`dataplane watch\`: it may have ended. ${known}.`);
  } else if (late) {
    text("state", `Stale: the plane has not answered for ${seconds(age)}. ${known}.`);
  } else if (view) {
    text("state", `${known} · asked every ${seconds(view.every_s)}`);
  }
}

function showSteps() {
  const bars = $("bars"), longest = Math.max(1e-9, ...view.steps.map(step => step.seconds));
  while (bars.children.length > view.steps.length) bars.lastChild.remove();
  view.steps.forEach((step, n) => {
    if (!bars.children[n]) {
      const bar = el("div", { role: "option", id: `bar-${n}` }, el("span", {}, el("i")));
      bar.addEventListener("click", () => choose(view.steps[n].number));
      bars.append(bar);
    }
    const bar = bars.children[n], span = bar.firstChild;
    const label = `${step.partition}: ${seconds(step.seconds)}, idle ${seconds(step.idle_s)}, ${step.cause}${step.finished ? "" : ", not finished"}`;
    bar.setAttribute("aria-label", label);
    bar.title = label;
    bar.className = step.healthy || step.cause === "unknown" ? "" : "wrong";
    span.style.height = `${100 * step.seconds / longest}%`;
    span.firstChild.style.height = `${step.seconds ? Math.min(100, 100 * step.idle_s / step.seconds) : 0}%`;
    const is = step.number === shown();
    bar.setAttribute("aria-selected", is);
    if (is) bars.setAttribute("aria-activedescendant", bar.id);
  });
  const step = view.steps.find(step => step.number === shown());
  text("chosen", chosen && picture ? picture.sentence : step ? `${step.partition}: ${step.cause}` : "No step has begun.");
  $("follow").hidden = !chosen;
}

function shown() { return chosen || (view.steps.length ? view.steps[view.steps.length - 1].number : 0); }

async function choose(number) {
  chosen = number === view.steps[view.steps.length - 1].number ? 0 : number;
  await load();
  showAll();
}

async function load() {
  if (!view.steps.some(step => step.number === chosen)) chosen = 0;
  const asked = chosen;
  if (!asked) { picture = view.picture; return; }
  try {
    const answer = await fetch(`/step?number=${asked}`);
    if (asked !== chosen) return;
    if (answer.ok) picture = await answer.json();
    else { chosen = 0; picture = view.picture; }
  } catch { /* the connection is lost, which the state says */ }
}

$("bars").addEventListener("keydown", event => {
  if (!view || !view.steps.length) return;
  const at = view.steps.findIndex(step => step.number === shown()), last = view.steps.length - 1;
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last, Escape: last }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  choose(view.steps[Math.min(last, Math.max(0, to))].number);
});
$("follow").addEventListener("click", () => { choose(view.steps[view.steps.length - 1].number); $("bars").focus(); });

// lanes

function showLanes() {
  const stages = new Map();
  for (const lane of picture.lanes) {
    if (!stages.has(lane.stage)) stages.set(lane.stage, []);
    stages.get(lane.stage).push(lane);
  }
  const holder = $("stages"), focused = holder.contains(document.activeElement);
  const drawn = new Map([...holder.querySelectorAll("canvas")].map(canvas => [canvas.stage, canvas]));
  for (const one of [...holder.children]) if (!stages.has(one.stage)) one.remove();
  if (!stages.size) holder.append(none("No worker has done anything yet."));
  let before = null;
  for (const [stage, lanes] of stages) {
    lanes.sort((a, b) => byName(a.host, b.host));
    const canvas = drawn.get(stage) || newPicture(stage), heading = canvas.heading;
    if (canvas.previousElementSibling !== heading || heading.previousElementSibling !== before) {
      if (before) before.after(heading, canvas);
      else holder.prepend(heading, canvas);
    }
    before = canvas;
    canvas.lanes = lanes;
    heading.textContent = `${stageName(stage)}: ${summary(lanes)}`;
    canvas.setAttribute("aria-label", `${stageName(stage)} on ${lanes.length} host${lanes.length === 1 ? "" : "s"}: ${summary(lanes)}`);
    draw(canvas);
  }
  if (focused && !holder.contains(document.activeElement)) (before || $("bars")).focus();
  showCursor();
}

function newPicture(stage) {
  // An application gets its keys from screen readers, which keep arrow keys of an image to themselves.
  const canvas = el("canvas", { tabIndex: 0, role: "application", "aria-roledescription": "timeline", "aria-describedby": "lanes-keys" });
  canvas.addEventListener("keydown", event => steer(event, canvas));
  canvas.addEventListener("pointermove", event => point(event, canvas));
  canvas.heading = el("h3");
  canvas.stage = canvas.heading.stage = stage;
  return canvas;
}

function summary(lanes) {
  const counts = {};
  let all = 0;
  for (const lane of lanes) for (const cell of lane.cells) if (cell !== " ") { counts[cell] = (counts[cell] || 0) + 1; all++; }
  return Object.keys(STATES).filter(state => counts[state]).map(state => `${STATES[state]} ${percent(counts[state] / all)}`).join(", ");
}

function rowHeight(canvas) { return canvas.lanes.length > 24 ? 7 : 15; }

function draw(canvas) {
  const css = getComputedStyle(document.documentElement), colour = name => css.getPropertyValue(`--${name}`);
  const wide = canvas.clientWidth, row = rowHeight(canvas), high = row * canvas.lanes.length, scale = devicePixelRatio || 1;
  canvas.style.height = `${high}px`;
  canvas.width = wide * scale;
  canvas.height = high * scale;
  const paint = canvas.getContext("2d");
  paint.scale(scale, scale);
  paint.font = "10px system-ui, sans-serif";
  paint.textBaseline = "middle";
  const every = Math.ceil(13 / row), room = wide - LABELS;
  canvas.lanes.forEach((lane, y) => {
    if (y % every === 0) {
      paint.fillStyle = colour("soft");
      paint.fillText(clipped(paint, lane.host), 0, y * row + row / 2);
    }
    const cells = lane.cells, cell = room / cells.length;
    for (let from = 0; from < cells.length;) {
      let to = from + 1;
      while (to < cells.length && cells[to] === cells[from]) to++;
      paint.fillStyle = colour(cells[from] === " " ? "none" : cells[from]);
      paint.fillRect(LABELS + from * cell, y * row, (to - from) * cell + 0.5, row - 1);
      from = to;
    }
  });
  const at = cursorOf(canvas);
  if (!at) return;
  const cell = room / canvas.lanes[at.y].cells.length;
  for (const [name, line] of [["paper", 6], ["ink", 2]]) {
    paint.strokeStyle = colour(name);
    paint.lineWidth = line;
    paint.strokeRect(LABELS + at.x * cell, at.y * row + 1, Math.max(cell, 2), row - 3);
  }
}

function clipped(paint, name) {
  let shown = name;
  while (shown && paint.measureText(shown).width > LABELS - 6) shown = shown.slice(0, -1);
  return shown === name ? name : `${shown.slice(0, -1)}…`;
}

function steer(event, canvas) {
  const at = cursorOf(canvas), cells = canvas.lanes[0].cells.length;
  if (event.key === "Escape") { cursor = null; showLanes(); return; }
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-cells, 0], End: [cells, 0] }[event.key];
  if (!step) return;
  event.preventDefault();
  const from = at || { x: 0, y: 0 }, moves = at || Math.abs(step[0]) > 1;
  move(canvas, from.x + (moves ? step[0] : 0), from.y + (moves ? step[1] : 0));
}

function point(event, canvas) {
  const cells = canvas.lanes[0].cells.length, room = canvas.clientWidth - LABELS;
  move(canvas, Math.floor((event.offsetX - LABELS) / room * cells), Math.floor(event.offsetY / rowHeight(canvas)));
}

function move(canvas, x, y) {
  const lanes = canvas.lanes, cells = lanes[0].cells.length;
  cursor = {
    stage: canvas.stage, partition: picture.partition,
    x: Math.min(cells - 1, Math.max(0, x)), y: Math.min(lanes.length - 1, Math.max(0, y)),
  };
  for (const one of $("stages").querySelectorAll("canvas")) draw(one);
  showCursor();
}

// A cursor stays with the step in which it was set.
function cursorOf(canvas) {
  const is = cursor && cursor.partition === picture.partition && cursor.stage === canvas.stage;
  return is && cursor.y < canvas.lanes.length ? cursor : null;
}

function showCursor() {
  const canvas = [...$("stages").querySelectorAll("canvas")].find(cursorOf);
  if (!canvas) { text("cursor", ""); return; }
  const lane = canvas.lanes[cursor.y], cells = lane.cells.length, state = STATES[lane.cells[cursor.x]] || "nothing known";
  text("cursor", `${stageName(canvas.stage)} on ${lane.host}, after ${seconds(picture.seconds * cursor.x / cells)}: ${state}. Over the step: ${summary([lane])}.`);
}

// figures of a step

function stacked(name, parts, largest) {
  const whole = parts.reduce((sum, part) => sum + part.size, 0);
  const pieces = parts.map(part => el("i", { title: part.told, style: { width: `${largest ? 100 * part.size / largest : 0}%`, background: part.colour } }));
  return el("div", { className: "bar" }, el("span", { title: name }, name), el("div", { role: "img", "aria-label": `${name}: ${whole ? parts.map(part => part.told).join(", ") : "nothing"}` }, ...pieces),
    el("div", { className: "told" }, ...parts.flatMap((part, n) => [
      el("b", { style: { color: part.colour } }, "■ "), part.told + (n < parts.length - 1 ? ", " : "")])));
}

function hue(reason) {
  if (reason.startsWith("room_")) return "var(--f)";
  if (reason === "lag") return "var(--a)";
  return reason in HUES ? `hsl(${HUES[reason]} 50% 50%)` : "var(--soft)";
}

function showWaits() {
  const stages = new Map();
  for (const wait of picture.waits) {
    if (!stages.has(wait.stage)) stages.set(wait.stage, []);
    stages.get(wait.stage).push({ size: wait.seconds, told: `${REASONS[wait.reason] || wait.reason} ${seconds(wait.seconds)}`, colour: hue(wait.reason) });
  }
  const largest = Math.max(0, ...[...stages.values()].map(parts => parts.reduce((sum, part) => sum + part.size, 0)));
  const bars = [...stages].map(([stage, parts]) => stacked(stageName(stage), parts, largest));
  put("waits", ...bars.length ? [none("Seconds, summed over workers."), ...bars] : [none("Nothing waited.")]);
}

const dwell = one => one.rows ? [seconds(one.p50), seconds(one.p90), seconds(one.p99)] : ["–", "–", "–"];

function showFlow() {
  const groups = picture.begun ? `${picture.begun} groups begun, ${picture.unready} of them not complete. ` : "";
  const complete = picture.complete.rows ? `Begun to complete: p50 ${seconds(picture.complete.p50)}, p90 ${seconds(picture.complete.p90)}, p99 ${seconds(picture.complete.p99)}. ` : "";
  const heads = ["stage", "ready", "leased", "acked", "ready to leased p50", "p90", "p99", "leased to acked p50", "p90", "p99"];
  const rows = picture.flow.map(one => [one.stage, one.ready, one.leased, one.acked, ...dwell(one.queue), ...dwell(one.lease)]);
  put("flow", rows.length || groups ? table(`${groups}${complete}Rows:`, heads, rows) : none("No rows have been put."));
}

function showLinks() {
  const rows = picture.links.map(one => [`${one.source} → ${one.target}`, bytes(one.nbytes), `${bytes(one.per_s)}/s`, one.ratio ? `${one.ratio.toPrecision(2)} ×` : "–"]);
  put("links", ...rows.length ? [table("While the step lasted", ["from → to", "bytes", "while moving", "of other links' median"], rows), ...more(picture.left_out.links, "host pairs")] : [none("No bytes moved between hosts.")]);
}

function showSlow() {
  const after = s => s < 0 ? "not yet" : seconds(s);
  const late = picture.late.map(one => [one.group, after(one.put), after(one.ready), after(one.acked)]);
  put("late", late.length ? table("Groups that ended last, after the step began", ["group", "put", "ready for the last stage", "acked"], late) : none("No groups."));
  const paces = picture.paces.map(one => [`${stageName(one.stage)} on ${one.host}`, `${+one.per_s.toPrecision(3)} rows/s`, `${one.ratio.toPrecision(2)} ×`]);
  put("paces", paces.length ? table("Slowest hosts of each stage, while they worked", ["stage and host", "pace", "of the others' median"], paces) : none("No stage ran on two hosts."));
}

function showStaleness() {
  const found = picture.staleness;
  if (!found) { put("staleness", none("No call of advance(), so rows have no version.")); return; }
  const counts = Object.entries(found), largest = Math.max(0, ...counts.map(([, many]) => many));
  put("staleness", none("Groups by how many versions passed between their first put and their ack."),
    ...counts.map(([lag, many]) => stacked(lag, [{ size: many, told: `${many} group${many === 1 ? "" : "s"}`, colour: "var(--m)" }], largest)));
}

// the plane now

function showNow() {
  const rows = view.queues.map(one => [one.partition, one.stage, one.ready, one.leased, one.acked_per_s.toFixed(1), one.calls ? `${one.calls}, the oldest ${seconds(one.for_s)}` : "–"]);
  put("queues", ...rows.length ? [table("", ["partition", "stage", "ready", "leased", "acked/s", "calls that wait"], rows), ...more(view.left_out.queues, "queues")] : [none("Nothing is queued.")]);
  const stuck = view.stuck.map(one => el("li", {}, `${one.what}, on ${one.peer}, ${seconds(one.for_s)}${one.why ? `: ${one.why}` : ""}`));
  put("stuck", ...stuck.length ? [el("ul", {}, ...stuck), ...more(view.left_out.stuck, "calls")] : [none("None.")]);
  const full = one => one.error ? 2 : one.size_bytes ? one.used_bytes / one.size_bytes : 0;
  const hosts = [...view.hosts].sort((a, b) => full(b) - full(a) || byName(a.name, b.name)).map(one => {
    if (one.error) return el("div", { className: "bar" }, el("span", {}, one.name), el("span", { className: "bad" }, "does not answer"));
    const parts = [{ size: one.used_bytes, colour: one.used_bytes > 0.9 * one.size_bytes ? "var(--f)" : "var(--m)", told: `${bytes(one.used_bytes)} of ${bytes(one.size_bytes)}${one.spilled_bytes ? `, ${bytes(one.spilled_bytes)} spilled` : ""}` }];
    const bar = stacked(one.name, parts, one.size_bytes);
    for (const held of one.holders) bar.lastChild.append(el("br"), `${held.who} holds ${bytes(held.nbytes)}`);
    return bar;
  });
  put("arena", ...hosts.length ? hosts.slice(0, FULLEST) : [none("No host is known yet.")]);
  const others = $("others");
  others.hidden = hosts.length <= FULLEST;
  others.firstChild.textContent = `${hosts.length - FULLEST} hosts with emptier arenas`;
  others.lastChild.replaceChildren(...hosts.slice(FULLEST), ...more(view.left_out.hosts, "hosts"));
}

function showAll() {
  if (!view) return;
  text("sentence", view.sentence);
  document.title = view.steps.length ? `${view.steps[view.steps.length - 1].partition} · dataplane` : "dataplane";
  const said = view.trouble.join("\n");
  if ($("trouble").dataset.said !== said) {
    $("trouble").dataset.said = said;
    put("trouble", ...view.trouble.map(one => el("li", {}, one)));
  }
  showState();
  showSteps();
  showNow();
  $("lanes").hidden = !picture;
  if (!picture) return;
  showLanes();
  showWaits();
  showFlow();
  showLinks();
  showSlow();
  showStaleness();
}

function listen() {
  const source = new EventSource("/live");
  source.onopen = () => { connected = true; showState(); };
  source.onmessage = async event => {
    view = JSON.parse(event.data);
    received = performance.now();
    connected = true;
    const old = picture && chosen ? view.steps.find(step => step.number === chosen) : null;
    if (!old || !old.finished) await load();
    showAll();
  };
  source.onerror = () => {
    connected = false;
    received = received || 1;
    showState();
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  };
}

put("legend", ...Object.entries(STATES).map(([state, said]) => el("li", { className: state }, el("span", {}, said))));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showAll);
addEventListener("resize", () => picture && showLanes());
setInterval(showState, 1000);
listen();
