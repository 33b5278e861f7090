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
  return fetch(new URL("_static/rules.json", root)).then((file) => file.json());
}

async function play(place, kind, ...call) {
  const output = place.querySelector("output");
  const show = (className, textContent) => Object.assign(output, { className, textContent });
  if (location.protocol === "file:") return show("bad", "Examples run where the book comes from a web server.");
  show("", "Python works …");
  rules ??= await start();
  const answer = await new Promise((resolve) => port.postMessage([calls.push(resolve) - 1, kind, ...call]));
  const { lines, led, said } = answer;
  outdate(place, !lines);
  if (!lines) return show("bad", said);
  const failed = led.findIndex(({ wrong }) => wrong);
  if (failed >= 0) show("bad", `Line ${failed + 1}, “${lines[failed]}”: ${led[failed].wrong}.`.replaceAll("\\0", "\\x00"));
  else show("good", kind === "question" ? "Right." : `Right: ${led.length} of ${lines.length} lines went as written.`);
  place.querySelector(".drawing").innerHTML = drawn(kind, lines, led);
  return { ...answer, isRight: failed < 0 };
}

function outdate(place, is = true) {
  place.querySelectorAll(".drawing").forEach((one) => one.classList.toggle("outdated", is));
}

// ---- Drawings

const STEP = /^(?:([A-Z]\w*|____) )?(>>?|<|\w+) ?(.*)$/;
const PACKET = /^"?((?:UN)?SUB|C?MSG) (.*?)(?:(\\0|\\x00)(.*?))?"?$/;
const FIELDS = /(?:\w+=)?"(?:\\.|[^"\\])*"|\S+/g;
const HEADS = { match: ["Pattern", "Key", "Match"], packet: ["Packet", "Kind"] };
const SERVER = "100% - 2.2rem"; // its lane
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
const cited = (text) => escaped(text).replace(/\[([A-Z]+-\d+)\]/g, (id, rule) =>
  `<a class="id" href="${root}${rules[rule][0]}.html#${rule}" title="${escaped(rules[rule][2])}">${id}</a>`);
const result = ({ made = [], wrong }) => each(made, (one) => `<span class="made">${cited(one)}</span>`)
  + (wrong ? `<strong>✗ ${cited(wrong)}</strong>` : "");
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
  return `<li class="${kind} ${look(led)}"
    style="margin: 0 calc(100% - (${right})) 0 calc(${left})">
    <span class="does">${who ?? ""} ${WORDS[verb] ?? verb}</span>
    ${isPacket && said !== "end" ? packet(said) : `<em>${escaped(said)}</em>`}
    ${isPacket ? `<svg class="arrow"><line x2="100%" y1="6" y2="6"/>${ARROWS[kind]}</svg>` : ""}${result(led ?? {})}</li>`;
}

function drawn(kind, lines, led) {
  if (kind in HEADS) return table(kind, lines, led);
  const isClient = kind === "client"; // a program, the client that it tells what to do, and the server
  const of = (line) => (line[0] === "=" ? `Program <${line.slice(1)}`
    : "<>".includes(line[0]) ? `Client ${line}` : `Program > ${line}`);
  const steps = isClient ? lines.map(of) : lines;
  const names = [...new Set(steps.map((line) => line.match(STEP)?.[1]))].filter(Boolean).sort();
  const lanes = isClient ? { Program: ["2rem", "50%"], Client: ["50%", SERVER] }
    : Object.fromEntries(names.map((name, number) => [name, [`${1.1 + 2.4 * number}rem`, SERVER]]));
  const ends = Object.entries({ ...lanes, Server: [SERVER] });
  return `<div class="heads">${each(ends, ([name, [at]]) => `<b style="left: calc(${at})">${name}</b>`)}</div>
    <div class="lanes"><svg class="poles">${each(ends, ([, [at]]) => `<rect style="x: calc(${at})"/>`)}</svg>
    <ol>${each(steps, (line, number) => row(line, lanes, led ? led[number] : {}))}</ol></div>`;
}

function table(kind, lines, led) {
  const rows = lines.map((line, number) => {
    const [first, second, ...more] = [...line.match(FIELDS), "", ""];
    const one = led ? led[number] : {};
    const [shown, said] = kind === "match" ? [[first, second], more] : [[first], [second, ...more]];
    return `<tr class="${said[0]} ${look(one)}">${each(shown, (text) => `<td>${packet(text)}</td>`)}
      <td>${escaped(said.join(" "))}${led && !one.wrong ? " ✓" : ""}${result(one)}</td></tr>`;
  });
  return `<table><tr>${each(HEADS[kind], (text) => `<th scope="col">${text}</th>`)}</tr>${rows.join("")}</table>`;
}

// ---- Examples and questions

const answered = new Set(JSON.parse(localStorage.getItem("answered")));

function showProgress() {
  const questions = [...document.querySelectorAll("[data-kind=question]")];
  const right = questions.filter(({ dataset }) => answered.has(dataset.name));
  right.forEach(({ classList }) => classList.add("answered"));
  const said = `You have answered ${right.length} of the ${questions.length} questions below.`;
  if (questions.length) progress.textContent = said;
  localStorage.setItem("answered", JSON.stringify([...answered]));
}

const progress = document.createElement("p");
document.querySelector("h1")?.after(progress);
showProgress();

for (const example of document.querySelectorAll(".example")) {
  const { kind, name, steps } = example.dataset;
  const drawing = example.querySelector(".drawing");
  const text = drawing.textContent;
  const lines = text.split("\n").filter((line) => line.trim());
  const notes = lines.filter((line) => line[0] === "#").map((line) => line.slice(2));
  const hints = notes.filter((note) => note.startsWith("Hint: "));
  const paragraph = (note) => `<p>${escaped(note)}</p>`;
  drawing.innerHTML = drawn(kind, lines.filter((line) => line[0] !== "#"));
  drawing.insertAdjacentHTML("beforebegin", each(notes.slice(0, notes.length - hints.length), paragraph));
  if (kind === "client") continue;
  const form = document.createElement("form");
  form.innerHTML = kind === "question"
    ? `<label>Your answer <input autocomplete="off" spellcheck="false"></label> <button>Check</button>
       <output></output><details><summary>A hint</summary>${each(hints, paragraph)}</details>`
    : `<button aria-label="Run ${name}">Run</button> <button type="button">Edit</button>
       <a href="#">In the playground</a><output></output>
       <textarea hidden aria-label="${name} as text" spellcheck="false">${escaped(text)}</textarea>`;
  example.append(form);
  const field = form.querySelector("input, textarea");
  const [, edit] = form.querySelectorAll("button");
  form.onsubmit = async (event) => {
    event.preventDefault();
    const answer = await play(example, kind, ...(edit ? [field.value] : [text, field.value]));
    if (!edit && answer.isRight) showProgress(answered.add(name));
  };
  if (!edit) continue;
  const link = form.querySelector("a");
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
  };
  text.oninput = () => outdate(bench);
  text.onchange = () => go(text.value, -1);
  window.onhashchange = async () => {
    const state = new URLSearchParams(location.hash.slice(1));
    text.value = state.get("text") ?? text.defaultValue;
    const answer = await play(bench, "bench", text.value, Number(state.get("played") ?? -1));
    if (answer.lines) [bench.querySelector(".cards").innerHTML, played] = [answer.cards, answer.of];
  };
  window.onhashchange();
}

window.onbeforeprint = () => document.querySelectorAll("details").forEach((one) => (one.open = true));
document.querySelectorAll(".table-wrapper").forEach((one) => (one.tabIndex = 0)); // they may scroll
