// Draws examples, runs them, checks answers. One worker plays for all pages, and outlives each.
"use strict";
const root = new URL("..", document.currentScript.src);
const calls = [];
let port, rules;

function start() {
  const url = new URL("_static/worker.js", root);
  const options = { type: "module", extendedLifetime: true };
  port = window.SharedWorker ? new SharedWorker(url, options).port : new Worker(url, options);
  port.onmessage = ({ data: [number, answer] }) => calls[number](JSON.parse(answer));
}

async function play(place, kind, ...call) {
  const output = place.querySelector("output");
  const show = (className, textContent) => Object.assign(output, { className, textContent });
  if (location.protocol === "file:") return show("bad", "Examples run where the book comes from a web server.");
  show("", "Python works …");
  rules ??= await fetch(new URL("_static/rules.json", root)).then((file) => file.json());
  if (!port) start();
  const answer = await new Promise((resolve) => port.postMessage([calls.push(resolve) - 1, kind, ...call]));
  show(answer.ok ? "good" : "bad", answer.said);
  outdate(place, !answer.lines);
  if (answer.lines) place.querySelector(".drawing").innerHTML = drawn(kind, answer.lines, answer.led);
  return answer;
}

function outdate(place, is = true) {
  place.querySelectorAll(".drawing").forEach((one) => one.classList.toggle("outdated", is));
}

// ---- Drawings

const STEP = /^(?:([A-Z]\w*|____) )?(>>?|<|\w+) ?(.*)$/;
const PACKET = /^"?((?:UN)?SUB|C?MSG) (.*?)(?:(\\0|\\x00)(.*?))?"?$/;
const FIELDS = /(?:\w+=)?"(?:\\.|[^"\\])*"|\S+/g;
const HEADS = { match: ["Pattern", "Key", "Match"], packet: ["Packet", "Kind"] };
const SERVER = "100% - 2.2rem";
const CLIENT = { Program: ["2rem", "50%"], Client: ["50%", SERVER] };
const WORDS = {
  ">": "sends", ">>": "sends, while the server is busy,", "<": "receives", close: "closes",
  shut: "will send no more", deaf: "will receive no more", process: "is a process:",
  fill: "has its buffer full", room: "has room for packets:", wait: "Seconds pass:",
  server: "The server is started with",
};
const ARROWS = { // with its head at the right or the left end
  sends: '<svg x="100%"><path d="M-10 1 0 6-10 11z"/></svg>',
  receives: '<path d="M10 1 0 6 10 11z"/>',
};
const ARROW = '<svg class="arrow" aria-hidden="true"><line x2="100%" y1="6" y2="6"/>';
const NUL = '<span class="nul">\\x00</span>';

const escaped = (text) => text.replace(/[&<>"]/g, (one) => `&#${one.charCodeAt()};`);
const marked = (text) => escaped(text).split(/\\0|\\x00/)
  .map((part) => part.replace(/[*/]+/g, "<b>$&</b><wbr>")).join(NUL);
const cited = (text) => escaped(text).replace(/\[([A-Z]+-\d+)\]/g, (id, rule) => {
  const [page, sentence] = rules?.[rule] ?? [];
  return page ? `<a class="id" href="${root}${page}" title="${escaped(sentence)}">${id}</a>` : id;
});
const result = (led) => (led.made ?? []).map((one) => `<span class="made">${cited(one)}</span>`).join("")
  + (led.wrong ? `<strong>✗ ${cited(led.wrong)}</strong>` : "");
const look = (led) => (!led ? "later" : led.wrong ? "failed" : "");

function packet(text) {
  const [, kind, key, nul, load] = text.match(PACKET) ?? [];
  if (!kind) return `<code>${marked(text)}</code>`;
  const end = nul ? `${NUL}<span class="load">${marked(load)}</span>` : "";
  return `<code><span class="kind">${kind}</span> <span class="key">${marked(key)}</span>${end}</code>`;
}

function row(line, lanes, led) {
  const [, who, verb, text] = line.match(STEP) ?? [line, "", line, ""];
  const isPacket = "<>>".includes(verb) && !["nothing", "no packet"].includes(text);
  const kind = !isPacket ? "acts" : verb === "<" ? "receives" : "sends";
  const said = text.includes("{") && led?.got ? led.got : text;
  const [left, right] = lanes[who] ?? ["2rem", SERVER];
  const does = `<span class="does">${who ?? ""} ${WORDS[verb] ?? verb}</span>`;
  return `<li class="${kind} ${look(led)}${verb === ">>" ? " busy" : ""}"
    style="margin: 0 calc(100% - (${right})) 0 calc(${left})">${does}
    ${isPacket && said !== "end" ? packet(said) : `<em>${escaped(said)}</em>`}
    ${isPacket ? `${ARROW}${ARROWS[kind]}</svg>` : ""}${result(led ?? {})}</li>`;
}

function drawn(kind, lines, led) {
  if (kind in HEADS) return table(kind, lines, led);
  const of = (line) => (line[0] === "=" ? `Program <${line.slice(1)}`
    : "<>".includes(line[0]) ? `Client ${line}` : `Program > ${line}`);
  const steps = kind === "client" ? lines.map(of) : lines;
  const names = [...new Set(steps.map((line) => line.match(STEP)?.[1]))].filter(Boolean).sort();
  const each = names.map((name, number) => [name, [`${1.1 + 2.4 * number}rem`, SERVER]]);
  const lanes = kind === "client" ? CLIENT : Object.fromEntries(each);
  const ends = Object.entries({ ...lanes, Server: [SERVER] });
  const rows = steps.map((line, number) => row(line, lanes, led ? led[number] : {}));
  return `<div class="heads" aria-hidden="true">
    ${ends.map(([name, [at]]) => `<b style="left: calc(${at})">${name}</b>`).join("")}</div>
    <div class="lanes"><svg class="poles" aria-hidden="true">
    ${ends.map(([, [at]]) => `<rect style="x: calc(${at})"/>`).join("")}</svg>
    <ol>${rows.join("")}</ol></div>`;
}

function table(kind, lines, led) {
  const count = HEADS[kind].length - 1; // of the fields that are drawn
  const rows = lines.map((line, number) => {
    const fields = line.match(FIELDS);
    const one = led ? led[number] : {};
    return `<tr class="${fields[count]} ${look(one)}">
      ${fields.slice(0, count).map((text) => `<td>${packet(text)}</td>`).join("")}
      <td>${escaped(fields.slice(count).join(" "))}${led && !one.wrong ? " ✓" : ""}${result(one)}</td></tr>`;
  });
  const heads = HEADS[kind].map((text) => `<th scope="col">${text}</th>`).join("");
  return `<table class="${kind}"><thead><tr>${heads}</tr></thead>${rows.join("")}</table>`;
}

// ---- Examples and questions

const answered = new Set(JSON.parse(localStorage.getItem("answered")));
const questions = [...document.querySelectorAll("[data-kind=question]")];
const progress = document.createElement("p");

function showProgress() {
  const right = questions.filter((one) => answered.has(one.dataset.name));
  right.forEach((one) => one.classList.add("answered"));
  progress.textContent = `You have answered ${right.length} of the ${questions.length} questions below.`;
  localStorage.setItem("answered", JSON.stringify([...answered]));
}

if (questions.length) document.querySelector("h1").after(progress), showProgress();

for (const example of document.querySelectorAll(".example")) {
  const { kind, name, steps } = example.dataset;
  const drawing = example.querySelector(".drawing");
  const text = drawing.textContent;
  const lines = text.split("\n").filter((line) => line.trim());
  const said = (is) => lines.filter((line) => line[0] === "#" && line.startsWith("# Hint: ") === is)
    .map((line) => `<p>${escaped(line.slice(2))}</p>`).join("");
  drawing.innerHTML = drawn(kind, lines.filter((line) => line[0] !== "#"));
  drawing.insertAdjacentHTML("beforebegin", said(false));
  if (kind === "client") continue;
  const form = document.createElement("form");
  form.innerHTML = kind === "question"
    ? `<label>Your answer <input autocomplete="off" spellcheck="false"></label> <button>Check</button>
       <output></output><details><summary>A hint</summary>${said(true)}</details>`
    : `<button aria-label="Run ${name}">Run</button> <button type="button">Edit</button>
       <a href="#">In the playground</a><output></output>
       <textarea hidden aria-label="${name} as text" spellcheck="false">${escaped(text)}</textarea>`;
  example.append(form);
  const field = form.querySelector("input, textarea");
  const [, edit] = form.querySelectorAll("button");
  form.onsubmit = async (event) => {
    event.preventDefault();
    const answer = await play(example, kind, ...(edit ? [field.value] : [text, field.value]));
    if (!edit && answer?.ok) showProgress(answered.add(name));
  };
  if (!edit) continue;
  const link = form.querySelector("a");
  field.rows = lines.length + 1;
  field.oninput = () => outdate(example);
  edit.onclick = () => (field.hidden = !field.hidden);
  link.onclick = () => (link.href = `${root}book/bench.html#${new URLSearchParams({ played: steps, text: field.value })}`);
  link.hidden = kind !== "conversation";
}

// ---- The playground, whose state is its address: a text, and how many of its lines are played

const bench = document.getElementById("bench");

if (bench) {
  const { text } = bench.elements;
  const go = (lines, played) => (location.hash = new URLSearchParams({ played, text: lines }));
  let played = 0;
  bench.onclick = ({ target: { dataset } }) => {
    const line = dataset.line?.replace(/\{(\w+)\}/g, (hole, name) => bench.elements[name]?.value ?? hole);
    if (line) go(text.value + (text.value && "\n") + line, -1);
    if (dataset.go) go(text.value, Math.max(0, played + Number(dataset.go)));
    if (dataset.clear) go("", -1);
  };
  bench.onsubmit = (event) => event.preventDefault();
  text.oninput = () => outdate(bench);
  text.onchange = () => go(text.value, -1);
  window.onhashchange = async () => {
    const state = new URLSearchParams(location.hash.slice(1));
    text.value = state.get("text") ?? text.defaultValue;
    const answer = await play(bench, "bench", text.value, Number(state.get("played") ?? -1));
    if (answer?.lines) [bench.querySelector(".cards").innerHTML, played] = [answer.cards, answer.played];
  };
  window.onhashchange();
}

window.onbeforeprint = () => document.querySelectorAll("details").forEach((one) => (one.open = true));
for (const pane of document.querySelectorAll("pre, .table-wrapper")) {
  if (pane.scrollWidth > pane.clientWidth) pane.tabIndex = 0;
}
