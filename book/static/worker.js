// Runs player.py in Pyodide, away from the page, so that the page stays alive.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const player = (async () => {
  const python = await loadPyodide();
  const archive = await fetch("player.zip");
  python.unpackArchive(await archive.arrayBuffer(), "zip");
  return python.pyimport("book.player");
})();

onmessage = async ({ data: { id, call } }) => {
  try {
    const answer = (await player).call(...call);
    postMessage({ id, answer: JSON.parse(answer) });
  } catch (error) {
    postMessage({ id, answer: { ok: false, said: `✗ ${error.message}` } });
  }
};
