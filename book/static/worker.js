// Runs player.py in Pyodide, away from the page, so that the page stays alive.
const ABSENT = "✗ there is no player: the book was made without pyodide; see book/README.md";

const player = import("./pyodide/pyodide.mjs").then(async ({ loadPyodide }) => {
  const python = await loadPyodide();
  const archive = await fetch("player.zip");
  python.unpackArchive(await archive.arrayBuffer(), "zip");
  return python.pyimport("book.player");
}, () => ({ call: () => JSON.stringify({ ok: false, said: ABSENT }) }));

onmessage = async ({ data, ports: [port] }) => {
  try {
    port.postMessage(JSON.parse((await player).call(...data)));
  } catch (error) {
    port.postMessage({ ok: false, said: `✗ ${error.message}` });
  }
};
