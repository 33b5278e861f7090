// Draws examples, runs them, checks answers. One worker plays for all pages, and outlives each.
"use strict";
const root = new URL("..", document.currentScript.src);
const isFile = location.protocol === "file:"; // a page that no web server sent
const LIMIT_MS = 300_000; // without news, on a busy machine; player.py has limits of its own, and Stop stops all at once
const waiting = new Map(); // by number: what is to be done with an answer
let port, rules, workerNumber, progress = "", asked = 0;

function start() {
  const url = new URL("_static/worker.js", root);
  workerNumber = store.get("player");
  const options = { type: "module", extendedLifetime: true, name: `player ${workerNumber}` };
  const worker = window.SharedWorker ? new SharedWorker(url, options) : new Worker(url, options);
  port = worker.port ?? worker;
  port.onmessage = ({ data: [number, answer, state] }) => {
    if (number) return waiting.get(number)?.hear(answer, state);
    progress = answer;
    waiting.forEach(({ renew }) => renew());
    document.querySelectorAll("output.loading").forEach((output) => (output.textContent = answer || "Playing …"));
  };
  port.postMessage([0, "load"]);
}

// Leaves a worker that does not answer: the next one has another name. The old one ends when its Python does.
function leave(said) {
  port.postMessage([0, "end"]);
  port.terminate?.();
  port = undefined;
  store.set("player", Date.now());
  waiting.forEach(({ hear }) => hear(JSON.stringify({ said })));
}

function ask(show, ...call) {
  const number = ++asked;
  if (!port || (workerNumber !== store.get("player") && !waiting.size)) start(); // another page may have left it
  port.postMessage([number, ...call]);
  return new Promise((resolve) => {
    let limit;
    const renew = () => {
      clearTimeout(limit);
      limit = setTimeout(() => leave(`Nothing came for ${LIMIT_MS / 60_000} minutes, so it was stopped.`), LIMIT_MS);
    };
    const hear = (answer, state = "Playing …") => {
      if (answer === undefined) { // it begins, or goes on
        show("", state);
        return renew();
      }
      clearTimeout(limit);
      waiting.delete(number);
      resolve(JSON.parse(answer));
    };
    waiting.set(number, { hear, renew });
    renew();
  });
}

const shower = (place) => (className, textContent) => Object.assign(place.querySelector("output"), { className, textContent });

// Asks the worker, and has a button that stops it; an answer without what was asked for is shown
async function request(place, ...call) {
  const show = shower(place);
  if (isFile) return show("bad", "Examples run where the book comes from a web server: see the first page.");
  show("loading", progress || (port ? "Playing …" : "Python starts …"));
  rules ??= await fetch(new URL("_static/rules.json", root)).then((file) => file.json());
  const stop = Object.assign(document.createElement("button"), { type: "button", textContent: "Stop", className: "stop" });
  stop.onclick = () => leave("Stopped.");
  place.querySelector("output").after(stop); // book.css shows it after half a second
  const answer = await ask(show, ...call);
  stop.remove();
  outdate(place, !answer.lines && !answer.html);
  show("bad", answer.said ?? "");
  return answer;
}

async function play(place, kind, ...call) {
  const answer = await request(place, kind, ...call);
  const { lines, led } = answer, show = shower(place);
  if (!lines) return answer;
  const failed = kind === "bench" ? led.length - 1 : led.findIndex(({ wrong }) => wrong);
  const isRight = !led[failed]?.wrong;
  const isQuestion = kind === "question";
  const shown = isQuestion && !isRight ? led.map(({ wrong }) => ({ wrong: hidden(wrong) })) : led;
  place.querySelector(".drawing").innerHTML = drawn(kind, lines, shown);
  addMachine(place.querySelector(".drawing"), answer);
  if (isRight) show("good", RIGHT[kind]?.(lines.length) ?? `Right: all ${lines.length} lines went as written.`);
  else {
    const said = `${isQuestion ? "Not yet. " : ""}${kind === "stage" ? "Step" : "Line"} ${failed + 1}, “${lines[failed]}”: ${shown[failed].wrong}.`;
    show("bad", "").innerHTML = cited(said.replaceAll("\\0", "\\x00"));
  }
  place.dispatchEvent(new CustomEvent("played", { bubbles: true, detail: { isRight, answer } }));
  return { ...answer, isRight };
}

const RIGHT = {
  question: () => "Right.",
  bench: (lines) => (lines ? `Played: ${lines} lines.` : "Nothing is played yet: send a packet."),
};

// Of a wrong answer, not what came instead: that would be the right one
const hidden = (wrong) => (!wrong || /disconnected$/.test(wrong) ? wrong : "this does not happen");

function outdate(place, is = true) {
  place.querySelectorAll(".drawing").forEach((drawing) => drawing.classList.toggle("outdated", is));
}

// ---- Drawings

const STEP = /^(?:([A-Z]\w*|____) )?(>>?|<|\w+) ?(.*)$/;
const PACKET = /^"?((?:UN)?SUB|C?MSG) (.*?)(?:(\\0|\\x00)(.*?))?"?$/;
const FIELDS = /(?:\w+=)?"(?:\\.|[^"\\])*"|\S+/g;
const HEADS = { match: ["Pattern", "Key", "Match"], packet: ["Packet", "Kind"] };
const SERVER = "100% - 2.2rem"; // its lane
const ROWS_MAX = 200; // that are drawn, the last; player.py has as many
const WORDS = {
  ">": "sends", ">>": "sends, while the server is busy,", "<": "receives", close: "closes",
  shut: "will send no more", deaf: "will receive no more", process: "is a process:",
  fill: "has its buffer full", room: "has room for packets:", wait: "Seconds pass:",
  server: "The server is started with",
};
const ARROWS = { // with its head at the right or the left end
  sends: '<svg x="100%" overflow="visible"><path d="M-10 1 0 6-10 11z"/></svg>',
  receives: '<path d="M10 1 0 6 10 11z"/>',
};
const NUL = '<span class="nul">\\x00</span>';
const each = (list, form) => [...list].map(form).join("");
const escaped = (text) => text.replace(/[&<>"]/g, (one) => `&#${one.charCodeAt()};`);
const marked = (text) => text.split(/\\0|\\x00/)
  .map((part) => escaped(part).replace(/[*/]+/g, "<b>$&</b><wbr>")).join(NUL);
const cited = (text) => linked(escaped(text));
const linked = (html) => html.replace(/\[([A-Z]+-\d+)\]/g, (id, rule) => (!rules[rule] ? id
  : `<a class="id" href="${root}${rules[rule][0]}.html#${rule}" title="${escaped(rules[rule][2])}">${id}</a>`));
const result = ({ made = [], printed, wrong }) => each(made, (one) => `<span class="made">${cited(one)}</span>`)
  + (printed ? `<pre class="printed">${escaped(printed.trimEnd())}</pre>` : "")
  + (wrong ? `<strong>✗ ${cited(wrong)}</strong>` : "");
const look = (led) => (!led ? "later" : led.wrong ? "failed" : "");

function packet(text) {
  const [, kind, key, nul, load] = text.match(PACKET) ?? [];
  if (!kind) return `<code>${marked(text)}</code>`;
  const end = nul ? `${NUL}<span class="load">${marked(load)}</span>` : "";
  return `<code><span class="kind">${kind}</span> <span class="key">${marked(key)}</span>${end}</code>`;
}

const content = (verb, said) => ("<>>".includes(verb) && !["nothing", "no packet", "end"].includes(said)
  ? packet(said) : `<em>${escaped(said)}</em>`);

function row(line, lanes, led) {
  const [, who, verb, text] = line.match(STEP) ?? [line, "", line, ""];
  const isPacket = "<>>".includes(verb) && !["nothing", "no packet"].includes(text);
  const kind = !isPacket ? "acts" : verb === "<" ? "receives" : "sends";
  const said = text.includes("{") && led?.got ? led.got : text;
  const [left, right] = lanes[who] ?? ["2rem", SERVER];
  return `<li class="${kind} ${look(led)}"
    style="margin: 0 calc(100% - (${right})) 0 calc(${left})">
    <span class="does">${who ?? ""} ${WORDS[verb] ?? escaped(verb)}</span>
    ${content(verb, said)}
    ${isPacket ? `<svg class="arrow"><line x2="100%" y1="6" y2="6"/>${ARROWS[kind]}</svg>` : ""}${result(led ?? {})}</li>`;
}

function drawn(kind, lines, led) {
  if (kind in HEADS) return table(kind, lines, led);
  if (kind === "orders") return programs(lines);
  const isClient = kind === "client"; // a program, the client that it tells what to do, and the server
  const of = (line) => (line[0] === "=" ? `Program <${line.slice(1)}`
    : "<>".includes(line[0]) ? `Client ${line}` : `Program > ${line}`);
  const steps = isClient ? lines.map(of) : lines, left = Math.max(0, lines.length - ROWS_MAX);
  const names = [...new Set(steps.map((line) => line.match(STEP)?.[1]))].filter(Boolean).sort();
  const lanes = isClient ? { Program: ["2rem", "50%"], Client: ["50%", SERVER] }
    : Object.fromEntries(names.map((name, number) => [name, [`${1.1 + 2.4 * number}rem`, SERVER]]));
  const ends = Object.entries({ ...lanes, Server: [SERVER] });
  return `${left ? `<p>The first ${left} lines are not drawn.</p>` : ""}<div class="heads">${each(ends, ([name, [at]]) => `<b style="left: calc(${at})">${name}</b>`)}</div>
    <div class="lanes"><svg class="poles">${each(ends, ([, [at]]) => `<rect style="x: calc(${at})"/>`)}</svg>
    <ol>${each(steps.slice(-ROWS_MAX), (line, number) => row(line, lanes, led ? led[number + left] : {}))}</ol></div>`;
}

function table(kind, lines, led) {
  const rows = lines.map((line, number) => {
    const [first, second, ...more] = [...line.match(FIELDS), "", ""];
    const one = led ? led[number] : {};
    const [shown, said] = kind === "match" ? [[first, second], more] : [[first], [second, ...more]];
    return `<tr class="${escaped(said[0])} ${look(one)}">${each(shown, (text) => `<td>${packet(text)}</td>`)}
      <td>${escaped(said.join(" "))}${led && !one.wrong ? " ✓" : ""}${result(one)}</td></tr>`;
  });
  return `<table><tr>${each(HEADS[kind], (text) => `<th scope="col">${text}</th>`)}</tr>${rows.join("")}</table>`;
}

// What comes before the line ---, and below it what each client does, side by side
function programs(lines) {
  const start = lines.indexOf("---"), after = lines.slice(start + 1);
  const names = [...new Set(after.map((line) => line[0]))].sort();
  const step = (line) => line.match(STEP) ?? [line, "", "", line];
  const item = ([, , verb, text]) => `<li><span class="does">${WORDS[verb] ?? escaped(verb)}</span> ${content(verb, text)}</li>`;
  const steps = (name) => each(after.filter((line) => line[0] === name), (line) => item(step(line)));
  return `${start < 0 ? "" : drawn("conversation", lines.slice(0, start))}
    <div class="programs">${each(names, (name) => `<div><b>${escaped(name)}</b><ol>${steps(name)}</ol></div>`)}</div>`;
}

// ---- The time machine: back and forth through what was played

const heap = (packets) => `<span class="heap" title="${escaped(packets.join("\n"))}">${"<i></i>".repeat(Math.min(packets.length, 24))}</span>
  ${packets.length}`; // the first of them on the left
const fact = ([label, known]) => `<dd><span class="does">${escaped(label)}</span>
  ${Array.isArray(known) ? heap(known) : escaped(`${known}`)}</dd>`;
const card = ([name, facts]) => `<dl><dt>${escaped(name)}</dt>${each(Object.entries(facts), fact) || "<dd>nothing yet</dd>"}</dl>`;

function addMachine(drawing, { led, source = "" }) {
  const rows = [...drawing.querySelectorAll(".lanes li")], code = source.split("\n"), first = Math.max(0, led.length - rows.length);
  if (!led.some(({ cards }) => cards)) return;
  drawing.insertAdjacentHTML("beforeend", `<div class="machine"><label>Time <input type="range" min="${first}" max="${led.length}"
    value="${led.length}"></label> <span></span><div class="cards"></div></div>`);
  const [time, said, cards] = drawing.querySelectorAll(".machine :is(input, label + span, .cards)");
  time.oninput = () => {
    const at = Number(time.value), { ran = [] } = led[at - 1] ?? {};
    const known = led.slice(0, at).findLast((step) => step.cards)?.cards ?? []; // a line that fails changes nothing
    const lines = each(ran, (line) => `${String(line).padStart(4)} ${escaped(code[line - 1])}\n`);
    rows.forEach(({ classList }, number) => classList.toggle("later", first + number >= at));
    said.textContent = at ? `after line ${at} of ${led.length}` : "before the first line";
    time.setAttribute("aria-valuetext", said.textContent);
    cards.innerHTML = each(known, card)
      + (lines && `<dl class="ran"><dt>Lines of the server that ran</dt><dd><pre tabindex="0">${lines}</pre></dd></dl>`);
  };
  time.oninput();
}

// ---- Examples and questions

const isAnswered = (name) => store.get(`answered ${name}`) !== "";

function showProgress() {
  const questions = [...document.querySelectorAll("[data-kind=question]")];
  questions.forEach(({ classList, dataset }) => classList.toggle("answered", isAnswered(dataset.name)));
  const right = questions.filter(({ dataset }) => isAnswered(dataset.name));
  if (questions.length) summary.textContent = `You have answered ${right.length} of the ${questions.length} questions below.`;
}

const summary = document.createElement("p");
document.querySelector("h1")?.after(summary);
showProgress();

const paragraphs = (notes) => each(notes, (note) => `<p>${escaped(note)}</p>`);

function prepare(example) {
  const drawing = example.querySelector(".drawing");
  const text = drawing.textContent;
  const lines = text.split("\n").filter((line) => line.trim());
  const notes = lines.filter((line) => line[0] === "#").map((line) => line.slice(2));
  const plain = notes.filter((note) => !/^(Hint: |pattern +key)/.test(note)); // a table has its own header
  const picture = drawn(example.dataset.kind, lines.filter((line) => line[0] !== "#"));
  drawing.innerHTML = picture;
  drawing.insertAdjacentHTML("beforebegin", paragraphs(plain));
  if (example.dataset.kind === "client") return;
  const form = document.createElement("form");
  drawing.after(form);
  const reset = () => {
    drawing.innerHTML = picture;
    outdate(example, false);
    Object.assign(form.querySelector("output"), { className: "", textContent: "" });
  };
  (example.dataset.kind === "question" ? makeQuestion : makeExample)(example, form, text, reset, notes);
}
document.querySelectorAll(".example").forEach(prepare);

async function tryOrders(place, kind, text) {
  const { html } = await request(place, kind, text, place.dataset.name ?? "bench");
  const ends = place.querySelector(".ends") ?? place.nextElementSibling;
  ends.innerHTML = linked(html ?? "");
  ends.parentElement.open = true;
  ends.querySelectorAll(".example").forEach(prepare);
  if (!html) return;
  shower(place)("good", "Every order has been tried: see below.");
  const lines = text.split("\n").filter((line) => /^\s*[^#\s]/.test(line)).map((line) => line.trim());
  if (place !== bench) place.querySelector(".drawing").innerHTML = drawn(kind, lines);
}

function makeQuestion(example, form, text, reset, notes) {
  const { kind, name, answer: solution } = example.dataset;
  form.innerHTML = `<label>Your answer <input autocomplete="off" spellcheck="false"></label> <button>Check</button>
    <button type="button">Reset</button><output></output>
    <details><summary>A hint</summary>${paragraphs(notes.filter((note) => note.startsWith("Hint: ")))}</details>
    <details hidden class="answer"><summary>Show the answer</summary><p><code>${marked(solution)}</code></p></details>`;
  const field = form.querySelector("input"), [hint, answer] = form.querySelectorAll("details");
  field.value = store.get(`answered ${name}`);
  form.onsubmit = async (event) => {
    event.preventDefault();
    const played = await play(example, kind, text, field.value);
    if (played?.isRight) return showProgress(store.set(`answered ${name}`, field.value));
    if (!played?.lines) return;
    if (hint.open) answer.hidden = false; // the second time
    hint.open = true;
  };
  form.querySelector("[type=button]").onclick = () => {
    reset();
    put(field, "");
    [hint.open, answer.hidden, answer.open] = [false, true, false];
    store.remove(`answered ${name}`);
    showProgress();
  };
}

function makeExample(example, form, text, reset) {
  const { kind, name, mistake } = example.dataset;
  const [label, act] = kind === "orders" ? ["Try every order", tryOrders] : ["Run", play];
  form.innerHTML = `<button aria-label="${label} ${name}">${label}</button> <button type="button">Edit</button>
    <button type="button" hidden>Reset</button> <a href="#">In the playground</a><output></output>
    <textarea hidden aria-label="${name} as text" spellcheck="false">${escaped(text)}</textarea>`;
  const [, edit, undo] = form.querySelectorAll("button"), field = form.querySelector("textarea");
  let run; // once somebody edits
  form.onsubmit = async (event) => {
    event.preventDefault();
    undo.hidden = false;
    const done = run?.(), answer = await act(example, kind, field.value, ...(mistake ? [mistake] : []));
    done?.(form.querySelector("output").textContent, answer?.isRight);
  };
  field.oninput = () => outdate(example);
  edit.onclick = () => {
    field.hidden = undo.hidden = !field.hidden;
    if (run) return;
    field.value = latest(name) ?? text;
    run = keep(field, name, {}, `${name}.txt`);
  };
  undo.onclick = () => {
    if (field.value !== text) put(field, text);
    field.hidden = undo.hidden = true;
    reset();
  };
  const link = form.querySelector("a");
  link.onclick = () => (link.href = `${root}book/bench.html#${new URLSearchParams({ text: field.value })}`);
  link.hidden = !["conversation", "orders"].includes(kind);
}

// ---- The playground, whose address has its conversation

const bench = document.getElementById("bench");

if (bench) {
  const { text } = bench.elements, run = keep(text, "playground", {}, "conversation.txt");
  const lines = () => text.value.split("\n").filter((line) => line.trim());
  const go = (value) => (location.hash = new URLSearchParams({ text: value }));
  let played;
  bench.hidden = false; // without scripts it is
  bench.onclick = ({ target: { dataset } }) => {
    const line = dataset.line?.replace(/\{(\w+)\}/g, (hole, name) => bench.elements[name]?.value ?? hole);
    if (line) go([...lines(), line].join("\n"));
    if (dataset.orders) tryOrders(bench, "orders", text.value);
    if (dataset.undo) go(lines().slice(0, -1).join("\n"));
  };
  bench.onsubmit = ({ submitter }) => {
    if (!submitter) go(text.value);
    return false;
  };
  text.oninput = () => outdate(bench);
  text.onchange = () => text.value !== played && go(text.value);
  window.onhashchange = async () => {
    played = new URLSearchParams(location.hash.slice(1)).get("text") ?? latest("playground") ?? text.defaultValue;
    if (text.value !== played) put(text, played);
    const done = run(), answer = await play(bench, "bench", played);
    done(bench.querySelector("output").textContent, answer?.isRight);
  };
  window.onhashchange();
}

// ---- A surprise, whose address has its chapter and seed

const surprise = document.getElementById("surprise");

if (surprise) {
  const { chapter } = surprise.elements, [drawing, fields] = surprise.querySelectorAll(".drawing, .fields");
  let task, missedTimes;
  surprise.hidden = false;
  chapter.onchange = surprise.querySelector("[type=button]").onclick = () =>
    (location.hash = new URLSearchParams({ chapter: chapter.value, seed: Math.random().toString(36).slice(2, 8) }));
  window.onhashchange = async () => {
    const { chapter: number = 2, seed = 1 } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    chapter.value = number;
    missedTimes = 0;
    task = await request(surprise, "surprise", `${number}`, `${seed}`);
    drawing.innerHTML = drawn("conversation", task.shown ?? []);
    fields.innerHTML = each(Object.keys(task.answers ?? {}).sort(),
      (name) => `<label>${name} receives <input name="${name}" autocomplete="off" size="12"></label>`);
  };
  surprise.onsubmit = async (event) => { // a wrong answer gets names, then also the rules, and then the answer
    event.preventDefault();
    if (!task?.lines) return;
    const missed = Object.entries(task.answers).filter(([name, heard]) =>
      `${surprise.elements[name].value.match(/\d+|end/g) ?? ""}` !== `${heard}`);
    const isMissed = missed.length > 0, isOver = !isMissed || ++missedTimes > 2;
    if (isOver && !(await play(surprise, "conversation", task.lines.join("\n"))).led) return;
    const names = `not what happens to ${missed.map(([name]) => name).join(", ")}`;
    const answers = missed.map(([name, heard]) => `${name} receives ${heard.join(" ") || "nothing"}`).join("; ");
    const said = isMissed ? `Not yet: ${isOver ? answers : names}.` : "Right, all of it.";
    const rules = isOver || missedTimes > 1 ? ` These rules decided: ${task.rules.join(" ")}.` : "";
    shower(surprise)(isMissed ? "bad" : "good", "").innerHTML = cited(said + rules);
  };
  window.onhashchange();
}

// ---- Keys: Ctrl+Enter runs what has the focus, or else what is seen first; Alt+N is the next page

const RUNNABLE = ".example form, form.stage, form.mistake, #bench, #surprise";
window.addEventListener("keydown", ({ key, code, altKey, ctrlKey, metaKey, target }) => {
  if (altKey && code === "KeyN") document.querySelector(".next-page")?.click();
  if (key !== "Enter" || !(ctrlKey || metaKey)) return;
  const isSeen = ({ top, bottom }) => bottom > 0 && top < innerHeight;
  const seen = [...document.querySelectorAll(RUNNABLE)].find((form) => isSeen(form.getBoundingClientRect()));
  (target.closest(RUNNABLE) ?? seen)?.requestSubmit();
});

window.onbeforeprint = () => document.querySelectorAll("details:not(.rule details, .answer)").forEach((fold) => (fold.open = true));
document.querySelectorAll(".table-wrapper, article pre").forEach((pane) => (pane.tabIndex = 0)); // they may scroll

// The first page that plays has Python started before anybody asks, once the browser has nothing else to do
const whenIdle = window.requestIdleCallback ?? ((call) => setTimeout(call, 1000));
if (!isFile && !navigator.connection?.saveData && document.querySelector(".example form, .stage")) whenIdle(() => port ?? start());
