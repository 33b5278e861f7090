// Runs player.py in Pyodide, once for all pages, and tells them how far it is.
const PYODIDE = new URL("../pyodide/", self.location);
const TRIES = 8; // for a part, on a line that breaks
const PART_MS = 50_000; // after which a part is asked for again: the pages wait a little longer for news
const SEARCHES = ["orders", "walk"]; // which say how far they are
const pages = new Set(); // ports, or this worker itself
const said = (text) => JSON.stringify({ said: text });
const without = "This book was made without Pyodide, so it is for reading. See book/README.md.";
const lost = "Python could not be loaded: the connection was lost. Your browser keeps what has arrived: load this page again.";
const pause = (ms = 0) => new Promise((go) => setTimeout(go, ms));
let progress = "", bytes = 0, size = 0;

function tell(text) {
  progress = text;
  pages.forEach((page) => page.postMessage([0, text]));
}

// Returns a part of a file.  The browser keeps it, so it comes over the line once
async function part(url) {
  for (let tries = 1; tries <= TRIES; tries++) {
    const megabytes = () => `${(bytes / 1e6).toFixed(1)} of ${(size / 1e6).toFixed(1)} MB`;
    try {
      const response = await fetch(url, { signal: AbortSignal.timeout(PART_MS) });
      if (!response.ok) throw new Error(lost);
      const data = await response.arrayBuffer();
      bytes += data.byteLength;
      tell(`Python is loading: ${megabytes()} …`);
      return data;
    } catch {
      tell(`The connection is lost at ${megabytes()}: trying again …`);
      await pause(1000 * tries);
    }
  }
  throw new Error(lost);
}

// Returns a file, which pack_python.py has packed and cut
async function file(name, count, type) {
  const parts = [];
  for (let number = 0; number < count; number++) parts.push(await part(new URL(`${name}.gz.${number}`, PYODIDE)));
  const stream = new Blob(parts).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream, { headers: { "Content-Type": type } });
}

async function start() {
  const made = await fetch(new URL("parts.json", PYODIDE));
  if (!made.ok) throw new Error(without);
  const { parts, bytes: all, lock } = await made.json();
  size = all;
  const { loadPyodide } = await import(new URL("pyodide.mjs", PYODIDE));
  const come = (name, type) => file(name, parts[name], type);
  const [wasm, script, library] = await Promise.all([come("pyodide.asm.wasm", "application/wasm"),
    come("pyodide.asm.mjs", "text/javascript"), come("python_stdlib.zip", "application/zip")]);
  tell("Python starts …");

  const url = async (response) => URL.createObjectURL(await response.blob());
  const { default: createPyodideModule } = await import(await url(script));
  const plain = self.fetch;
  self.fetch = (wanted, ...more) => (`${wanted}`.endsWith("asm.wasm") ? Promise.resolve(wasm) : plain(wanted, ...more));
  const python = await loadPyodide({
    createPyodideModule, indexURL: `${PYODIDE}`, packageBaseUrl: `${PYODIDE}`, lockFileContents: lock, stdLibURL: await url(library),
  });
  self.fetch = plain;
  const archive = await fetch("player.zip");
  python.unpackArchive(await archive.arrayBuffer(), "zip");
  const { call, search } = python.pyimport("player");
  tell("");
  return (...asked) => (SEARCHES.includes(asked[0]) ? search : call)(...asked);
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
      await pause(); // another page may ask, or this one end it
    }
  } catch ({ message }) { answer = said(message); }
  target.postMessage([number, answer]);
};
self.onconnect = ({ ports: [port] }) => (port.onmessage = self.onmessage);
