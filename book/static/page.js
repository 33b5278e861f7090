// What a page does beside being read: it runs examples, checks answers, and has a bench.
// All is played by the worker, which begins when it is first needed.
"use strict";

let worker;

function ask(...call) {
  return new Promise((resolve) => {
    worker ??= new Worker("worker.js", { type: "module" });
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = ({ data }) => resolve(data);
    worker.postMessage(call, [port2]);
  });
}

async function play(place, ...call) {
  const output = place.querySelector("output");
  output.textContent = worker ? "…" : "starting Python, which takes some seconds …";
  output.className = "";
  const said = "✗ a page that is a file is for reading: the book has to come from a web server; see book/README.md";
  const answer = await ask(...call).catch(() => ({ ok: false, said }));
  output.textContent = answer.said;
  output.className = answer.ok ? "good" : "bad";
  if (answer.html) place.querySelector(".drawing").innerHTML = answer.html;
  return answer;
}

const address = (text, played) => `bench.html#${new URLSearchParams({ played, text })}`;

// ---- Examples and questions

for (const example of document.querySelectorAll("figure:has(textarea)")) {
  const text = example.querySelector("textarea");
  const link = example.querySelector(".row a");
  example.querySelector("button").onclick = () => play(example, example.dataset.kind, text.value);
  if (link) link.onclick = () => (link.href = address(text.value, link.dataset.played));
}

for (const question of document.querySelectorAll(".question")) {
  question.onsubmit = (event) => {
    event.preventDefault();
    play(question, "question", question.querySelector("textarea").value, question.querySelector("input").value);
  };
}

// ---- The bench, whose state is its address: a text, and how many of its steps are played

const bench = document.getElementById("bench");

if (bench) {
  const { lines } = bench.elements;
  const go = (text, played) => (location.href = address(text, played));
  const ways = {
    undo: () => location.hash && history.back(),
    back: () => go(lines.value, Math.max(0, bench.dataset.played - 1)),
    on: () => go(lines.value, Number(bench.dataset.played) + 1),
    end: () => go(lines.value, -1),
    clear: () => go("", -1),
  };
  bench.onclick = (event) => {
    const { line, go: way } = event.target.dataset;
    if (way) ways[way]();
    if (!line) return;
    const said = line.replace(/\{(\w+)\}/g, (hole, name) => bench.elements[name]?.value ?? hole);
    go(lines.value ? `${lines.value}\n${said}` : said, -1);
  };
  bench.onsubmit = (event) => event.preventDefault();
  lines.onchange = () => go(lines.value, -1);
  const show = async () => {
    const state = new URLSearchParams(location.hash.slice(1));
    lines.value = state.get("text") ?? lines.defaultValue;
    const played = Number(state.get("played") ?? -1);
    const answer = await play(bench, "bench", lines.value, played);
    if (!answer.html) return;
    bench.querySelector(".cards").innerHTML = answer.cards;
    bench.dataset.played = played < 0 ? answer.count : played;
  };
  window.onhashchange = show;
  show();
}
