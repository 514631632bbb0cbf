// The page at /: a chat over /v1/chat/completions, and the engine's live view over /page/live. Text from a model only
// ever becomes textContent.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });

function make(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

function drawn(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

// The answer, where it is good; else throws its envelope's error.
async function ask(path, options = {}) {
  const answer = await fetch(path, { headers: headers(), ...options });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(body.error?.message ?? `HTTP ${answer.status}`), { status: answer.status });
}

// The JSON of each event of a stream, until it ends or says [DONE]; throws the error that an event brings.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// ---------------------------------------------------------------------------------------------------------- the chat

let messages = [];
let noModels = null; // what tells that there are none
let running = null; // the AbortController of the answer that is being written

async function loadModels() {
  try {
    const { data } = await (await ask("v1/models")).json();
    const chosen = $("model").value;
    $("model").replaceChildren(...data.map((card) => make("option", { textContent: card.id })));
    if (data.some((card) => card.id === chosen)) $("model").value = chosen;
    noModels?.article.remove();
    noModels = null;
  } catch (error) {
    noModels ??= say("error", "Models", error.message);
  }
}

function say(kind, title, text) {
  const body = make("p", { className: "text", textContent: text });
  const article = make("article", { className: kind }, make("h3", { textContent: title }), body);
  if (kind === "error") article.setAttribute("role", "alert");
  $("log").append(article);
  $("log").scrollTop = $("log").scrollHeight;
  return { article, body };
}

// Tells a screen reader of whole words, at most every three seconds.
function announcer() {
  let told = 0;
  let last = performance.now();
  return (text, all) => {
    if (!all && performance.now() - last < 3000) return;
    const end = all ? text.length : text.lastIndexOf(" ");
    if (end <= told) return;
    $("said").textContent = text.slice(told, end);
    told = end;
    last = performance.now();
  };
}

function body() {
  const system = $("system").value.trim();
  return JSON.stringify({
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    ...($("temperature").value && { temperature: Number($("temperature").value) }),
    ...($("max-tokens").value && { max_tokens: Number($("max-tokens").value) }),
  });
}

async function send() {
  const content = $("message").value;
  if (running || !content.trim()) return;
  $("message").value = "";
  messages.push({ role: "user", content });
  say("user", "You", content);
  const { article, body: place } = say("assistant", $("model").value, "");
  const facts = make("p", { className: "help", textContent: "…" });
  article.append(facts);
  const own = (running = new AbortController());
  busy(true);
  const announce = announcer();
  const began = performance.now();
  let [text, thought, first, last, pieces, tokens, reason] = ["", "", 0, 0, 0, null, null];
  let thinking = null;
  try {
    const answer = await ask("v1/chat/completions", { method: "POST", body: body(), signal: own.signal });
    for await (const { choices, usage } of events(answer)) {
      tokens = usage?.completion_tokens ?? tokens;
      reason = choices[0]?.finish_reason ?? reason;
      const { content: more, reasoning } = choices[0]?.delta ?? {};
      if (!more && !reasoning) continue;
      last = performance.now();
      first ||= last;
      pieces += 1;
      if (reasoning) {
        thought += reasoning;
        if (!thinking) {
          thinking = make("p", { className: "text" });
          place.before(make("details", {}, make("summary", { textContent: "Reasoning" }), thinking));
        }
        thinking.textContent = thought;
      }
      text += more ?? "";
      const low = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 40;
      place.textContent = text;
      if (low) $("log").scrollTop = $("log").scrollHeight;
      announce(text, false);
    }
  } catch (error) {
    reason = "stopped";
    if (!own.signal.aborted) {
      reason = "failed";
      say("error", "Error", error.message);
    }
  }
  const count = tokens ?? pieces;
  const rate = count > 1 && last > first ? `${number(((count - 1) * 1000) / (last - first), 1)}/s` : null;
  const what = tokens === null ? "pieces" : "tokens";
  const ttft = first ? `first after ${number(first - began)} ms` : null;
  facts.textContent = [`${number(count)} ${what}`, rate, ttft, reason].filter(Boolean).join(" · ");
  announce(`${text} — ${facts.textContent}`, true);
  if (running !== own) return; // a new chat has begun
  if (text) messages.push({ role: "assistant", content: text });
  else $("message").value ||= messages.pop().content;
  running = null;
  busy(false);
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  $("log").setAttribute("aria-busy", is);
}

function stop() {
  running?.abort();
  $("message").focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) stop();
});
$("stop").addEventListener("click", stop);
$("fresh").addEventListener("click", () => {
  const was = running;
  running = null;
  was?.abort();
  messages = [];
  noModels = null;
  $("log").replaceChildren();
  busy(false);
  $("message").focus();
});

// ------------------------------------------------------------------------------------------------------ the live view

const KEPT = 120; // points of a line, one a second
// Of two events: what happened between them, by the contract's names; null: nothing to take a mean of.
const mean = (now, before, sum, count) => {
  const times = now[count] - before[count];
  return times > 0 ? (now[sum] - before[sum]) / times : null;
};
const LINES = [
  ["Running sequences", (now) => now.running_sequences],
  ["Waiting sequences", (now) => now.waiting_sequences],
  ["Sequences per step", (now, before) => mean(now, before, "scheduled_rows", "steps")],
  ["Tokens generated per second", (now, before) => mean(now, before, "generated_tokens", "uptime_seconds")],
  ["TTFT, mean, ms", (now, before) => scaled(mean(now, before, "first_token_seconds", "first_tokens"))],
  ["ITL, mean, ms", (now, before) => scaled(mean(now, before, "inter_token_seconds", "inter_tokens"))],
].map(([name, value]) => {
  const now = make("b");
  const path = drawn("path", {});
  const image = drawn("svg", { viewBox: `0 0 ${KEPT - 1} 30`, preserveAspectRatio: "none", role: "img" }, path);
  $("lines").append(make("figure", { className: "line" }, make("figcaption", {}, name, now), image));
  return { name, value, now, path, image, points: [] };
});
const scaled = (seconds) => seconds === null ? null : seconds * 1000;
let before = null;

function drawLines(event) {
  const now = { ...event.stats, ...event.waits };
  if (before && now.uptime_seconds < before.uptime_seconds) before = null; // the core was started again
  for (const line of LINES) {
    line.points.push(before || line.value.length === 1 ? line.value(now, before) : null);
    line.points.splice(0, line.points.length - KEPT);
    const known = line.points.filter((point) => point !== null);
    const [latest, most] = [known.at(-1), Math.max(...known, 0)];
    let pen = "M";
    line.path.setAttribute("d", line.points.map((point, place) => {
      if (point === null) return (pen = "M"), "";
      const spot = `${pen}${place + KEPT - line.points.length} ${(28 - (26 * point) / (most || 1)).toFixed(1)}h0`;
      pen = "L";
      return spot;
    }).join(""));
    line.now.textContent = latest === undefined ? "–" : number(latest, 1);
    const told = latest === undefined ? "nothing yet" : `last ${number(latest, 1)}, highest ${number(most, 1)}`;
    line.image.setAttribute("aria-label", `${line.name}: ${told} in ${KEPT} s`);
  }
  before = now;
}

let shown = null;

function drawPool(pages) {
  const counts = [0, 0, 0];
  for (const page of pages) counts[page] += 1;
  const [free, used, cached] = counts.map((count) => number(count));
  Object.entries({ free, used, cached }).forEach(([id, text]) => ($(id).textContent = text));
  const canvas = $("pool");
  canvas.setAttribute("aria-label", `KV pool of ${number(pages.length)} pages: ${used} used, ${cached} cached, ${free} free`);
  // At most 4096 cells; of a cell of several pages the parts are filled in proportion.
  const size = Math.ceil(pages.length / 4096) || 1;
  const cells = Math.ceil(pages.length / size);
  const width = canvas.clientWidth;
  const edge = Math.max(3, Math.min(12, Math.floor(Math.sqrt((width * 140) / (cells || 1)))));
  const columns = Math.max(1, Math.floor(width / edge));
  const sharp = window.devicePixelRatio;
  canvas.width = width * sharp;
  canvas.height = Math.ceil(cells / columns) * edge * sharp;
  canvas.style.height = `${canvas.height / sharp}px`;
  const style = getComputedStyle(document.documentElement);
  const [freeColour, usedColour, cachedColour] = ["--free", "--used", "--cached"].map((name) => style.getPropertyValue(name));
  const brush = canvas.getContext("2d");
  brush.scale(sharp, sharp);
  for (let cell = 0; cell < cells; cell++) {
    const part = [0, 0, 0];
    const end = Math.min((cell + 1) * size, pages.length);
    for (let page = cell * size; page < end; page++) part[pages[page]] += 1;
    let y = Math.floor(cell / columns) * edge;
    [[usedColour, part[1]], [cachedColour, part[2]], [freeColour, part[0]]].forEach(([colour, count]) => {
      const height = ((edge - 1) * count) / (end - cell * size);
      brush.fillStyle = colour;
      brush.fillRect((cell % columns) * edge, y, edge - 1, height);
      y += height;
    });
  }
}

// Each node below the one that it continues, as wide as the pages in and below it; the more hits, the stronger.
function drawTree(nodes, total) {
  const tree = nodes.map(([parent, pages, locks, hits, age]) => ({ parent, pages, locks, hits, age, weight: pages, at: 0, depth: 0 }));
  for (const node of [...tree].reverse()) if (node.parent) tree[node.parent - 1].weight += node.weight;
  const ends = [0]; // by parent: where its next child goes
  let deepest = 0;
  for (const [index, node] of tree.entries()) {
    node.depth = node.parent ? tree[node.parent - 1].depth + 1 : 0;
    deepest = Math.max(deepest, node.depth);
    node.at = ends[node.parent];
    ends[node.parent] += node.weight;
    ends[index + 1] = node.at;
  }
  const most = Math.max(1, ...tree.map((node) => node.hits));
  const rows = deepest + 1;
  const image = $("tree");
  image.setAttribute("viewBox", `0 0 ${ends[0] || 1} ${rows}`);
  image.setAttribute("preserveAspectRatio", "none");
  image.style.height = `${Math.min(20 * rows, 240)}px`;
  image.replaceChildren(...tree.map((node, index) => {
    const title = drawn("title", {});
    title.textContent = `node ${index + 1}: ${node.pages} pages, ${node.hits} hits, ${node.locks} locks`;
    const opacity = 0.3 + (0.7 * Math.log1p(node.hits)) / Math.log1p(most);
    const place = { x: node.at, y: node.depth, width: node.weight, height: 0.9, "fill-opacity": opacity.toFixed(2) };
    return drawn("rect", { ...place, class: node.locks ? "locked" : "idle" }, title);
  }));
  const hits = tree.filter((node) => !node.parent).reduce((sum, node) => sum + node.hits, 0);
  const text = `${number(total)} nodes (${number(tree.length)} shown), ${number(rows)} deep, found by ${number(hits)} requests`;
  $("tree-text").textContent = total ? text : "empty";
  image.setAttribute("aria-label", `Radix tree: ${$("tree-text").textContent}`);
  $("nodes").replaceChildren(...tree.slice(0, 20).map(({ parent, pages, locks, hits, age }, index) =>
    make("tr", {}, ...[index + 1, parent || "–", pages, locks, hits, age || "–"].map((value) => make("td", { textContent: value })))));
}

function draw(event) {
  shown = event;
  $("view").hidden = false;
  drawPool(event.pages);
  drawTree(event.nodes, event.total_nodes);
}

let watching = null;

function tell(text) {
  if ($("live-state").textContent !== text) $("live-state").textContent = text; // said once by a screen reader
}

// Watches while the page can be seen; asks again when a stream has ended, or the engine was away.
async function watch() {
  watching?.abort();
  const own = (watching = new AbortController());
  while (!own.signal.aborted && !document.hidden) {
    try {
      for await (const event of events(await ask("page/live", { signal: own.signal }))) {
        drawLines(event);
        draw(event);
        tell("Live: each second.");
      }
    } catch (error) {
      if (own.signal.aborted) return;
      tell(error.message);
      if ([401, 403, 404].includes(error.status)) return;
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

document.addEventListener("visibilitychange", () => (document.hidden ? watching?.abort() : watch()));
for (const changed of [matchMedia("(prefers-color-scheme: dark)"), matchMedia("(resolution)")]) {
  changed.addEventListener("change", () => shown && draw(shown));
}
addEventListener("resize", () => shown && draw(shown));

$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  loadModels();
  watch();
});
loadModels();
watch();
