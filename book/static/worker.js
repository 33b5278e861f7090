// Runs player.py in Pyodide, once for all pages, and tells them how far it is.
const LARGE = ["pyodide.asm.wasm", "python_stdlib.zip"]; // nearly all there is to fetch
const pages = new Set(); // ports, or this worker itself
const said = (text) => JSON.stringify({ said: text });
const without = "This book was made without Pyodide, so it is for reading. See book/README.md.";
let progress = "";

function tell(text) {
  progress = text;
  pages.forEach((page) => page.postMessage([0, text]));
}

// Fetches a file into the browser's cache, and says how far it is
async function fetched(name, done) {
  const { body } = await fetch(`../pyodide/${name}`);
  for (const reader = body.getReader(); ;) {
    const { value } = await reader.read();
    if (!value) return;
    done(value.length);
  }
}

async function start() {
  const { loadPyodide } = await import("../pyodide/pyodide.mjs").catch(() => { throw new Error(without); });
  let bytes = 0;
  const count = (more) => tell(`Python is loading: ${((bytes += more) / 1e6).toFixed(1)} MB …`);
  await Promise.all(LARGE.map((name) => fetched(name, count)));
  tell("Python starts: 1 of 2 …");
  const python = await loadPyodide();
  tell("Python starts: 2 of 2 …");
  const archive = await fetch("player.zip");
  python.unpackArchive(await archive.arrayBuffer(), "zip");
  const { call, search } = python.pyimport("player");
  tell("");
  return (...asked) => (asked[0] === "orders" ? search : call)(...asked);
}

const player = start().catch(({ message }) => () => said(message));

self.onmessage = async ({ data: [number, ...call], target }) => {
  if (call[0] === "end") return self.close(); // nobody waits for it any more
  if (call[0] === "load") {
    pages.add(target);
    return target.postMessage([0, progress]);
  }
  const play = await player;
  target.postMessage([number]); // it begins
  let answer;
  try {
    for (answer = play(...call); answer.next;) { // a search, which says how far it is
      const { done, value } = answer.next();
      if (done) answer = value;
      else target.postMessage([number, undefined, value]);
      await new Promise((go) => setTimeout(go)); // another page may ask, or this one end it
    }
  } catch ({ message }) { answer = said(message); }
  target.postMessage([number, answer]);
};
self.onconnect = ({ ports: [port] }) => (port.onmessage = self.onmessage);
