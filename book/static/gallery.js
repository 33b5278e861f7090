// The gallery of mistakes: which conversation betrays a server, and what the kit finds
"use strict";
document.querySelectorAll("form.mistake").forEach((form) => {
  const { mistake } = form.dataset, section = form.closest("section"), answer = form.querySelector("details");
  const status = form.querySelector("[role]");
  let runs = 0, isCaught = false;
  const tell = (text) => { status.innerHTML = cited(text); };

  form.hidden = false; // without scripts it is
  section.querySelector(".example").before(status);
  answer.hidden = !isAnswered(mistake);
  tell(isAnswered(mistake) ? "You have caught this one." : "Only one of these three conversations betrays the server. Which?");
  section.addEventListener("played", ({ target, detail: { isRight, answer: { rules: broken = [] } } }) => {
    if (isCaught) return;
    runs++;
    if (isRight) return tell("Not this one: here the server does what sbus.py does. Try another, or press Edit and write your own.");
    const isByKit = target === form;
    isCaught = true;
    tell(`${isByKit ? "The kit has caught it" : `Caught at run ${runs}`}. It breaks ${broken.map((rule) => `[${rule}]`).join(" ")}.`);
    if (!isByKit) store.set(`answered ${mistake}`, "caught");
    answer.hidden = false;
  });
  form.onsubmit = async (event) => {
    event.preventDefault();
    const { lines } = await request(form, "walk", "", mistake);
    if (lines) await play(form, "broken", lines.join("\n"), mistake);
  };
});
