// What a page does beside being read. One worker plays for all pages, and outlives each.
"use strict";
const here = document.currentScript.src;
const calls = [];
let port, rules;

function start() {
  const url = new URL("worker.js", here);
  const options = { type: "module", extendedLifetime: true };
  port = window.SharedWorker ? new SharedWorker(url, options).port : new Worker(url, options);
  port.onmessage = ({ data: [number, answer] }) => calls[number](JSON.parse(answer));
  rules = fetch(new URL("rules.json", here)).then((file) => file.json());
}

async function play(place, ...call) {
  const output = place.querySelector("output");
  const drawing = place.querySelector(".drawing");
  const is_file = location.protocol === "file:";
  if (!port && !is_file) start();
  output.className = "";
  output.textContent = is_file ? "Examples run where the book comes from a web server." : "Python works …";
  const answer = await new Promise((resolve) => port?.postMessage([calls.push(resolve) - 1, ...call]));
  output.className = answer.ok ? "good" : "bad";
  output.textContent = answer.said;
  drawing.classList.toggle("outdated", !answer.html);
  if (!answer.html) return answer;
  drawing.innerHTML = answer.html;
  for (const made of drawing.querySelectorAll(".made, strong")) {
    const [, rule] = made.textContent.match(/\[([A-Z]+-\d+)\]/) ?? [];
    const [page, sentence] = (await rules)[rule] ?? [];
    const link = Object.assign(document.createElement("a"), { href: new URL(`../${page}#${rule}`, here) });
    link.title = sentence;
    if (page) link.append(...made.childNodes), made.append(link);
  }
  return answer;
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

for (const example of document.querySelectorAll(".example:not([data-kind=client])")) {
  const { kind, name, text, steps } = example.dataset;
  const form = document.createElement("form");
  form.innerHTML = kind === "question"
    ? '<label>Your answer <input autocomplete="off" spellcheck="false"></label> <button>Check</button><output></output>'
    : `<button aria-label="Run ${name}">Run</button> <button type="button">Edit</button> <a>In the playground</a>
       <output></output><textarea hidden aria-label="${name} as text" spellcheck="false"></textarea>`;
  const field = form.querySelector("input, textarea");
  const [, edit] = form.querySelectorAll("button");
  const link = form.querySelector("a");
  example.append(form);
  form.onsubmit = async (event) => {
    event.preventDefault();
    const answer = await (edit ? play(example, kind, field.value) : play(example, kind, text, field.value));
    if (!edit && answer.ok) showProgress(answered.add(name));
  };
  if (!edit) continue;
  field.value = text;
  field.rows = text.split("\n").length;
  field.oninput = () => example.querySelector(".drawing").classList.add("outdated");
  edit.onclick = () => (field.hidden = !field.hidden);
  const state = () => new URLSearchParams({ played: steps || -1, text: field.value });
  if (kind === "conversation") link.onfocus = link.onpointerdown = () => (link.href = new URL(`../book/bench.html#${state()}`, here));
  else link.remove();
}

// ---- The playground, whose state is its address: a text, and how many of its lines are played

const bench = document.getElementById("bench");

if (bench) {
  const { text } = bench.elements;
  const cards = bench.querySelector(".cards");
  const go = (lines, played) => (location.hash = new URLSearchParams({ played, text: lines }));
  let played = 0;
  bench.onclick = ({ target: { dataset } }) => {
    const line = dataset.line?.replace(/\{(\w+)\}/g, (hole, name) => bench.elements[name]?.value ?? hole);
    if (line) go(text.value + (text.value && "\n") + line, -1);
    if (dataset.go) go(dataset.go === "none" ? "" : text.value, Math.max(-1, played + Number(dataset.go)));
  };
  bench.onsubmit = (event) => event.preventDefault();
  text.oninput = () => [cards, bench.querySelector(".drawing")].forEach((one) => one.classList.add("outdated"));
  text.onchange = () => go(text.value, -1);
  window.onhashchange = async () => {
    const state = new URLSearchParams(location.hash.slice(1));
    text.value = state.get("text") ?? text.defaultValue;
    const answer = await play(bench, "bench", text.value, Number(state.get("played") ?? -1));
    cards.classList.toggle("outdated", !answer.html);
    if (answer.html) cards.innerHTML = answer.cards, played = answer.of;
  };
  window.onhashchange();
}

window.onbeforeprint = () => document.querySelectorAll("details").forEach((one) => (one.open = true));
for (const pane of document.querySelectorAll("pre, .table-wrapper")) {
  if (pane.scrollWidth > pane.clientWidth) pane.tabIndex = 0;
}
