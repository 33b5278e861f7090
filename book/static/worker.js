// Runs player.py in Pyodide, once for all pages.
const said = (text) => JSON.stringify({ said: text });
const player = import("../pyodide/pyodide.mjs").then(async ({ loadPyodide }) => {
  const python = await loadPyodide();
  const archive = await fetch("player.zip");
  python.unpackArchive(await archive.arrayBuffer(), "zip");
  return python.pyimport("player");
}, () => ({ call: () => said("This book was made without Pyodide, so it is for reading. See book/README.md.") }));

self.onmessage = async ({ data: [number, ...call], target }) =>
  target.postMessage([number, await player.then((it) => it.call(...call)).catch((error) => said(error.message))]);
self.onconnect = ({ ports: [port] }) => (port.onmessage = self.onmessage);
