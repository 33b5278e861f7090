// The first page asks: type a key, see who receives it. Chapter 2 of the specification in four lines; no Python is needed.
"use strict";
{
  const first = document.getElementById("first"), { key } = first.elements, list = first.querySelector("ul");
  const READERS = { "the heating": "sensors/*/temp", "the kitchen’s display": "sensors/kitchen/", "the alarm": "alarm/*", "the log": "" };
  const GOALS = [(who) => `${who}` === "3", (who) => who.length === 4, (who) => who.length === 2];

  // As sbus.py defines it in pattern_matches
  const selects = (pattern, given) => {
    const plain = pattern.replace(/[.+?^${}()|[\]\\]/g, "\\$&").replace(/\*/g, "[^/]*(?![^/])");
    return new RegExp(`^${plain}${/\/$|^$/.test(pattern) ? "" : "$"}`, "s").test(given);
  };
  window.selects = selects; // for the tests

  Object.entries(READERS).forEach(([name, pattern]) => list.insertAdjacentHTML("beforeend",
    `<li><label>${name} subscribed to <input value="${pattern}" placeholder="(everything)" autocomplete="off" spellcheck="false" size="16"></label> <output></output></li>`));
  const rows = [...list.children];

  first.oninput = () => {
    const isReserved = key.value.split("/").includes("!");
    const heard = rows.map((row) => !isReserved && selects(row.querySelector("input").value, key.value));
    const who = [...heard.keys()].filter((number) => heard[number]);
    rows.forEach((row, number) => {
      row.className = heard[number] ? "yes" : "no";
      row.querySelector("output").textContent = heard[number] ? "✓ receives it" : "hears nothing";
    });
    first.querySelectorAll(".goals span").forEach((goal, number) => GOALS[number](who) && goal.classList.add("done"));
    const steps = rows.map((row, number) => `${"ABCD"[number]} > SUB ${row.querySelector("input").value}`);
    const text = [...steps, `E > MSG ${key.value}\\0hello`].join("\n");
    first.querySelector("a").href = `bench.html#${new URLSearchParams({ played: -1, text })}`;
  };
  first.onsubmit = () => false;
  first.hidden = false;
  first.oninput();
}
