// Runs player.py in Pyodide, once for all pages, and tells them how far it is.
const PYODIDE = new URL("../pyodide/", self.location);
const TRIES = 8; // for a part, on a line that breaks
const pages = new Set(); // ports, or this worker itself
const said = (text) => JSON.stringify({ said: text });
const without = "This book was made without Pyodide, so it is for reading. See book/README.md.";
const later = (ms = 0) => new Promise((go) => setTimeout(go, ms));
let progress = "", bytes = 0;

function tell(text) {
  progress = text;
  pages.forEach((page) => page.postMessage([0, text]));
}

// Returns one part of a file. The browser keeps it, so nobody fetches it twice
async function part(name, number, size) {
  for (let tries = 1; ; tries++) {
    try {
      const data = await (await fetch(new URL(`${name}.gz.${number}`, PYODIDE))).arrayBuffer();
      tell(`Python is loading: ${((bytes += data.byteLength) / 1e6).toFixed(1)} of ${(size / 1e6).toFixed(1)} MB …`);
      return new Uint8Array(data);
    } catch (error) {
      if (tries === TRIES) throw new Error("Python could not be loaded: the connection is lost. Load this page again.");
      tell(`The connection is lost at ${(bytes / 1e6).toFixed(1)} MB: trying again …`);
      await later(1000 * tries);
    }
  }
}

// Returns a file as a stream, unpacked while its parts come
function file(name, count, size, type) {
  let number = 0;
  const packed = new ReadableStream({
    async pull(stream) {
      if (number === count) return stream.close();
      try { stream.enqueue(await part(name, number++, size)); } catch (error) { lose(error); }
    },
  });
  return new Response(packed.pipeThrough(new DecompressionStream("gzip")), { headers: { "Content-Type": type } });
}

let lose; // what Pyodide makes of an error that a stream has is no sentence

async function start() {
  const made = await fetch(new URL("parts.json", PYODIDE));
  if (!made.ok) throw new Error(without);
  const { parts, bytes: size, lock } = await made.json();
  const { loadPyodide } = await import(new URL("pyodide.mjs", PYODIDE));
  const files = Object.fromEntries(Object.entries(parts).map(([name, count]) =>
    [name, file(name, count, size, name.endsWith("wasm") ? "application/wasm" : "text/javascript")]));
  const [script, library] = await Promise.all([files["pyodide.asm.mjs"].blob(), files["python_stdlib.zip"].blob()]);
  const { default: createPyodideModule } = await import(URL.createObjectURL(script));
  const plain = self.fetch;
  self.fetch = (url, ...more) => (`${url}`.endsWith("asm.wasm") ? Promise.resolve(files["pyodide.asm.wasm"]) : plain(url, ...more));
  const python = await loadPyodide({
    createPyodideModule, indexURL: `${PYODIDE}`, lockFileContents: lock, packageBaseUrl: `${PYODIDE}`,
    stdLibURL: URL.createObjectURL(library),
  });
  self.fetch = plain;
  tell("Python starts …");
  python.unpackArchive(await (await fetch("player.zip")).arrayBuffer(), "zip");
  const { call, search } = python.pyimport("player");
  tell("");
  return (...asked) => (["orders", "walk"].includes(asked[0]) ? search : call)(...asked);
}

const lost = new Promise((_, reject) => (lose = reject));
const player = Promise.race([start(), lost]).catch(({ message }) => () => said(message));

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
      await later(); // another page may ask, or this one end it
    }
  } catch ({ message }) { answer = said(message); }
  target.postMessage([number, answer]);
};
self.onconnect = ({ ports: [port] }) => (port.onmessage = self.onmessage);
