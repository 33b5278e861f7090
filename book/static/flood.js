// Draws a flood. All that happens is in flood-table.js, which sbus.py wrote: this only walks from state to state.
"use strict";
{
  const flood = document.getElementById("flood"), { publish, read, soft, hard, whose, play, anew } = flood.elements;
  const find = (selector) => flood.querySelector(selector), dots = find(".dots");
  const LIMIT = 8, ROOM = 4, TICK_MS = 50; // the steps are: publish, read, a second passes
  const SENTENCES = { // by what the server told its journal; the last that fits is shown
    "send PUB-1": "The kernel accepts the message.",
    "queue BLOCK-4": "The kernel refuses the message, so it waits in the backlog [BLOCK-4].",
    "queue BLOCK-13": "The message waits in the backlog; nobody pauses another user’s publisher [BLOCK-13].",
    "pause BLOCK-10": "The backlog is over its limit: the publisher is paused until half has gone [BLOCK-10].",
    "pause BLOCK-7": "The kernel refuses the message: the publisher is paused until the backlog is empty [BLOCK-7].",
    "resume BLOCK-12": "The publisher may go on [BLOCK-12].",
    "drop BLOCK-5": "The kernel refuses the message, so it is lost [BLOCK-5].",
    "drop BLOCK-9": "The backlog is full, so the message is lost [BLOCK-9].",
    "[BLOCK-8]": "The kernel refuses the message, so the reader is disconnected [BLOCK-8].",
    "[BLOCK-11]": "The backlog is full, so the reader is disconnected [BLOCK-11].",
    "[BLOCK-13]": "The backlog is full and the publisher another user’s: the reader is disconnected [BLOCK-13].",
    "[BLOCK-16]": "The reader took nothing for five seconds, so it is disconnected and the publisher freed [BLOCK-16].",
  };
  const place = (dot, x, y = 58) => (dot.style.transform = `translate(${x}px, ${y}px)`);
  let rows, number, line, counts, timer, due, verdict = ""; // on a guess, until it is seen

  const row = () => rows[number]; // packets taken, in the backlog, waiting; paused or not; then the steps
  const isGone = () => !row().length; // the reader was disconnected

  for (const [from, cells] of [[43, 3], [125, LIMIT], [259, ROOM]])
    for (let n = 0; n < cells; n++)
      find(".cells").insertAdjacentHTML("beforeend", `<rect x="${from + 14 * n - 6}" y="51" width="12" height="14" rx="3"/>`);
  find(".cells").insertAdjacentHTML("beforeend", '<path d="M178 46V80M234 46V80"/>');

  function start() {
    rows = FLOOD.modes[`${soft.value} ${hard.value} ${whose.value}`] ?? FLOOD.modes[`${soft.value} block ${whose.value}`];
    if (typeof rows === "string") rows = FLOOD.modes[rows]; // modes that do the same
    [number, line, counts, due] = [0, [], [0, 0, 0], [0, 0, 0]];
    dots.replaceChildren();
    find("output").textContent = "The reader has subscribed.";
    draw();
  }

  function step(kind) {
    if (isGone()) {
      if (kind === 1 && line.length) take(); // what the kernel took can still be read
      if (!line.length) stop();
      return draw();
    }
    const before = row(), led = before[4 + kind];
    if (!led) return; // the publisher waits, or there is nothing to read
    if (kind === 0) send();
    if (kind === 1) take();
    number = led[0];
    const [taken, backlog, waiting, isPaused] = isGone() ? [before[0], 0, 0, 0] : row();
    const lost = line.splice(taken + backlog + waiting);
    counts[2] += lost.length;
    lost.forEach((dot) => leave(dot, 104 + 30 * Math.random(), 126, "lost"));
    say(FLOOD.told[led[1]], isPaused);
    draw();
  }

  function send() {
    const dot = dots.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "circle"));
    dot.setAttribute("r", 5);
    place(dot, 20);
    dot.getBoundingClientRect(); // so that it moves from there
    line.push(dot);
    counts[0]++;
  }

  function take() {
    leave(line.shift(), 348);
    counts[1]++;
  }

  function leave(dot, x, y, look = "taken") {
    dot.classList.add(look);
    place(dot, x, y);
    setTimeout(() => dot.remove(), 900);
  }

  function say(told, isPaused) {
    const known = Object.keys(SENTENCES).findLast((start) => told.includes(start));
    if (!known || (isPaused && !/pause|drop|close/.test(told))) return; // why it is paused stays
    const link = '<a href="../spec/5-flood-control.html#$1">[$1]</a>';
    const isSeen = /pause/.test(told);
    find("output").innerHTML = (isSeen ? verdict : "") + SENTENCES[known].replace(/\[(BLOCK-\d+)\]/, link);
    if (isSeen) verdict = "";
  }

  function draw() {
    const [taken = line.length, backlog = 0, , isPaused] = row();
    const first = 223 + 14 * (backlog > LIMIT); // the packet over the limit stands over it
    line.forEach((dot, n) => place(dot, n < taken ? 301 - 14 * n
      : n < taken + backlog ? first - 14 * (n - taken) : 71 - 14 * (n - taken - backlog)));
    flood.dataset.state = isGone() ? "gone" : isPaused ? "paused" : backlog ? "stalled" : "";
    find(".state").textContent = isPaused ? "paused" : "";
    find(".lost").textContent = isGone() ? "disconnected" : "";
    flood.querySelectorAll(".counts b").forEach((count, n) => (count.textContent = counts[n]));
    for (const slider of [publish, read]) slider.parentElement.querySelector("b").textContent = slider.value;
  }

  function stop() {
    clearInterval(timer);
    timer = 0;
    play.textContent = "Play";
  }

  function go() {
    if (isGone() && !line.length) start();
    play.textContent = "Stop";
    timer ||= setInterval(() => {
      if (document.hidden) return;
      [Number(publish.value), Number(read.value), 1].forEach((pace, kind) => {
        for (due[kind] += (pace * TICK_MS) / 1000; due[kind] >= 1 && timer; due[kind]--) step(kind);
      });
    }, TICK_MS);
  }

  let isStopped = matchMedia("(prefers-reduced-motion: reduce)").matches; // by its user
  flood.onsubmit = () => false;
  flood.oninput = ({ target }) => (target.type === "range" ? draw() : start());
  anew.onclick = start;
  play.onclick = () => {
    isStopped = Boolean(timer);
    (isStopped ? stop : go)();
  };
  flood.onclick = ({ target: { dataset } }) => {
    if (dataset.guess) return ask(dataset.guess);
    if (!dataset.step) return;
    isStopped = true;
    stop();
    step(Number(dataset.step));
  };

  // One shouts, and one sleeps: shows what is lost, and has the rest of the picture appear
  function ask(text) {
    verdict = `${text} `;
    [publish.value, read.value, soft.value, hard.value, whose.value] = [8, 0, "queue", "block", "own"];
    flood.classList.add("live");
    start();
    if (isStopped) for (let n = 0; n < 15; n++) step(0);
    else go();
  }

  find("fieldset").hidden = false; // without scripts it is
  find("output").textContent = "Guess first.";
  new IntersectionObserver(([{ isIntersecting }]) => {
    if (flood.matches(".live")) (isIntersecting && !isStopped ? go : stop)();
  }).observe(flood);
}
