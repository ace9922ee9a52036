// The dashboard draws one stream of /v1/watch. It only reads, and scripts cannot see its session cookie (HttpOnly).
"use strict";

const $ = (id) => document.getElementById(id);
const node = (name, text, kind) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
const per = (n) => (n >= 1e6 ? (n / 1e6).toFixed(1) + " M" : n >= 1e4 ? (n / 1e3).toFixed(1) + " k" : n >= 10 ? n.toFixed(0) : n.toFixed(1));

const INTERVAL_MS = 500;
const COLUMN_PX = 3; // width of a sample in the heat map
const FLOW_POINTS = 240;
const EVENTS_SHOWN = 100;
const SERVERS_SHOWN = 100;
// Loads from 0 to 1 and above. Readable for the colour-blind (like matplotlib's "inferno", in blue).
const STOPS = { dark: ["#131c2b", "#16497e", "#1f8fa8", "#7cc36a", "#f4c440", "#e4572e"],
  light: ["#eef3f9", "#a9d0ec", "#4fa8c9", "#74b74a", "#e9ac1e", "#cc3a1e"] };
const LINES = ["#5aa9f5", "#f2913d", "#37c28a", "#d96bd0", "#e6c84f", "#8d83f0", "#f0655b", "#6fd0d6"];

let overview = null;
let previous = null; // the loads before the newest, for rates
let flows = []; // { name -> connections per second }
let events = [];
let rows = ""; // servers and cores in the heat map
let colours = [];
let source = null;

const theme = () => (document.documentElement.classList.contains("light") ? "light" : "dark");

function makeColours() {
  const stops = STOPS[theme()].map((c) => [1, 3, 5].map((at) => parseInt(c.slice(at, at + 2), 16)));
  colours = Array.from({ length: 256 }, (_, n) => {
    const place = (n / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (place - low)));
  });
  const canvas = node("canvas");
  canvas.width = 256; canvas.height = 1;
  const context = canvas.getContext("2d");
  colours.forEach(([r, g, b], n) => { context.fillStyle = `rgb(${r},${g},${b})`; context.fillRect(n, 0, 1, 1); });
  $("scale").replaceChildren("idle", canvas, "full");
}

// ---- heat map: a row of pixels per core, a column per sample -------------------------------------------------------------

const counts = new Map(); // cores by server: a server without reports keeps its rows

const rowsOf = (server) => {
  const cores = server.core_loads.length || counts.get(server.name) || 1;
  counts.set(server.name, cores);
  return cores;
};

function rowHeight(cores) { return cores <= 64 ? 8 : cores <= 160 ? 4 : cores <= 400 ? 2 : 1; }

function layOut(servers) {
  const canvas = $("heat");
  const cores = servers.reduce((sum, server) => sum + rowsOf(server), 0);
  const height = rowHeight(cores);
  const gap = height > 1 ? 2 : 1;
  const width = Math.max(Math.floor(canvas.clientWidth), 60);
  const key = [width, height, ...servers.map((server) => server.name + "/" + rowsOf(server))].join();
  if (key === rows) return;
  rows = key;
  let y = 0;
  let free = 0; // first pixel with room for a name
  $("names").replaceChildren();
  for (const server of servers) {
    const high = rowsOf(server) * height;
    if (y + high / 2 - 6 >= free || y === 0) {
      const name = node("div", server.name);
      name.style.top = Math.max(0, y + high / 2 - 6) + "px";
      $("names").append(name);
      free = Math.max(0, y + high / 2 - 6) + 12;
    }
    y += high + gap;
  }
  canvas.width = width;
  canvas.height = Math.max(y, 12);
  canvas.style.height = canvas.height + "px";
  $("names").style.height = canvas.height + "px";
}

function drawHeat(servers) {
  layOut(servers);
  const canvas = $("heat");
  const context = canvas.getContext("2d");
  const cores = servers.reduce((sum, server) => sum + rowsOf(server), 0);
  const height = rowHeight(cores);
  const gap = height > 1 ? 2 : 1;
  context.drawImage(canvas, -COLUMN_PX, 0);
  const column = context.createImageData(COLUMN_PX, canvas.height);
  const pixels = new Uint32Array(column.data.buffer);
  const unknown = theme() === "light" ? 0xffe2dcd6 : 0xff302821;
  let y = 0;
  for (const server of servers) {
    for (const load of server.core_loads.length ? server.core_loads : Array(rowsOf(server)).fill(null)) {
      let value = unknown;
      if (load !== null) {
        const [r, g, b] = colours[Math.max(0, Math.min(255, Math.round(load * 255)))];
        value = 0xff000000 | (b << 16) | (g << 8) | r;
      }
      pixels.fill(value, y * COLUMN_PX, (y + height) * COLUMN_PX);
      y += height;
    }
    y += gap;
  }
  context.putImageData(column, canvas.width - COLUMN_PX, 0);
  const known = servers.filter((server) => server.core_loads.length).length;
  $("under").textContent = `${servers.length} servers, ${servers.reduce((n, server) => n + server.core_loads.length, 0)} cores; ` +
    `loads of ${known} servers are known; ${Math.round((canvas.width / COLUMN_PX) * INTERVAL_MS / 1000)} s from left to right`;
}

// ---- new connections ----------------------------------------------------------------------------------------------------

function drawFlows() {
  const canvas = $("flows");
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, 180];
  canvas.width = width * ratio; canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const newest = flows[flows.length - 1] || {};
  const names = Object.keys(newest);
  // The servers with most connections: thousands of lines are unreadable.
  const sum = (name) => flows.reduce((total, at) => total + (at[name] || 0), 0);
  const shown = names.length <= LINES.length ? names : names.map((name) => [sum(name), name]).sort((a, b) => b[0] - a[0])
    .slice(0, LINES.length).map(([, name]) => name);
  const top = Math.max(1, ...flows.map((at) => Math.max(0, ...shown.map((name) => at[name] || 0)))) * 1.1;
  const style = getComputedStyle(document.documentElement);
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  context.lineWidth = 1;
  for (let part = 0; part <= 4; part++) {
    const y = Math.round(height - 6 - (part / 4) * (height - 16)) + 0.5;
    context.strokeStyle = style.getPropertyValue("--line");
    context.beginPath(); context.moveTo(38, y); context.lineTo(width, y); context.stroke();
    context.fillStyle = style.getPropertyValue("--muted");
    context.textAlign = "right";
    context.fillText(per((part / 4) * top), 32, y + 4);
  }
  const step = (width - 40) / (FLOW_POINTS - 1);
  shown.forEach((name, index) => {
    context.strokeStyle = LINES[index];
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.beginPath();
    flows.forEach((at, n) => {
      const x = width - 1 - (flows.length - 1 - n) * step;
      context.lineTo(x, height - 6 - ((at[name] || 0) / top) * (height - 16));
    });
    context.stroke();
  });
  $("legend").replaceChildren(...shown.map((name, index) => {
    const item = node("span");
    const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    swatch.innerHTML = '<rect width="9" height="9" rx="2"/>';
    swatch.firstChild.setAttribute("fill", LINES[index]);
    item.append(swatch, `${name} ${per(newest[name] || 0)}/s`);
    return item;
  }));
}

// ---- events -------------------------------------------------------------------------------------------------------------

function tile(value, words, kind) {
  const made = node("div", undefined, "tile");
  made.append(node("b", value, kind), node("span", words));
  return made;
}

function rate(now, then, seconds) { return Math.max(0, (now - (then === undefined ? now : then)) / seconds); }

// Natural order: s2 before s10.
const byName = (left, right) => left.name.localeCompare(right.name, undefined, { numeric: true });

function takeLoads(loads) {
  loads.servers.sort(byName);
  const seconds = previous ? (loads.uptime_ms - previous.uptime_ms) / 1000 : 0;
  if (previous && seconds > 0) {
    const old = new Map(previous.servers.map((server) => [server.name, server.new_connections]));
    flows.push(Object.fromEntries(loads.servers.map((server) => [server.name, rate(server.new_connections, old.get(server.name), seconds)])));
    flows = flows.slice(-FLOW_POINTS);
    drawFlows();
    showBalancers(loads, seconds);
  }
  drawHeat(loads.servers);
  showTiles(loads);
  showServers(loads);
  previous = loads;
}

function showTiles(loads) {
  const all = loads.servers.flatMap((server) => server.core_loads);
  const mean = all.reduce((sum, load) => sum + load, 0) / (all.length || 1);
  const highest = all.reduce((most, load) => Math.max(most, load), 0);
  const open = loads.servers.reduce((sum, server) => sum + server.open_connections, 0);
  const fresh = Object.values(flows[flows.length - 1] || {}).reduce((sum, value) => sum + value, 0);
  const reporting = overview ? overview.servers.filter((server) => server.report_state === "fresh").length : 0;
  const total = overview ? overview.servers.length : loads.servers.length;
  $("tiles").replaceChildren(
    tile(`${reporting} of ${total}`, "servers report", reporting === total ? "good" : "warn"),
    tile(String(all.length), "cores"),
    tile(all.length ? (mean * 100).toFixed(0) + " %" : "–", "mean load of a core"),
    tile(all.length ? (highest * 100).toFixed(0) + " %" : "–", "busiest core", highest > 0.95 ? "bad" : ""),
    tile(per(fresh), "new connections per second"),
    tile(per(open), "open connections"));
}

function showBalancers(loads, seconds) {
  const then = new Map(previous.load_balancers.map((balancer) => [balancer.name, balancer.counters]));
  const known = new Map((overview ? overview.load_balancers : []).map((balancer) => [balancer.name, balancer]));
  const lines = loads.load_balancers.map(({ name, counters }) => {
    const old = then.get(name) || {};
    const rates = Object.fromEntries(Object.entries(counters).map(([counter, count]) => [counter, rate(count, old[counter], seconds)]));
    const balancer = known.get(name) || {};
    // Load balancers report once a second; between reports the last rate stays.
    const changed = Object.values(rates).some((value) => value > 0);
    const last = changed ? rates : (showBalancers.last[name] || rates);
    showBalancers.last[name] = last;
    const sum = (wanted) => Object.entries(last).filter(([counter]) => wanted(counter)).reduce((total, [, value]) => total + value, 0);
    const state = balancer.alive ? (balancer.connected ? "connected" : "disconnected") : "lost";
    const line = node("tr");
    line.append(node("td", name), node("td", state, balancer.alive && balancer.connected ? "good" : "bad"), node("td", balancer.xdp_mode || "–"),
      node("td", per(sum(() => true)), "n"), node("td", per(last.new_connection || 0), "n"), node("td", per(sum((counter) => counter.startsWith("drop_"))), "n"));
    return line;
  });
  $("balancers").tBodies[0].replaceChildren(...(lines.length ? lines : [emptyLine("no load balancer is connected", 6)]));
}
showBalancers.last = {};

// Servers with a problem come first.
function showServers(loads) {
  const open = new Map(loads.servers.map((server) => [server.name, server.service_connections ?? server.open_connections]));
  const since = ({ drain }) => (drain && drain.since_unix_ms ? `since ${new Date(drain.since_unix_ms).toLocaleString()}` : "");
  const well = (server) => server.state === "active" && server.report_state === "fresh" && !server.warnings.length;
  const sorted = [...(overview ? overview.servers : [])].sort((left, right) => well(left) - well(right) || byName(left, right));
  const lines = sorted.slice(0, SERVERS_SHOWN).map((server) => {
    const line = node("tr");
    const notes = node("td");
    [[server.state_reason, since(server)].filter(Boolean).join(", "), ...server.warnings].filter(Boolean).forEach((words, n) => notes.append(node("div", words, n || !server.state_reason ? "warn" : "muted")));
    const kind = { active: "good", down: "bad", gone: "muted" }[server.state] || "warn";
    line.append(node("td", server.name), node("td", server.address), node("td", server.state, kind), node("td", server.report_state, server.report_state === "fresh" ? "good" : "warn"),
      node("td", String(server.weight), "n"), node("td", String(open.get(server.name) ?? "–"), "n"), notes);
    return line;
  });
  $("more-servers").textContent = sorted.length > lines.length ? `${lines.length} of ${sorted.length}, those with problems first` : "";
  $("servers").tBodies[0].replaceChildren(...(lines.length ? lines : [emptyLine("none", 7)]));
}

function emptyLine(words, columns) {
  const line = node("tr");
  const cell = node("td", words, "muted");
  cell.colSpan = columns;
  line.append(cell);
  return line;
}

function takeOverview(update) {
  overview = update;
  $("summary").textContent = `configuration ${update.configuration_generation}, a report every ${update.report_interval_ms} ms`;
  const lines = update.services.map((service) => {
    const line = node("tr");
    const name = node("td", service.name);
    service.warnings.forEach((warning) => name.append(node("div", warning, "warn")));
    line.append(name, node("td", service.address), node("td", service.policy), node("td", service.consistency), node("td", String(service.servers.length), "n"));
    return line;
  });
  $("services").tBodies[0].replaceChildren(...(lines.length ? lines : [emptyLine("none", 5)]));
  const { keys } = update;
  const since = new Date(keys.current_since_unix_s * 1000).toLocaleString();
  $("keys").textContent = keys.rotation_phase === "announced"
    ? `Key ${keys.current_key} stamps since ${since}. The next key is being distributed; not confirmed by: ${keys.pending_peers.join(", ") || "none"}.`
    : `Key ${keys.current_key} stamps since ${since}. ${keys.rotation_interval_s ? `Rotated every ${keys.rotation_interval_s / 3600} h.` : "Rotated by command."}`;
}

function takeEvent(event) {
  events = [event, ...events.filter((known) => known.id !== event.id)].slice(0, EVENTS_SHOWN);
  $("events").tBodies[0].replaceChildren(...events.map((shown) => {
    const line = node("tr");
    const who = `${shown.subject_kind.replace("-", " ")} ${shown.subject_name}`.trim();
    line.append(node("td", new Date(shown.at_unix_ms).toLocaleTimeString()), node("td", who), node("td", shown.message, shown.severity === "warning" ? "warn" : ""));
    return line;
  }));
}

// ---- login and logout ---------------------------------------------------------------------------------------------------

function setConnection(words, kind) { $("connection").textContent = words; $("connection").className = "pill " + kind; }

function show(page) {
  $("page").hidden = !page; $("logout").hidden = !page; $("login").hidden = page;
}

function watch() {
  show(true);
  source = new EventSource(`/v1/watch?interval_ms=${INTERVAL_MS}`);
  source.onopen = () => { setConnection("live", "good"); previous = null; };
  source.addEventListener("status", (message) => takeOverview(JSON.parse(message.data)));
  source.addEventListener("loads", (message) => takeLoads(JSON.parse(message.data)));
  source.addEventListener("event", (message) => takeEvent(JSON.parse(message.data)));
  source.onerror = () => {
    setConnection("no connection", "bad");
    // A browser does not retry after an error status: the session may have ended, or the controller does not lead.
    if (source.readyState === EventSource.CLOSED) setTimeout(begin, 1000);
  };
}

async function begin() {
  const answer = await fetch("/v1/health").catch(() => null);
  if (answer && answer.status === 401) { setConnection("not logged in", ""); show(false); return; }
  if (!answer || !answer.ok) { setConnection("no connection", "bad"); setTimeout(begin, 1000); return; }
  watch();
}

$("login").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  const answer = await fetch("/v1/session", { method: "POST", headers: { Authorization: "Bearer " + $("token").value.trim() } }).catch(() => null);
  $("token").value = "";
  $("rejection").textContent = answer && answer.ok ? "" : answer && answer.status === 401 ? "This token is not valid." : "The controller does not answer.";
  if (answer && answer.ok) watch();
});

$("logout").addEventListener("click", async () => {
  source.close();
  await fetch("/v1/session", { method: "DELETE" }).catch(() => null);
  location.reload();
});

$("theme").addEventListener("click", () => {
  document.documentElement.classList.toggle("light");
  rows = "";
  makeColours();
});

if (matchMedia("(prefers-color-scheme: light)").matches) document.documentElement.classList.add("light");
makeColours();
begin();
