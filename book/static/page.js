// What a page does beside being read: it runs examples, checks answers, and has a bench.
// All is played by the worker, which begins when it is first needed.
"use strict";

const ABSENT = "✗ there is no player: the book has to come from a web server, with pyodide; see book/README.md";
const waiting = new Map(); // for answers, by the number of the call
let worker;
let calls = 0;

function begin() {
  worker = new Worker("worker.js", { type: "module" });
  worker.onmessage = ({ data }) => waiting.get(data.id)(data.answer);
  worker.onerror = () => {
    worker = undefined;
    for (const answer of waiting.values()) answer({ ok: false, said: ABSENT });
  };
}

async function play(place, ...call) {
  const output = place.querySelector("output");
  output.textContent = worker ? "…" : "starting Python, which takes some seconds …";
  output.className = "";
  const answer = await new Promise((resolve) => {
    try {
      if (!worker) begin();
      waiting.set(++calls, resolve);
      worker.postMessage({ id: calls, call });
    } catch {
      resolve({ ok: false, said: ABSENT }); // a page that is a file may have no worker
    }
  });
  output.textContent = answer.said;
  output.className = answer.ok ? "good" : "bad";
  if (answer.html) place.querySelector(".drawing").innerHTML = answer.html;
  return answer;
}

const address = (text, played) => `bench.html#${new URLSearchParams({ played, text })}`;

// ---- Examples and questions

for (const example of document.querySelectorAll("figure:has(textarea)")) {
  const text = example.querySelector("textarea");
  const name = example.id.slice("example-".length);
  const row = example.appendChild(document.createElement("p"));
  row.className = "row";
  row.innerHTML = `<button aria-label="Run ${name}">Run</button> <a>on the bench</a> <output></output>`;
  row.querySelector("button").onclick = () => play(example, example.dataset.kind, text.value);
  const link = row.querySelector("a");
  if (example.dataset.kind !== "conversation") link.remove();
  text.oninput = () => (link.href = address(text.value, -1));
  text.oninput();
}

for (const question of document.querySelectorAll(".question")) {
  question.onsubmit = (event) => {
    event.preventDefault();
    play(question, "question", question.querySelector("textarea").value, question.querySelector("input").value);
  };
}

// ---- The bench, whose state is its address: a text, and how many of its steps are played

const bench = document.getElementById("bench");

async function show() {
  const state = new URLSearchParams(location.hash.slice(1));
  const lines = document.getElementById("lines");
  lines.value = state.get("text") ?? "A > SUB a/*\nB > MSG a/b\\0hello\nA < {any}";
  const played = Number(state.get("played") ?? -1);
  const answer = await play(bench, "bench", lines.value, played);
  if (!answer.html) return;
  bench.querySelector("output").textContent += `; the clock shows ${answer.clock}`;
  bench.querySelector(".cards").innerHTML = answer.cards;
  bench.dataset.played = played < 0 ? answer.count : played;
}

if (bench) {
  const lines = document.getElementById("lines");
  const before = []; // addresses, to go back to
  const go = (text, played) => {
    const after = address(text, played).slice("bench.html".length);
    if (after === location.hash) return;
    before.push(location.hash);
    location.hash = after;
  };
  const ways = {
    undo: () => (location.hash = before.pop() ?? location.hash),
    back: () => go(lines.value, Math.max(0, bench.dataset.played - 1)),
    on: () => go(lines.value, Number(bench.dataset.played) + 1),
    end: () => go(lines.value, -1),
    clear: () => go("", -1),
  };
  bench.onclick = (event) => {
    const { line, go: way } = event.target.dataset;
    if (way) ways[way]();
    if (!line) return;
    event.preventDefault();
    const said = line.replace(/\{(\w+)\}/g, (hole, name) => bench.elements[name]?.value ?? hole);
    go(`${lines.value}\n${said}`.trim(), -1);
  };
  bench.onsubmit = (event) => event.preventDefault();
  lines.onchange = () => go(lines.value, -1);
  window.onhashchange = show;
  show();
}
