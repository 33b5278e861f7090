// The first page asks: type a key, and see who receives it.  No Python is needed for that.
"use strict";
const READERS = { Heating: "sensors/*/temp", Display: "sensors/kitchen/", Alarm: "alarm/*", Log: "" };

// As chapter 2 defines it, and as pattern_matches of sbus.py does it; make book-test compares them
function matches(pattern, key) {
  const plain = pattern.replace(/[.+?^${}()|[\]\\]/g, "\\$&").replace(/\*/g, "[^/]*(?![^/])");
  const end = pattern === "" || pattern.endsWith("/") ? "" : "$";
  return new RegExp(`^${plain}${end}`, "s").test(key);
}

{
  const first = document.getElementById("first"), { key } = first.elements, list = first.querySelector("ul");
  const goals = [...first.querySelectorAll(".goal")];
  const isReached = [(heard) => `${heard}` === "Log", (heard) => heard.length === 4, (heard) => heard.length === 2];

  for (const [name, pattern] of Object.entries(READERS))
    list.insertAdjacentHTML("beforeend", `<li><label>${name} <input value="${pattern}" placeholder="(everything)" autocomplete="off"
      spellcheck="false" aria-label="${name} has subscribed to"></label> <output></output></li>`);
  first.oninput = () => {
    const isReserved = key.value.split("/").includes("!");
    const rows = [...list.children].map((row) => [row, row.querySelector("input").value]);
    const heard = Object.keys(READERS).filter((_, n) => !isReserved && matches(rows[n][1], key.value));
    rows.forEach(([row], n) => {
      row.className = heard.includes(Object.keys(READERS)[n]) ? "yes" : "no";
      row.querySelector("output").textContent = row.className === "yes" ? "✓ receives it" : "hears nothing";
    });
    goals.forEach(({ classList }, n) => isReached[n](heard) && classList.add("done"));
    const steps = rows.map(([, pattern], n) => `${"ABCD"[n]} > SUB ${pattern}`);
    const text = [...steps, `E > MSG ${key.value}\\0hello`].join("\n");
    first.querySelector("a").href = `bench.html#${new URLSearchParams({ text })}`;
  };
  first.onsubmit = () => false;
  first.hidden = false;
  first.oninput();
}
