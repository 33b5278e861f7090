// What a page does beside being read: it runs examples, checks answers, and
// has a bench.  The player is asked for by its worker, begun at first need.
"use strict";

let worker;
let asked = 0;
const waiting = new Map();

function ask(...call) {
  if (!worker) {
    worker = new Worker("worker.js", { type: "module" });
    worker.onmessage = ({ data }) => {
      waiting.get(data.id)(data.answer);
      waiting.delete(data.id);
    };
    worker.onerror = () => {
      const said = "✗ the player needs a web server and make book with a network; see book/README.md";
      for (const answer of waiting.values()) answer({ ok: false, said });
      waiting.clear();
      worker = undefined;
    };
  }
  return new Promise((answer) => {
    waiting.set(++asked, answer);
    worker.postMessage({ id: asked, call });
  });
}

async function play(output, drawing, ...call) {
  output.className = "";
  output.textContent = worker ? "…" : "starting Python, a few seconds …";
  const answer = await ask(...call);
  output.className = answer.ok ? "good" : "bad";
  output.textContent = answer.said;
  if (answer.html) drawing.innerHTML = answer.html;
  return answer;
}

function make(parent, name, properties) {
  return parent.appendChild(Object.assign(document.createElement(name), properties));
}

// ---- Examples

for (const example of document.querySelectorAll("figure")) {
  const text = example.querySelector("textarea");
  const drawing = example.querySelector(".drawing");
  const row = make(example, "p", { className: "row" });
  const run = make(row, "button", { textContent: "Run" });
  run.setAttribute("aria-label", `Run ${example.id.slice("example-".length)}`);
  if (example.dataset.kind === "conversation") {
    const open = make(row, "a", { textContent: "on the bench" });
    const aim = () => (open.href = address(text.value, -1));
    text.addEventListener("input", aim);
    aim();
  }
  const output = make(row, "output", {});
  run.onclick = () => play(output, drawing, example.dataset.kind, text.value);
}

for (const form of document.querySelectorAll(".question")) {
  form.onsubmit = (event) => {
    event.preventDefault();
    const [answer, text] = [form.querySelector("input"), form.querySelector("textarea")];
    play(form.querySelector("output"), form.querySelector(".drawing"), "question", text.value, answer.value);
  };
}

// ---- The bench: its whole state is a text, how much of it is played, and in the address

function address(text, played) {
  return `bench.html#${new URLSearchParams({ played, text })}`;
}

const bench = document.getElementById("bench");

if (bench) {
  const lines = document.getElementById("lines");
  const undone = []; // addresses to go back to
  let played = -1;
  let count = 0;

  const show = async () => {
    const state = new URLSearchParams(location.hash.slice(1));
    lines.value = state.get("text") ?? "A > SUB a/*\nB > MSG a/b\\0hello\nA < {any}";
    played = Number(state.get("played") ?? -1);
    const answer = await play(bench.querySelector("output"), bench.querySelector(".drawing"), "bench", lines.value, played);
    if (!answer.html) return;
    count = answer.count;
    bench.querySelector(".cards").innerHTML = answer.cards;
    bench.querySelector("output").textContent += `; the clock shows ${answer.clock} s`;
  };
  const go = (text, steps) => {
    undone.push(location.hash);
    location.hash = address(text, steps).split("#")[1];
  };
  const ways = {
    undo: () => (location.hash = undone.pop() ?? location.hash),
    back: () => go(lines.value, Math.max(0, (played < 0 ? count : played) - 1)),
    on: () => go(lines.value, Math.min(count, (played < 0 ? count : played) + 1)),
    end: () => go(lines.value, -1),
    clear: () => go("", -1),
  };
  const add = (button) => {
    const fill = (_, name) => bench.elements[name]?.value ?? `{${name}}`;
    const line = button.dataset.line.replace(/\{(\w+)\}/g, fill);
    go(`${lines.value.trimEnd()}\n${line}`.trimStart(), -1);
  };
  bench.onsubmit = (event) => {
    event.preventDefault();
    add(event.submitter ?? bench.querySelector("button"));
  };
  bench.onclick = ({ target }) => {
    if (target.type === "button" && target.dataset.line) add(target);
    if (target.dataset.go) ways[target.dataset.go]();
  };
  lines.onchange = () => go(lines.value, -1);
  window.onhashchange = show;
  show();
}
