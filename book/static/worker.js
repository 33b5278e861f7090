// Runs player.py in Pyodide, once for all pages.
const ABSENT = "This book was made without Pyodide, so it is for reading. See book/README.md.";
const player = import("../pyodide/pyodide.mjs").then(async ({ loadPyodide }) => {
  const python = await loadPyodide();
  const archive = await fetch("player.zip");
  python.unpackArchive(await archive.arrayBuffer(), "zip");
  return python.pyimport("player");
}, () => ({ call: () => JSON.stringify({ ok: false, said: ABSENT }) }));

async function answer({ data: [number, ...call], target }) {
  const said = (error) => JSON.stringify({ ok: false, said: error.message });
  target.postMessage([number, await player.then((it) => it.call(...call)).catch(said)]);
}
self.onconnect = ({ ports: [port] }) => (port.onmessage = answer);
self.onmessage = answer;
