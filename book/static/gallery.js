// The gallery of mistakes: which example catches a server, and what the kit finds
document.querySelectorAll("form.mistake").forEach((place) => {
  const { mistake } = place.dataset, section = place.closest("section"), show = shower(place);
  const told = Object.assign(document.createElement("p"), { className: "caught", role: "status" });
  let runs = 0;
  place.hidden = false; // without scripts it is
  section.querySelector(".example").before(told);
  const score = (text) => { told.textContent = text; };
  score(answered.has(mistake) ? "You have caught this one." : "One of these examples fails on this server. Which?");
  section.addEventListener("played", ({ target, detail }) => {
    if (target === place || answered.has(mistake)) return;
    runs++;
    if (detail) return score("Not this one: this server keeps to it. Try another, or edit it.");
    score(`Caught, at ${runs === 1 ? "the first run" : `run ${runs}`}.`);
    showProgress(answered.add(mistake));
  });
  place.onsubmit = async (event) => {
    event.preventDefault();
    const { lines } = await request(place, "orders", mistake, "walk");
    if (!lines) return;
    await play(place, "broken", lines.join("\n"), mistake);
    place.querySelector("output").prepend("The kit found this one, and nothing in it can be left out. ");
  };
});
